//! Taking mounts away that this process did not make: those whose daemon died, and any that the
//! user wants unmounted.
//!
//! In: a path. Out: what was done; a mount of another type is never touched, and none is ever waited
//! for longer than the times below.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::probe::{self, Answer};
use super::table::{self, Entry, Spot};
use super::{Error, attach};

/// A daemon that lives answers within milliseconds, or within a second where the machine is
/// overloaded; one that has not by then is stuck.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// How long a daemon has to end once its mount is gone: it gives back memory and closes files.
const ENDING: Duration = Duration::from_secs(30);

/// The same after a lazy unmount, which is there for those who cannot wait: the daemon of a mount
/// that nobody uses ends within a second.
const ENDING_LAZILY: Duration = Duration::from_secs(1);

/// Dead mounts over one another at one path that are taken away at most: a bound for the loop.
const DEEP: usize = 64;

/// What shows at a path after the dead were taken away.
#[derive(Debug)]
pub struct Healed {
    /// How many dead mounts were taken away.
    pub dead: usize,
    /// The mount of ours that shows there now, and what it answers.
    pub left: Option<(Entry, Answer)>,
}

/// Takes away the mounts of ours at a path whose daemons are gone.
pub fn heal(path: &Path) -> Result<Healed, Error> {
    for dead in 0..DEEP {
        let spot = Spot::at(path)?;
        let shows = |entry: &Entry| entry.is_ours() && entry.mountpoint == spot.path();
        let Some(entry) = spot.entry()?.filter(shows) else {
            return Ok(Healed { dead, left: None });
        };
        match probe::ask(spot.path(), PATIENCE) {
            Answer::Dead => attach::detach(&spot)?,
            answer => return Ok(Healed { dead, left: Some((entry, answer)) }),
        }
        tracing::info!("{}: took away a mount whose daemon is gone", spot.path().display());
    }
    Err(Error::Io {
        path: path.to_path_buf(),
        action: "take away all the dead mounts there",
        source: std::io::Error::other("there are too many"),
    })
}

/// What became of a mount that was to go.
#[derive(Debug, PartialEq, Eq)]
pub struct Unmounted {
    /// Where it was.
    pub path: PathBuf,
    /// Its daemon.
    pub daemon: Daemon,
}

/// What became of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Daemon {
    /// It had died before.
    WasDead,
    /// It has ended.
    Ended,
    /// It still runs: until its last reader is done, if the unmount was lazy.
    Runs(u32),
    /// It did not say which it is, or this user may not know.
    Unknown,
}

/// Unmounts what shows at a path, which must be ours; lazily: out of the tree at once, used or not.
/// Waits for its daemon to end.
pub fn unmount(path: &Path, lazy: bool) -> Result<Unmounted, Error> {
    let Healed { dead, left } = heal(path)?;
    let Some((entry, answer)) = left else {
        if dead > 0 {
            let path = Spot::at(path)?.path().to_path_buf();
            return Ok(Unmounted { path, daemon: Daemon::WasDead });
        }
        return Err(not_ours(path)?);
    };
    let silent = answer == Answer::Silent;
    let daemon = match answer {
        Answer::Alive(Some(stats)) => held(stats.pid),
        _ => None,
    };
    if lazy {
        let spot = Spot::at(path)?;
        if spot.mount() != entry.id {
            return Err(not_ours(path)?);
        }
        attach::detach(&spot)?;
    } else {
        attach::unmount(&entry.mountpoint).map_err(|error| match error {
            // It may be our own question that is stuck in it.
            Error::Busy { path } if silent => Error::Silent { path },
            error => error,
        })?;
    }
    let limit = if lazy { ENDING_LAZILY } else { ENDING };
    let daemon = match daemon {
        None => Daemon::Unknown,
        Some((_, process)) if ends(&process, limit) => Daemon::Ended,
        Some((pid, _)) => Daemon::Runs(pid),
    };
    Ok(Unmounted { path: entry.mountpoint, daemon })
}

/// What a path is that should have been a mount of ours.
fn not_ours(path: &Path) -> Result<Error, Error> {
    let spot = Spot::at(path)?;
    let path = path.to_path_buf();
    let Some(entry) = spot.entry()? else {
        return Ok(Error::NotOurs { path, what: "nothing is mounted there".into(), within: None });
    };
    let kind = table::shown(&entry.kind);
    let place = entry.mountpoint.display().to_string();
    let (what, within) = if entry.mountpoint == spot.path() {
        (format!("a mount of type {kind} shows there"), None)
    } else if entry.is_ours() {
        (format!("it lies inside the one at {place}"), Some(entry.mountpoint))
    } else {
        (format!("it lies on {place} (type {kind}), and nothing is mounted there"), None)
    };
    Ok(Error::NotOurs { path, what, within })
}

/// Holds on to a daemon, so that its number cannot become another process's. A number that is not
/// a daemon's, as from another container, is not believed.
fn held(pid: u32) -> Option<(u32, std::os::fd::OwnedFd)> {
    let process = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    (name.trim_end() == "ckptfs").then_some((pid, process))
}

fn ends(process: &std::os::fd::OwnedFd, limit: Duration) -> bool {
    let until = std::time::Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(std::time::Instant::now());
        let Ok(left) = Timespec::try_from(left) else {
            return false;
        };
        // Readable once the process has ended.
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}
