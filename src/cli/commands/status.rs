//! `ckptfs status`: lists the mounts of this machine and their statistics.

use std::collections::HashMap;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::mount::lifecycle::liveness::{Liveness, LivenessProbe};
use crate::mount::lifecycle::stale_mounts::ANSWER_TIMEOUT;
use crate::mount::lifecycle::stuck_paths;
use crate::mount::{MountError, MountStats};
use crate::mount_info::mountinfo::{self, MountEntry, PathHandle, to_display};

use crate::cli::args::StatusArgs;
use crate::cli::error::CommandError;
use crate::cli::terminal_text::{format_bytes, one_line};

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
        return Ok(write_mounts(&probe_mounts(&mut pending)?, args.json, out)?);
    }
    // Not through the filter of other commands: a closed output ends the watch.
    let mut out = io::stdout();
    loop {
        let began = Instant::now();
        let mounts = probe_mounts(&mut pending)?;
        let mut text = Vec::new();
        if args.json {
            serde_json::to_writer(&mut text, &mounts).map_err(io::Error::from)?;
            text.push(b'\n');
        } else {
            if out.is_terminal() {
                text.extend(b"\x1b[H\x1b[2J");
            }
            write_mounts(&mounts, false, &mut text)?;
        }
        match out.write_all(&text).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            done => done?,
        }
        std::thread::sleep(WATCH_INTERVAL.saturating_sub(began.elapsed()));
    }
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

fn write_mounts(mounts: &[MountReport], json: bool, out: &mut dyn Write) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, mounts)?;
        return writeln!(out);
    }
    if mounts.is_empty() {
        return writeln!(out, "no mounts");
    }
    let heads =
        ["MOUNTPOINT", "SOURCE", "UP", "SERVED", "VIRTUAL FILES", "CACHE", "READ AHEAD", "ERRORS"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for mount in mounts {
        let is_removed = mount.stats.as_ref().is_some_and(|stats| stats.source_removed);
        let source = one_line(&mount.source) + if is_removed { REMOVED_SUFFIX } else { "" };
        let mut row = vec![one_line(&mount.mountpoint), source];
        match &mount.stats {
            Some(stats) => row.extend(stats_cells(stats)),
            None => row.push(state_text(mount)),
        }
        rows.push(row);
    }
    // A mount without statistics has its state in the last column of its row.
    let width = |column: usize| {
        let cells = rows.iter().filter(|row| row.len() > column + 1).map(|row| &row[column]);
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = width(column);
            line += &format!("{cell:<width$}  ");
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Follows the path of a source that was removed.
const REMOVED_SUFFIX: &str = " (REMOVED: unmount and mount again)";

fn state_text(mount: &MountReport) -> String {
    match mount.state {
        MountState::Alive => "answers, but without statistics".to_owned(),
        MountState::Dead => {
            "DEAD: its daemon was killed; ckptfs unmount or mount removes it".to_owned()
        }
        MountState::NotAnswering => {
            "NOT ANSWERING: its daemon is stuck; ckptfs unmount --lazy removes it".to_owned()
        }
        MountState::NotPermitted => "another user's: not permitted to look".to_owned(),
        MountState::Hidden => "hidden: another mount lies over it".to_owned(),
        MountState::Failed => format!("FAILED: {}", mount.reason.as_deref().unwrap_or("unknown")),
    }
}

fn stats_cells(stats: &MountStats) -> [String; 6] {
    let virtual_files = match stats.virtual_files.refused {
        0 => stats.virtual_files.known.to_string(),
        refused => format!("{} ({refused} refused)", stats.virtual_files.known),
    };
    let cache = format!(
        "{} of {}",
        format_bytes(stats.cache.held_bytes),
        format_bytes(stats.cache.budget_bytes)
    );
    let ahead = match stats.prefetch.fetched {
        0 => "-".to_owned(),
        fetched => {
            let share = |part: u64| 100.0 * part as f64 / fetched as f64;
            let (used, wasted) = (share(stats.prefetch.used), share(stats.prefetch.wasted));
            let replayed = match share(stats.prefetch.replayed) {
                0.0 => String::new(),
                replayed => format!(", {replayed:.0}% remembered"),
            };
            format!("{used:.0}% used, {wasted:.0}% wasted{replayed}")
        }
    };
    [
        format_duration(stats.uptime_s),
        format_bytes(stats.bytes_served),
        virtual_files,
        cache,
        ahead,
        stats.errors.to_string(),
    ]
}

/// Formats a duration in its two largest units.
fn format_duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match () {
        () if days > 0 => format!("{days}d {}h", hours % 24),
        () if hours > 0 => format!("{hours}h {}m", minutes % 60),
        () if minutes > 0 => format!("{minutes}m {}s", seconds % 60),
        () => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(mountpoint: &str, state: MountState, stats: Option<MountStats>) -> MountReport {
        let (source, stats) = ("/models".to_owned(), stats.map(Box::new));
        MountReport { mountpoint: mountpoint.to_owned(), source, state, reason: None, stats }
    }

    #[test]
    fn a_table_of_mounts_of_every_kind() {
        let mut stats =
            MountStats { uptime_s: 90, bytes_served: 2_200_000_000, ..MountStats::default() };
        stats.virtual_files.known = 3;
        stats.prefetch.fetched = 100;
        stats.prefetch.used = 90;
        stats.prefetch.replayed = 40;
        let mounts = [
            mount("/a", MountState::Alive, Some(stats)),
            mount("/dead\x1b\nmount", MountState::Dead, None),
        ];
        let mut text = Vec::new();
        write_mounts(&mounts, false, &mut text).unwrap();
        let expected = "\
MOUNTPOINT             SOURCE   UP      SERVED  VIRTUAL FILES  CACHE               READ AHEAD                           ERRORS
/a                     /models  1m 30s  2.2 GB  3              0 bytes of 0 bytes  90% used, 0% wasted, 40% remembered  0
/dead\\u{1b}\\nmount  /models  DEAD: its daemon was killed; ckptfs unmount or mount removes it
";
        let text = String::from_utf8(text).unwrap();
        let squeezed = |text: &str| {
            text.lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect::<Vec<_>>()
        };
        assert_eq!(squeezed(&text), squeezed(expected), "{text}");
    }

    #[test]
    fn times_in_words() {
        assert_eq!(format_duration(59), "59s");
        assert_eq!(format_duration(3600), "1h 0m");
        assert_eq!(format_duration(90_000), "1d 1h");
    }
}
