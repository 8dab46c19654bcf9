//! `ckptfs mount`: from arguments to a mount that answers, in the foreground or as a daemon.

mod background;
mod fstab_options;
mod lifecycle;
mod log;
mod malloc_tuning;
pub mod metrics;
pub mod option_bounds;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::net::TcpListener;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};

use crate::mount::lifecycle::{liveness, mountpoint};
use crate::mount::{self, MountOptions, MountSession};

use crate::cli::args::{Command, CommandLine, MountArgs};
use crate::cli::{CommandError, EXIT_FAILED, EXIT_OK, print_note, python_commands};
use background::ParentProcess;
use lifecycle::MountLifecycle;

/// How this process was started.
pub struct Launch {
    caller: Option<ParentProcess>,
    /// Its arguments, with the command's name.
    args: Vec<OsString>,
}

/// Finds out, first of all, and parses the arguments. A process that was started to ask a mount for
/// another has done so, and ends with that code.
pub fn parse_launch(given: Vec<OsString>) -> Result<(CommandLine, Launch), u8> {
    if let [_, first, path] = &given[..]
        && first == liveness::PROBE_COMMAND
    {
        let mut out = io::stdout();
        // Where the process is not a program of Rust's, nobody does it at the end.
        let told = liveness::run_probe_command(path.as_ref(), &mut out).and_then(|()| out.flush());
        return Err(if told.is_ok() { EXIT_OK } else { EXIT_FAILED });
    }
    let caller = background::become_daemon();
    liveness::probe_by_process();
    let mut command = python_commands::add_python_commands(CommandLine::command());
    // Only then it knows `help`.
    command.build();
    let from_mount8 = fstab_options::is_from_mount8(&given, &command);
    let mut whole = given.clone();
    if from_mount8 {
        whole.insert(1, "mount".into());
    }
    let args = parse(&whole, from_mount8).unwrap_or_else(|error| error.exit());
    Ok((args, Launch { caller, args: given }))
}

impl Launch {
    /// Whether another process of ours started this one to serve a mount.
    pub fn is_daemon(&self) -> bool {
        self.caller.is_some()
    }
}

fn parse(given: &[OsString], from_mount8: bool) -> Result<CommandLine, clap::Error> {
    let mut command = python_commands::add_python_commands(CommandLine::command());
    let parsed = |command: &mut clap::Command, given: &[OsString]| {
        let matches = command.try_get_matches_from_mut(given)?;
        CommandLine::from_arg_matches(&matches).map_err(|error| error.format(command))
    };
    let args = parsed(&mut command, given)?;
    let Command::Mount(mount) = &args.command else {
        return Ok(args);
    };
    let Some(table) = command.find_subcommand("mount") else {
        return Ok(args);
    };
    let found =
        fstab_options::long_options(&mount.options, table, from_mount8).map_err(|refused| {
            table.clone().bin_name("ckptfs mount").error(ErrorKind::UnknownArgument, refused)
        })?;
    // In front, so that what was said as an option of its own has the last word.
    let (start, rest) = given.split_at(2.min(given.len()));
    parsed(&mut command, &[start, &found, rest].concat())
}

pub fn run(args: &MountArgs, started: Launch) -> Result<(), CommandError> {
    match started.caller {
        None if args.foreground => {
            let ready = |notes: Vec<String>, _: Option<&File>| {
                notes.iter().for_each(|text| print_note(text));
                Ok(())
            };
            let (control, mounted, page) = start(args, true, ready)?;
            control.run_until_end(&mounted, page)
        }
        None => {
            mountpoint::require_free_descriptors(&args.mountpoint)?;
            background::spawn_daemon(&started.args)
        }
        Some(caller) => {
            let mut caller = Some(caller);
            let ready = |notes: Vec<String>, log: Option<&File>| match caller.take() {
                Some(caller) => caller.report_ready(notes, log),
                None => Ok(()),
            };
            let outcome = start(args, false, ready);
            let (control, mounted, page) = match (outcome, caller) {
                (Ok(mounted), _) => mounted,
                (Err(failure), Some(caller)) => {
                    let code = failure.code;
                    // Who started us may be gone; then there is nobody to tell.
                    let _ = caller.report_failure(failure);
                    return Err(CommandError::already_reported(code));
                }
                // It went away before the mount was ready: nobody wants it.
                (Err(failure), None) => return Err(failure),
            };
            let outcome = control.run_until_end(&mounted, page);
            if let Err(failure) = &outcome {
                tracing::error!("{}", failure.message);
            }
            outcome
        }
    }
}

/// Said once, where it was mounted.
const UNPRIVILEGED_NOTE: &str = "mounted without privileges: files that are shown as they are go through \
     ckptfs too, and the kernel reads less ahead; root has both";

type StartedMount = (MountLifecycle, MountSession, Option<TcpListener>);

/// Mounts, and tells that it is ready.
fn start(
    args: &MountArgs,
    in_foreground: bool,
    ready: impl FnOnce(Vec<String>, Option<&File>) -> io::Result<()>,
) -> Result<StartedMount, CommandError> {
    let log::MountLog { file, note } = log::start(args, in_foreground)?;
    let cannot = |what: &str, error: io::Error, remedy: &str| {
        CommandError::new(EXIT_FAILED, format!("cannot {what}: {error}"), remedy)
    };
    // Everything that follows opens files.
    mountpoint::require_free_descriptors(&args.mountpoint)?;
    // Whoever looks for the daemon looks for this name, also where it was run from a link.
    let _ = rustix::thread::set_name(c"ckptfs");
    let control = MountLifecycle::new()
        .map_err(|e| cannot("hear signals", e, "raise the limit on open files (ulimit -n)"))?;
    let mut notes: Vec<String> = note.into_iter().collect();
    let page = match args.metrics {
        None => None,
        Some(address) => {
            let page = TcpListener::bind(address).and_then(|page| {
                page.set_nonblocking(true)?;
                notes.push(format!("metrics at http://{}/metrics", page.local_addr()?));
                Ok(page)
            });
            Some(page.map_err(|e| {
                let remedy = "choose another port: one that no program has, above 1023 for users";
                cannot(&format!("serve metrics at {address}"), e, remedy)
            })?)
        }
    };
    let mounted = mount::mount(&mount_options(args)?)?;
    if !mounted.is_privileged() {
        notes.push(UNPRIVILEGED_NOTE.to_owned());
    }
    tracing::info!("{}: mounted at {}", args.source.display(), mounted.mountpoint().display());
    ready(notes, file.as_ref()).map_err(|e| {
        let remedy = "mount it again, and let the command that mounts come to its end";
        cannot("tell that the mount is ready", e, remedy)
    })?;
    Ok((control, mounted, page))
}

fn mount_options(args: &MountArgs) -> Result<MountOptions, CommandError> {
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
        no_remember,
        nonempty,
        log_file: _,
        verbose: _,
        metrics: _,
        options: _,
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
        trace_dir: if *no_remember { None } else { default_trace_dir() },
        nonempty: *nonempty,
        view: view_args.options()?,
    })
}

/// Where the order of loads is kept: by the XDG Base Directory Specification, by which paths that are not
/// absolute do not count. A daemon without a home keeps none.
fn default_trace_dir() -> Option<PathBuf> {
    let named = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    Some(caches?.join("ckptfs/orders"))
}

impl From<mount::MountError> for CommandError {
    fn from(error: mount::MountError) -> Self {
        match error {
            mount::MountError::View(error) => CommandError::from(error),
            mount::MountError::NoCheckpoint(error) => CommandError::from(error),
            error => CommandError::new(EXIT_FAILED, &error, error.remedy()),
        }
    }
}
