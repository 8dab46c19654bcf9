//! Taking mounts away that this process did not make: those whose daemon died, and any that the
//! user wants unmounted.
//!
//! In: a path. Out: what was done; a mount of another type is never touched, and none is ever waited
//! for longer than the times below.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::mount_info::mountinfo::{self, MountEntry, PathHandle};

use super::attach;
use super::daemon::Daemon;
use super::liveness::{self, Liveness};
use super::superblock::Superblock;
use crate::mount::error::MountError;

/// A daemon that lives answers within milliseconds, or within a second where the machine is
/// overloaded; one that has not by then is stuck.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Dead mounts over one another at one path that are taken away at most: a bound for the loop.
const MAX_STACKED_MOUNTS: usize = 64;

/// What shows at a path after the dead were taken away.
#[derive(Debug)]
pub struct HealResult {
    /// How many dead mounts were taken away.
    pub removed_count: usize,
    /// The mount of ours that shows there now, and what it answers.
    pub remaining: Option<(MountEntry, Liveness)>,
}

/// Takes away the mounts of ours at a path whose daemons are gone.
pub fn heal(path: &Path) -> Result<HealResult, MountError> {
    for dead in 0..MAX_STACKED_MOUNTS {
        let spot = PathHandle::open(path)?;
        let shows = |entry: &MountEntry| entry.is_ckptfs() && entry.mountpoint == spot.path();
        let Some(entry) = spot.mount_entry()?.filter(shows) else {
            return Ok(HealResult { removed_count: dead, remaining: None });
        };
        match liveness::probe(spot.path(), ANSWER_TIMEOUT) {
            Liveness::Dead => attach::detach(&spot)?,
            answer => {
                return Ok(HealResult { removed_count: dead, remaining: Some((entry, answer)) });
            }
        }
        tracing::info!("{}: took away a mount whose daemon is gone", spot.path().display());
    }
    Err(MountError::Io {
        path: path.to_path_buf(),
        action: "take away all the dead mounts there",
        source: std::io::Error::other("there are too many"),
    })
}

/// A mount that was taken out of the tree.
#[derive(Debug)]
pub struct UnmountResult {
    /// Where it was.
    pub path: PathBuf,
    /// Who served it.
    pub server: MountServer,
}

/// Who serves a mount that was taken away, or did.
#[derive(Debug)]
pub enum MountServer {
    /// Nobody: its daemon had died before.
    Dead,
    /// This daemon, which ends with the superblock.
    Process(Daemon, Superblock),
    /// It did not say by whom, or this user may not know.
    Unknown(Superblock),
}

/// Unmounts what shows at a path, which must be ours; lazily: out of the tree at once, used or not.
/// Does not wait for its daemon to end.
pub fn unmount(path: &Path, lazy: bool) -> Result<UnmountResult, MountError> {
    let HealResult { removed_count: dead, remaining: left } = heal(path)?;
    let Some((entry, answer)) = left else {
        if dead > 0 {
            let path = PathHandle::open(path)?.path().to_path_buf();
            return Ok(UnmountResult { path, server: MountServer::Dead });
        }
        return Err(not_ours(path)?);
    };
    let superblock = Superblock::of_mount(entry.clone());
    let silent = answer == Liveness::Silent;
    let daemon = match answer {
        Liveness::Alive(Some(stats)) => Daemon::from_pid(stats.pid),
        _ => Daemon::serving(entry.device),
    };
    let taken = if lazy {
        detach(path, &entry)
    } else {
        // It may be our own question that is in the way: it is given up, or it is stuck.
        let passing_by = if silent { ANSWER_TIMEOUT } else { attach::BUSY_TIMEOUT };
        attach::unmount(&entry.mountpoint, passing_by).map_err(|error| match error {
            MountError::Busy { path } if silent => MountError::Silent { path },
            error => error,
        })
    };
    match taken {
        // Somebody else was faster: it is gone, as was wanted.
        Err(_) if !is_mounted(&entry)? => {}
        taken => taken?,
    }
    let served = match daemon {
        Some(daemon) => MountServer::Process(daemon, superblock),
        None => MountServer::Unknown(superblock),
    };
    Ok(UnmountResult { path: entry.mountpoint, server: served })
}

fn detach(path: &Path, entry: &MountEntry) -> Result<(), MountError> {
    let spot = PathHandle::open(path)?;
    if spot.mount_id() != entry.id {
        return Err(not_ours(path)?);
    }
    attach::detach(&spot)
}

fn is_mounted(entry: &MountEntry) -> Result<bool, MountError> {
    let mut all = mountinfo::mounts()?.into_iter();
    Ok(all.any(|other| (other.id, other.device) == (entry.id, entry.device)))
}

/// What a path is that should have been a mount of ours.
fn not_ours(path: &Path) -> Result<MountError, MountError> {
    let spot = PathHandle::open(path)?;
    let path = path.to_path_buf();
    let Some(entry) = spot.mount_entry()? else {
        return Ok(MountError::NotCkptfs {
            path,
            what: "nothing is mounted there".into(),
            within: None,
        });
    };
    let kind = mountinfo::to_display(&entry.fs_type);
    let place = entry.mountpoint.display().to_string();
    let (what, within) = if entry.mountpoint == spot.path() {
        (format!("a mount of type {kind} shows there"), None)
    } else if entry.is_ckptfs() {
        (format!("it lies inside the one at {place}"), Some(entry.mountpoint))
    } else {
        (format!("it lies on {place} (type {kind}), and nothing is mounted there"), None)
    };
    Ok(MountError::NotCkptfs { path, what, within })
}
