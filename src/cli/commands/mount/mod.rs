//! `ckptfs mount`: mounts in the foreground, or starts a daemon that does.

mod background;
mod fstab_options;
mod lifecycle;
pub mod log;
mod malloc_tuning;
pub mod metrics;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::net::TcpListener;
use std::path::Path;

use clap::FromArgMatches;
use clap::error::ErrorKind;

use crate::cache::TraceOptions;
use crate::clipped_text::clip;
use crate::mount::lifecycle::{liveness, mountpoint};
use crate::mount::stats::LogStats;
use crate::mount::{self, MountOptions, MountSession, MountSurvey};
use crate::private_folder::xdg_folder;
use crate::shell_word::shell_word;
use crate::source::{reads_stdin, shown_path};
use crate::view::{RefusedView, Survey};

use crate::cli::args::{Command, CommandLine, MountArgs, RememberedLoads};
use crate::cli::error::{CommandError, EXIT_FAILED, EXIT_OK};
use crate::cli::output::print_note;
use crate::cli::terminal_text::format_count;
use crate::cli::{python_commands, usage_error};
use background::ParentProcess;
use lifecycle::MountLifecycle;

/// How this process was started.
pub struct Launch {
    /// The parent that waits for a report, if this process is a daemon.
    parent: Option<ParentProcess>,
    /// The arguments of this process, with the command's name.
    words: Vec<OsString>,
}

impl Launch {
    /// Whether another process of ours started this one to serve a mount.
    pub fn is_daemon(&self) -> bool {
        self.parent.is_some()
    }
}

/// Parses the arguments, and finds out how this process was started. Must be called before everything else.
///
/// A process that was started to probe a mount has done so when this returns an error: its exit code.
pub fn parse_launch(words: Vec<OsString>) -> Result<(CommandLine, Launch), u8> {
    if let [_, first, path] = &words[..]
        && first == liveness::PROBE_COMMAND
    {
        let mut out = io::stdout();
        // In a process that is no Rust program, nothing flushes standard output at the end.
        let written = liveness::run_probe_command(path.as_ref(), &mut out);
        let is_written = written.and_then(|()| out.flush()).is_ok();
        return Err(if is_written { EXIT_OK } else { EXIT_FAILED });
    }
    let parent = background::become_daemon();
    liveness::probe_by_process();
    let mut command = python_commands::command_table();
    // This adds the command `help`.
    command.build();
    let from_mount8 = fstab_options::is_from_mount8(&words, &command);
    let mut command_line = words.clone();
    if from_mount8 {
        command_line.insert(1, "mount".into());
    }
    match parse(&command_line, from_mount8) {
        Ok(args) => Ok((args, Launch { parent, words })),
        Err(error) => Err(usage_error::report(&error, &command_line, &command)),
    }
}

fn parse(words: &[OsString], from_mount8: bool) -> Result<CommandLine, clap::Error> {
    let mut command = python_commands::command_table();
    let parse_words = |command: &mut clap::Command, words: &[OsString]| {
        let matches = command.try_get_matches_from_mut(words)?;
        CommandLine::from_arg_matches(&matches).map_err(|error| error.format(command))
    };
    let args = parse_words(&mut command, words)?;
    let Command::Mount(mount) = &args.command else {
        return Ok(args);
    };
    let Some(table) = command.find_subcommand("mount") else {
        return Ok(args);
    };
    let long_options = fstab_options::long_options(&mount.options, table, from_mount8);
    let long_options = long_options.map_err(|error| {
        table.clone().bin_name("ckptfs mount").error(ErrorKind::UnknownArgument, error)
    })?;
    // In front of the other options, which therefore override them.
    let (start, rest) = words.split_at(2.min(words.len()));
    parse_words(&mut command, &[start, &long_options, rest].concat())
}

pub fn run(args: &MountArgs, launch: Launch) -> Result<(), CommandError> {
    match launch.parent {
        None if args.foreground => {
            let on_ready = |notes: Vec<String>, _: Option<&File>| {
                notes.iter().for_each(|text| print_note(text));
                Ok(())
            };
            let (lifecycle, session, listener) = start(args, true, on_ready)?;
            lifecycle.run_until_end(&session, listener)
        }
        None => {
            mountpoint::require_free_descriptors(&args.mountpoint)?;
            background::spawn_daemon(&launch.words, reads_stdin(&args.source))
        }
        Some(parent) => serve_as_daemon(args, parent),
    }
}

