//! `ckptfs unmount`: takes a mount away, and sees its daemon end.

use std::fmt::Write as _;
use std::io::Write;
use std::time::Duration;

use crate::mount::daemon::Daemon;
use crate::mount::heal::{self, Served};
use crate::mount::superblock::Superblock;

use super::args::Unmount;
use super::words::one_line;
use super::{FAILED, Failure, note};

/// The daemon of a mount that nobody uses ends within milliseconds. After this its superblock says
/// whether somebody still uses it elsewhere.
const PROMPT: Duration = Duration::from_secs(1);

/// How much longer a daemon may take without a word, where nobody uses it.
const SILENT: Duration = Duration::from_secs(2);

/// How much longer a daemon has to end: it gives back memory and closes files, also where the machine
/// is overloaded.
const ENDING: Duration = Duration::from_secs(12);

/// Mounts elsewhere that are named.
const MAX_NAMED: usize = 3;

pub fn run(args: &Unmount, out: &mut dyn Write) -> Result<(), Failure> {
    let done = heal::unmount(&args.path, args.lazy)?;
    let path = one_line(&done.path.display().to_string());
    let done_to_it = if args.lazy { "detached" } else { "unmounted" };
    match done.served {
        Served::ByNobody => writeln!(out, "{path}: was dead, taken away")?,
        Served::Unknown(superblock) => {
            let shown = still_shown(&superblock);
            writeln!(
                out,
                "{path}: {done_to_it}{shown}; whether its daemon has ended cannot be told"
            )?;
        }
        Served::By(daemon, _) if daemon.ends(PROMPT) => {}
        Served::By(daemon, superblock) if args.lazy || !superblock.is_gone() => {
            let shown = still_shown(&superblock);
            let rest = rest(&daemon, &superblock, !shown.is_empty());
            writeln!(out, "{path}: {done_to_it}{shown}; its daemon ({}) {rest}", daemon.pid())?;
        }
        Served::By(daemon, _) => see_it_end(&path, &daemon)?,
    }
    Ok(())
}

/// Where a superblock still shows, as the next part of a sentence.
fn still_shown(superblock: &Superblock) -> String {
    let shown = superblock.shown();
    let mut text = String::new();
    for (place, showing) in shown.iter().take(MAX_NAMED).enumerate() {
        let before = if place == 0 { ", and still shown at" } else { "," };
        // Writing to a string does not fail.
        let _ = write!(text, "{before} {}", one_line(&showing.to_string()));
    }
    match shown.len().checked_sub(MAX_NAMED) {
        None | Some(0) => text,
        Some(more) => format!("{text} and {more} more"),
    }
}

/// What becomes of a daemon that has not ended, as the rest of a sentence.
fn rest(daemon: &Daemon, superblock: &Superblock, is_shown: bool) -> String {
    match (daemon.is_stopped(), superblock.is_gone()) {
        (_, true) => format!("{}: {}", state(daemon), remedy(daemon)),
        // To kill it would fail those who use what it serves.
        (true, false) => format!("is stopped: {}", resume(daemon)),
        (false, false) if is_shown => "ends when it is unmounted there too".to_owned(),
        (false, false) => "ends with the last reader".to_owned(),
    }
}

fn see_it_end(path: &str, daemon: &Daemon) -> Result<(), Failure> {
    if daemon.ends(SILENT) {
        return Ok(());
    }
    let pid = daemon.pid();
    note(&format!(
        "{path}: unmounted; waiting for its daemon ({pid}), which {}: {}",
        state(daemon),
        remedy(daemon)
    ));
    if daemon.ends(ENDING) {
        return Ok(());
    }
    let message = format!("{path}: unmounted, but its daemon ({pid}) has not ended");
    Err(Failure::new(FAILED, message, remedy(daemon)))
}

fn state(daemon: &Daemon) -> &'static str {
    if daemon.is_stopped() { "is stopped" } else { "still runs" }
}

fn resume(daemon: &Daemon) -> String {
    format!("kill -CONT {} lets it go on", daemon.pid())
}

/// What ends a daemon that does not end by itself, though nobody uses what it served.
fn remedy(daemon: &Daemon) -> String {
    let pid = daemon.pid();
    match daemon.is_stopped() {
        true => format!("{}, kill -KILL {pid} ends it", resume(daemon)),
        false => format!(
            "its source may hang, or it may be short of memory; kill -KILL {pid} ends it, and nothing is lost"
        ),
    }
}
