//! The state of every ckptfs mount of this machine, probed all at once.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::io::Errno;
use serde::Serialize;

use crate::mount_info::mountinfo::{self, MountEntry, PathHandle};
use crate::source::SourceError;

use super::liveness::{Liveness, LivenessProbe};
use super::stale_mounts::ANSWER_TIMEOUT;
use super::stuck_paths;
use crate::mount::error::MountError;
use crate::mount::stats::MountStats;

/// A mount, as a look at it found it.
#[derive(Debug)]
pub struct ObservedMount {
    /// Its line in the table of mounts.
    pub entry: MountEntry,
    /// What is known of its daemon.
    pub state: MountState,
    /// Why the state is not known.
    pub reason: Option<String>,
    /// The statistics that the daemon sent.
    pub stats: Option<Box<MountStats>>,
}

/// The state of a mount, as JSON names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountState {
    /// Its daemon answers.
    Alive,
    /// Its daemon is gone.
    Dead,
    /// Its daemon did not answer in time.
    NotAnswering,
    /// Another user's, or below a directory that this user may not enter.
    NotPermitted,
    /// Another mount lies over it.
    Hidden,
    /// The system failed to ask.
    Failed,
}

/// Probes all mounts. A probe without an answer stays pending, so that a stuck mount is probed only once.
#[derive(Debug, Default)]
pub struct MountObserver {
    pending: HashMap<MountEntry, LivenessProbe>,
}

/// What was found at the path of a mount, before its daemon is asked.
enum PathState {
    /// The mount shows there.
    Reachable,
    /// The path leads through a mount that is stuck.
    CutOff,
    Unreachable(MountState, Option<String>),
}

impl MountObserver {
    /// The state of each mount, in the order of the table.
    pub fn observe(&mut self) -> Result<Vec<ObservedMount>, MountError> {
        let entries = mountinfo::ckptfs_mounts()?;
        let path_states: Vec<PathState> = entries.iter().map(path_state).collect();
        self.pending.retain(|entry, _| entries.contains(entry));
        for (entry, _) in
            entries.iter().zip(&path_states).filter(|(_, at)| matches!(at, PathState::Reachable))
        {
            let start = || LivenessProbe::start(&entry.mountpoint);
            self.pending.entry(entry.clone()).or_insert_with(start);
        }
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let states = entries.into_iter().zip(path_states);
        Ok(states.map(|(entry, at)| self.observe_one(entry, at, deadline)).collect())
    }

    fn observe_one(
        &mut self,
        entry: MountEntry,
        path_state: PathState,
        deadline: Instant,
    ) -> ObservedMount {
        if let PathState::Unreachable(state, reason) = path_state {
            return ObservedMount { entry, state, reason, stats: None };
        }
        let pending = self.pending.get_mut(&entry);
        let answer = pending
            .and_then(|probe| probe.wait(deadline.saturating_duration_since(Instant::now())));
        if answer.is_some() {
            self.pending.remove(&entry);
        }
        let (state, reason, stats) = match answer {
            None | Some(Liveness::Silent) => (MountState::NotAnswering, None, None),
            Some(Liveness::Alive(stats)) => (MountState::Alive, None, stats),
            Some(Liveness::Dead) => (MountState::Dead, None, None),
            Some(Liveness::NotPermitted) => (MountState::NotPermitted, None, None),
            Some(Liveness::Failed(e)) => {
                (MountState::Failed, Some(std::io::Error::from(e).to_string()), None)
            }
        };
        ObservedMount { entry, state, reason, stats }
    }
}

/// Whether a mount shows at its path.
fn path_state(entry: &MountEntry) -> PathState {
    // The path of a mount inside a stuck mount cannot be looked up.
    if stuck_paths::check_parents(&entry.mountpoint).is_err() {
        return PathState::CutOff;
    }
    match PathHandle::open(&entry.mountpoint) {
        Ok(handle) if handle.mount_id() == entry.id => PathState::Reachable,
        Ok(_) | Err(SourceError::Missing { .. }) => {
            PathState::Unreachable(MountState::Hidden, None)
        }
        // A mount over a directory above shows a file there.
        Err(error) if error.errno() == Some(Errno::NOTDIR.raw_os_error()) => {
            PathState::Unreachable(MountState::Hidden, None)
        }
        Err(error) if error.is_denied() => {
            let closed = closed_directory(&entry.mountpoint);
            let reason = closed.map(|it| format!("this user may not enter {}", it.display()));
            PathState::Unreachable(MountState::NotPermitted, reason)
        }
        Err(error) => PathState::Unreachable(MountState::Failed, Some(error.to_string())),
    }
}

/// The directory above a path that this user may not enter.
fn closed_directory(path: &Path) -> Option<PathBuf> {
    let mut above = path.ancestors().skip(1);
    above.find(|directory| PathHandle::open(directory).is_ok()).map(Path::to_path_buf)
}