fn serve_as_daemon(args: &MountArgs, parent: ParentProcess) -> Result<(), CommandError> {
    let mut parent = Some(parent);
    let on_ready = |notes: Vec<String>, log: Option<&File>| match parent.take() {
        Some(parent) => parent.report_ready(notes, log),
        None => Ok(()),
    };
    let (lifecycle, session, listener) = match (start(args, false, on_ready), parent) {
        (Ok(started), _) => started,
        (Err(error), Some(parent)) => {
            let code = error.code;
            // If the parent has gone, no process waits for the report.
            let _ = parent.report_failure(error);
            return Err(CommandError::already_reported(code));
        }
        // The parent went away before the mount was ready.
        (Err(error), None) => return Err(error),
    };
    let result = lifecycle.run_until_end(&session, listener);
    if let Err(error) = &result {
        tracing::error!("{}", error.whole_message());
    }
    result
}

/// Printed with `--verbose`: it changes nothing that was asked for, and `doctor` says it too.
const UNPRIVILEGED_NOTE: &str = "mounted without privileges: files shown unchanged go through \
     ckptfs too, and the kernel reads less ahead; mount as root to lift both limits";

/// Maximum number of refused views that a mount explains.
const MAX_EXPLAINED_VIEWS: usize = 3;

/// The command that explains what a mount shows.
fn list_command(args: &MountArgs) -> String {
    let options = args.view_args.to_shell_options().join(" ");
    let space = if options.is_empty() { "" } else { " " };
    format!("ckptfs ls -r{space}{options} {}", shell_word(&args.source))
}

/// Notes about files of a recipe that are not shown.
fn refused_view_notes(refused: &[RefusedView], list_command: &str) -> Vec<String> {
    let explain = |RefusedView { path, refusal }: &RefusedView| {
        let what = match path {
            None => "nothing of the recipe is shown: ".to_owned(),
            Some(path) if refusal.path.ends_with(path) => "not shown: ".to_owned(),
            // The reason names one of its sources.
            Some(path) => format!("not shown: {path}: "),
        };
        clip(&format!("{what}{}; what to do: {}", refusal.reason, refusal.remedy))
    };
    let mut notes: Vec<String> = refused.iter().take(MAX_EXPLAINED_VIEWS).map(explain).collect();
    if let more @ 1.. = refused.len().saturating_sub(MAX_EXPLAINED_VIEWS) {
        let are = if more == 1 { "file is" } else { "files are" };
        notes.push(format!("{more} more {are} not shown; {list_command} says why"));
    }
    notes
}

/// The note of a mount in which nothing becomes a virtual file.
fn nothing_virtual_note(source: &Path, survey: &Survey, list_command: &str) -> Option<String> {
    let Survey { has_virtual_file, refused, kept, safetensors, not_checkpoints } = *survey;
    if has_virtual_file {
        return None;
    }
    let mut findings = Vec::new();
    match () {
        () if refused > 0 => findings.push(format!("{} refused", count_are(refused, "checkpoint"))),
        () if kept > 0 => {
            findings.push(format!("{} kept unchanged", count_are(kept, "checkpoint")));
        }
        () if safetensors > 0 => {
            let files = count_are(safetensors, "safetensors file");
            findings.push(format!("{files} shown unchanged"));
        }
        () if not_checkpoints == 0 => findings.push("no checkpoint is in it".to_owned()),
        () => {}
    }
    match not_checkpoints {
        0 => {}
        1 => findings.push("1 file named as a checkpoint is not one".to_owned()),
        n => findings.push(format!("{n} files named as checkpoints are not checkpoints")),
    }
    let has_reasons = refused > 0 || kept > 0 || not_checkpoints > 0;
    let lists = if has_reasons { "says why" } else { "lists what is there" };
    Some(format!(
        "nothing in {} becomes a virtual file: {}; {list_command} {lists}",
        source.display(),
        findings.join(", and "),
    ))
}

/// A count and its verb: `1 checkpoint is`, `2 checkpoints are`.
fn count_are(n: usize, noun: &str) -> String {
    format!("{} {}", format_count(n, noun), if n == 1 { "is" } else { "are" })
}

type StartedMount = (MountLifecycle, MountSession, Option<TcpListener>);

