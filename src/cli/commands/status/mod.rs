//! `ckptfs status`: lists the mounts of this machine, their statistics and their last errors.

mod redraw;
mod text;

use std::collections::HashMap;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::mount::lifecycle::liveness::{Liveness, LivenessProbe};
use crate::mount::lifecycle::stale_mounts::ANSWER_TIMEOUT;
use crate::mount::lifecycle::stuck_paths;
use crate::mount::{MountError, MountStats};
use crate::mount_info::mountinfo::{self, MountEntry, PathHandle, to_display};

use crate::cli::args::StatusArgs;
use crate::cli::error::CommandError;
use crate::cli::terminal_text::{TerminalSize, terminal_size};
use redraw::Redraw;

/// How often `--watch` prints.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// One mount, as the JSON has it.
#[derive(Debug, Serialize)]
struct MountReport {
    mountpoint: String,
    source: String,
    state: MountState,
    /// The system's error, if the probe failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    stats: Option<Box<MountStats>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum MountState {
    Alive,
    Dead,
    NotAnswering,
    NotPermitted,
    /// Another mount lies over it.
    Hidden,
    Failed,
}

pub fn run(args: &StatusArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let mut pending = HashMap::new();
    if !args.watch {
        let mounts = probe_mounts(&mut pending)?;
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
        let mounts = probe_mounts(&mut pending)?;
        let text = if args.json {
            serde_json::to_string(&mounts).map_err(io::Error::from)? + "\n"
        } else if out.is_terminal() {
            let TerminalSize { columns, rows } = terminal_size();
            redraw.frame(&text::mount_lines(&mounts, now(), columns), rows)
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

/// Probes all mounts at once. A probe without an answer stays pending, so that a stuck mount is probed only once.
fn probe_mounts(
    pending: &mut HashMap<MountEntry, LivenessProbe>,
) -> Result<Vec<MountReport>, MountError> {
    let entries = mountinfo::ckptfs_mounts()?;
    // The path of a mount inside a stuck mount cannot be looked up.
    let is_cut_off: Vec<bool> = entries
        .iter()
        .map(|entry| stuck_paths::check_parents(&entry.mountpoint).is_err())
        .collect();
    let is_hidden: Vec<bool> = entries
        .iter()
        .zip(&is_cut_off)
        .map(|(entry, is_cut_off)| {
            let shows = |handle: PathHandle| handle.mount_id() == entry.id;
            !is_cut_off && !PathHandle::open(&entry.mountpoint).is_ok_and(shows)
        })
        .collect();
    pending.retain(|entry, _| entries.contains(entry));
    let places = entries.iter().zip(is_hidden.iter().zip(&is_cut_off));
    for (entry, _) in places.filter(|(_, (hidden, cut_off))| !**hidden && !**cut_off) {
        pending.entry(entry.clone()).or_insert_with(|| LivenessProbe::start(&entry.mountpoint));
    }
    let until = Instant::now() + ANSWER_TIMEOUT;
    let mut mounts = Vec::with_capacity(entries.len());
    for (entry, hidden) in entries.iter().zip(is_hidden) {
        let question = pending.get_mut(entry).filter(|_| !hidden);
        let answer =
            question.and_then(|asked| asked.wait(until.saturating_duration_since(Instant::now())));
        if answer.is_some() {
            pending.remove(entry);
        }
        let (state, reason, stats) = match answer {
            _ if hidden => (MountState::Hidden, None, None),
            None | Some(Liveness::Silent) => (MountState::NotAnswering, None, None),
            Some(Liveness::Alive(stats)) => (MountState::Alive, None, stats),
            Some(Liveness::Dead) => (MountState::Dead, None, None),
            Some(Liveness::NotPermitted) => (MountState::NotPermitted, None, None),
            Some(Liveness::Failed(e)) => {
                (MountState::Failed, Some(io::Error::from(e).to_string()), None)
            }
        };
        mounts.push(MountReport {
            mountpoint: to_display(entry.mountpoint.as_os_str()),
            source: to_display(&entry.source),
            state,
            reason,
            stats,
        });
    }
    Ok(mounts)
}
