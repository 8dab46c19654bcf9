//! `ckptfs status`: lists the mounts of this machine, their statistics and their last errors.

mod redraw;
mod text;

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::mount::lifecycle::mount_states::{MountObserver, MountState, ObservedMount};
use crate::mount::{MountError, MountStats};
use crate::mount_info::mountinfo::to_display;

use crate::cli::args::StatusArgs;
use crate::cli::error::CommandError;
use crate::cli::terminal_text::terminal_size;
use redraw::Redraw;

/// How often `--watch` prints.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// One mount, as the JSON has it.
#[derive(Debug, Serialize)]
struct MountReport {
    mountpoint: String,
    source: String,
    state: MountState,
    /// Why the state is not known: the system's error, or the directory that keeps this user out.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    stats: Option<Box<MountStats>>,
}

impl MountReport {
    fn of(observed: ObservedMount) -> MountReport {
        let ObservedMount { entry, state, reason, stats } = observed;
        MountReport {
            mountpoint: to_display(entry.mountpoint.as_os_str()),
            source: to_display(&entry.source),
            state,
            reason,
            stats,
        }
    }
}

pub fn run(args: &StatusArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let mut observer = MountObserver::default();
    if !args.watch {
        let mounts = report_mounts(&mut observer)?;
        if args.json {
            serde_json::to_writer_pretty(&mut *out, &mounts).map_err(io::Error::from)?;
            writeln!(out)?;
        } else {
            out.write_all(plain_text(&mounts).as_bytes())?;
        }
        return Ok(());
    }
    // Not through the filter of other commands: a closed output ends the watch.
    let mut out = io::stdout();
    let mut redraw = Redraw::default();
    loop {
        let began = Instant::now();
        let mounts = report_mounts(&mut observer)?;
        let text = if args.json {
            serde_json::to_string(&mounts).map_err(io::Error::from)? + "\n"
        } else if out.is_terminal() {
            let size = terminal_size();
            redraw.frame(&text::mount_lines(&mounts, now(), size.columns), size)
        } else {
            // A blank line between two times.
            plain_text(&mounts) + "\n"
        };
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            done => done?,
        }
        std::thread::sleep(WATCH_INTERVAL.saturating_sub(began.elapsed()));
    }
}

fn plain_text(mounts: &[MountReport]) -> String {
    text::mount_lines(mounts, now(), terminal_size().columns).join("\n") + "\n"
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn report_mounts(observer: &mut MountObserver) -> Result<Vec<MountReport>, MountError> {
    Ok(observer.observe()?.into_iter().map(MountReport::of).collect())
}