/// Mounts, and reports that the mount is ready.
fn start(
    args: &MountArgs,
    in_foreground: bool,
    on_ready: impl FnOnce(Vec<String>, Option<&File>) -> io::Result<()>,
) -> Result<StartedMount, CommandError> {
    let log::MountLog { file, note, stats } = log::start(args, in_foreground)?;
    let failed = |action: &str, error: io::Error, remedy: &str| {
        CommandError::new(EXIT_FAILED, format!("cannot {action}: {error}"), remedy)
    };
    // Everything that follows opens files.
    mountpoint::require_free_descriptors(&args.mountpoint)?;
    // The daemon is found by this name, even if it was run from a link.
    let _ = rustix::thread::set_name(c"ckptfs");
    let lifecycle = MountLifecycle::new()
        .map_err(|e| failed("handle signals", e, "raise the limit on open files (ulimit -n)"))?;
    let mut notes: Vec<String> = note.into_iter().collect();
    let listener = match args.metrics {
        None => None,
        Some(address) => {
            let listener = TcpListener::bind(address).and_then(|listener| {
                listener.set_nonblocking(true)?;
                notes.push(format!("metrics at http://{}/metrics", listener.local_addr()?));
                Ok(listener)
            });
            Some(listener.map_err(|e| {
                let remedy = "choose another port: a free one, above 1023 unless you are root";
                failed(&format!("serve metrics at {address}"), e, remedy)
            })?)
        }
    };
    let session = mount::mount(&mount_options(args, stats)?)?;
    if !in_foreground && reads_stdin(&args.source) {
        background::close_stdin();
    }
    if !session.is_privileged() && args.verbose > 0 {
        notes.push(UNPRIVILEGED_NOTE.to_owned());
    }
    let MountSurvey { shown, refused_views } = session.survey();
    let list_command = list_command(args);
    notes.extend(refused_view_notes(refused_views, &list_command));
    let nothing = |survey| nothing_virtual_note(&args.source, survey, &list_command);
    notes.extend(shown.as_ref().and_then(nothing));
    tracing::info!(
        "{}: mounted at {}",
        shown_path(&args.source).display(),
        session.mountpoint().display()
    );
    on_ready(notes, file.as_ref()).map_err(|e| {
        let remedy = "mount it again, and wait for the command to end";
        failed("report that the mount is ready", e, remedy)
    })?;
    Ok((lifecycle, session, listener))
}

fn mount_options(args: &MountArgs, log: LogStats) -> Result<MountOptions, CommandError> {
    let MountArgs {
        source,
        mountpoint,
        view_args,
        foreground: _,
        allow_other,
        uid,
        gid,
        memory,
        threads,
        readahead,
        no_passthrough,
        remember,
        nonempty,
        log_file: _,
        verbose: _,
        metrics: _,
        options: _,
        store_args: _,
    } = args;
    Ok(MountOptions {
        source: source.clone(),
        mountpoint: mountpoint.clone(),
        allow_other: *allow_other,
        uid: *uid,
        gid: *gid,
        memory: *memory,
        threads: threads.map(usize::from),
        readahead: *readahead,
        passthrough: !no_passthrough,
        traces: trace_options(*remember),
        nonempty: *nonempty,
        view: view_args.to_options()?,
        log,
    })
}

fn trace_options(remember: RememberedLoads) -> Option<TraceOptions> {
    let local_files = match remember {
        RememberedLoads::Stores => false,
        RememberedLoads::All => true,
        RememberedLoads::None => return None,
    };
    let folder = xdg_folder("XDG_CACHE_HOME", ".cache")?.join("ckptfs/orders");
    Some(TraceOptions { folder, local_files })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_without_virtual_files_says_what_is_there_instead() {
        let note = |survey: Survey| {
            nothing_virtual_note(Path::new("m"), &survey, "ckptfs ls -r m").unwrap_or_default()
        };
        let none = Survey::default();
        for (survey, says) in [
            (none, "no checkpoint is in it; ckptfs ls -r m lists what is there"),
            (
                Survey { safetensors: 1, ..none },
                "1 safetensors file is shown unchanged; ckptfs ls -r m lists what is there",
            ),
            (
                Survey { not_checkpoints: 2, ..none },
                "2 files named as checkpoints are not checkpoints; ckptfs ls -r m says why",
            ),
            (
                Survey { kept: 1, not_checkpoints: 1, safetensors: 3, ..none },
                "1 checkpoint is kept unchanged, and 1 file named as a checkpoint is not one; ckptfs ls -r m says why",
            ),
            (
                Survey { refused: 2, kept: 1, ..none },
                "2 checkpoints are refused; ckptfs ls -r m says why",
            ),
        ] {
            assert_eq!(note(survey), format!("nothing in m becomes a virtual file: {says}"));
        }
        assert_eq!(note(Survey { has_virtual_file: true, not_checkpoints: 1, ..none }), "");
    }
}
