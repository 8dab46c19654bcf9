//! `ckptfs unmount`: takes a mount away, and sees its daemon end.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use crate::mount::daemon::Daemon;
use crate::mount::heal::{self, Served};

use super::args::Unmount;
use super::words::one_line;
use super::{FAILED, Failure, note};

/// A daemon ends within milliseconds; who waits for one longer than this wants to know why.
const SILENT: Duration = Duration::from_secs(3);

/// How much longer a daemon has to end: it gives back memory and closes files, also where the machine
/// is overloaded.
const ENDING: Duration = Duration::from_secs(12);

/// The same after a lazy unmount, which is there for those who cannot wait: the daemon of a mount
/// that nobody uses ends within a second.
const ENDING_LAZILY: Duration = Duration::from_secs(1);

pub fn run(args: &Unmount, out: &mut dyn Write) -> Result<(), Failure> {
    let done = heal::unmount(&args.path, args.lazy)?;
    let path = one_line(&done.path.display().to_string());
    match done.served {
        Served::ByNobody => writeln!(out, "{path}: was dead, taken away")?,
        Served::Unknown => {
            writeln!(out, "{path}: unmounted; whether its daemon has ended cannot be told")?;
        }
        Served::By(daemon) if args.lazy => {
            if !daemon.ends(ENDING_LAZILY) {
                let pid = daemon.pid();
                let rest = match daemon.is_stopped() {
                    true => format!("is stopped: {}", remedy(&daemon)),
                    false => "ends with the last reader".to_owned(),
                };
                writeln!(out, "{path}: detached; its daemon ({pid}) {rest}")?;
            }
        }
        Served::By(daemon) => see_it_end(&done.path, &daemon)?,
    }
    Ok(())
}

fn see_it_end(path: &Path, daemon: &Daemon) -> Result<(), Failure> {
    if daemon.ends(SILENT) {
        return Ok(());
    }
    let (path, pid) = (path.display(), daemon.pid());
    let state = if daemon.is_stopped() { "is stopped" } else { "still runs" };
    note(&format!(
        "{path}: unmounted; waiting for its daemon ({pid}), which {state}: {}",
        remedy(daemon)
    ));
    if daemon.ends(ENDING) {
        return Ok(());
    }
    let message = format!("{path}: unmounted, but its daemon ({pid}) has not ended");
    Err(Failure::new(FAILED, message, remedy(daemon)))
}

/// What ends a daemon that does not end by itself.
fn remedy(daemon: &Daemon) -> String {
    let pid = daemon.pid();
    match daemon.is_stopped() {
        true => format!("kill -CONT {pid} lets it go on, kill -KILL {pid} ends it"),
        false => format!(
            "its source may hang, or it may be short of memory; kill -KILL {pid} ends it, and nothing is lost"
        ),
    }
}
