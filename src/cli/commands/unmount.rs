//! `ckptfs unmount`: unmounts, and waits for the daemon to end.

use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use crate::mount::lifecycle::daemon::Daemon;
use crate::mount::lifecycle::stale_mounts::{self, MountServer};
use crate::mount::lifecycle::stuck_paths;
use crate::mount::lifecycle::superblock::Superblock;

use crate::cli::args::UnmountArgs;
use crate::cli::each_path::for_each_path;
use crate::cli::error::{CommandError, EXIT_FAILED, ErrorFormat};
use crate::cli::output::print_note;
use crate::cli::terminal_text::one_line;

/// The daemon of an unused mount ends within milliseconds. After this time, its superblock tells whether it is still
/// in use elsewhere.
const EXPECTED_END_TIMEOUT: Duration = Duration::from_secs(1);

/// How much longer the daemon of an unused mount may take without a message.
const NOTE_DELAY: Duration = Duration::from_secs(2);

/// How much longer a daemon has to end. It frees memory and closes files, perhaps on an overloaded machine.
const END_TIMEOUT: Duration = Duration::from_secs(12);

/// The most other mounts that a message lists.
const MAX_LISTED: usize = 3;

pub fn run(args: &UnmountArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    for_each_path(&args.paths, ErrorFormat::Text, out, |path, out| unmount(path, args.lazy, out))
}

fn unmount(path: &Path, is_lazy: bool, out: &mut dyn Write) -> Result<(), CommandError> {
    // The mount itself may be stuck.
    stuck_paths::check_parents(path)?;
    let done = stale_mounts::unmount(path, is_lazy)?;
    let path = one_line(&done.path.display().to_string()).into_owned();
    let action = if is_lazy { "detached" } else { "unmounted" };
    match done.server {
        MountServer::Dead => writeln!(out, "{path}: was dead, removed")?,
        MountServer::Unknown(superblock) => {
            let shown = list_other_mounts(&superblock);
            writeln!(out, "{path}: {action}{shown}; cannot tell whether its daemon has ended")?;
        }
        MountServer::Process(daemon, _) if daemon.wait(EXPECTED_END_TIMEOUT) => {}
        MountServer::Process(daemon, superblock) if is_lazy || !superblock.is_gone() => {
            let shown = list_other_mounts(&superblock);
            let daemon_end = describe_daemon_end(&daemon, &superblock, !shown.is_empty());
            writeln!(out, "{path}: {action}{shown}; its daemon ({}) {daemon_end}", daemon.pid())?;
        }
        MountServer::Process(daemon, _) => wait_for_daemon(&path, &daemon)?,
    }
    Ok(())
}

/// The mounts that still show a superblock, as part of a sentence.
fn list_other_mounts(superblock: &Superblock) -> String {
    let mounts = superblock.mounts();
    let mut text = String::new();
    for (n, mount) in mounts.iter().take(MAX_LISTED).enumerate() {
        let before = if n == 0 { ", and still shown at" } else { "," };
        // Writing to a string does not fail.
        let _ = write!(text, "{before} {}", one_line(&mount.to_string()));
    }
    match mounts.len().checked_sub(MAX_LISTED) {
        None | Some(0) => text,
        Some(more) => format!("{text} and {more} more"),
    }
}

/// When and how a running daemon will end, as the end of a sentence.
fn describe_daemon_end(daemon: &Daemon, superblock: &Superblock, is_shown: bool) -> String {
    match (daemon.is_stopped(), superblock.is_gone()) {
        (_, true) => format!("{}: {}", daemon_state(daemon), remedy(daemon)),
        // Killing it would fail the readers of the other mounts.
        (true, false) => format!("is stopped: {}", resume(daemon)),
        (false, false) if is_shown => "ends when it is unmounted there too".to_owned(),
        (false, false) => "ends with the last reader".to_owned(),
    }
}

fn wait_for_daemon(path: &str, daemon: &Daemon) -> Result<(), CommandError> {
    if daemon.wait(NOTE_DELAY) {
        return Ok(());
    }
    let pid = daemon.pid();
    print_note(&format!(
        "{path}: unmounted; waiting for its daemon ({pid}), which {}: {}",
        daemon_state(daemon),
        remedy(daemon)
    ));
    if daemon.wait(END_TIMEOUT) {
        return Ok(());
    }
    let message = format!("{path}: unmounted, but its daemon ({pid}) has not ended");
    Err(CommandError::new(EXIT_FAILED, message, remedy(daemon)))
}

fn daemon_state(daemon: &Daemon) -> &'static str {
    if daemon.is_stopped() { "is stopped" } else { "still runs" }
}

fn resume(daemon: &Daemon) -> String {
    format!("kill -CONT {} lets it go on", daemon.pid())
}

/// How to end a daemon that runs on although its mount is unused.
fn remedy(daemon: &Daemon) -> String {
    let pid = daemon.pid();
    match daemon.is_stopped() {
        true => format!("{}, kill -KILL {pid} ends it", resume(daemon)),
        false => format!(
            "its source may hang, or it may be short of memory; kill -KILL {pid} ends it, and nothing is lost"
        ),
    }
}
