//! Unmounts mounts that another process made, and removes dead ones.
//!
//! Mounts of other types are never touched, and no mount is waited for longer than the timeouts below.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::mount_info::mountinfo::{self, MountEntry, PathHandle};

use super::attach;
use super::daemon::Daemon;
use super::liveness::{self, Liveness};
use super::superblock::Superblock;
use crate::mount::error::MountError;

/// A daemon answers within milliseconds, or within a second on an overloaded machine. After this time it is stuck.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The most dead mounts that are removed at one path, which bounds the loop.
const MAX_STACKED_MOUNTS: usize = 64;

/// The state of a path after its dead mounts were removed.
#[derive(Debug)]
pub struct HealResult {
    /// How many dead mounts were removed.
    pub removed_count: usize,
    /// The ckptfs mount that is at the path now, and its liveness.
    pub remaining: Option<(MountEntry, Liveness)>,
}

/// Removes dead ckptfs mounts at a path.
pub fn heal(path: &Path) -> Result<HealResult, MountError> {
    for removed_count in 0..MAX_STACKED_MOUNTS {
        let handle = PathHandle::open(path)?;
        let is_ours = |entry: &MountEntry| entry.is_ckptfs() && entry.mountpoint == handle.path();
        let Some(entry) = handle.mount_entry()?.filter(is_ours) else {
            return Ok(HealResult { removed_count, remaining: None });
        };
        match liveness::probe(handle.path(), ANSWER_TIMEOUT) {
            Liveness::Dead => attach::detach(&handle)?,
            liveness => {
                return Ok(HealResult { removed_count, remaining: Some((entry, liveness)) });
            }
        }
        tracing::info!("{}: removed a mount whose daemon is gone", handle.path().display());
    }
    Err(MountError::Io {
        path: path.to_path_buf(),
        action: "remove all dead mounts there",
        source: std::io::Error::other("there are too many"),
    })
}

/// A mount that was unmounted.
#[derive(Debug)]
pub struct UnmountResult {
    /// The path that it was mounted at.
    pub path: PathBuf,
    /// The process that served it.
    pub server: MountServer,
}

/// The process that serves an unmounted mount, or did.
#[derive(Debug)]
pub enum MountServer {
    /// The daemon had died before.
    Dead,
    /// This daemon, which ends with the superblock.
    Process(Daemon, Superblock),
    /// The daemon did not tell its number, or this user may not see it.
    Unknown(Superblock),
}

/// Unmounts the ckptfs mount at a path; with `lazy`, detaches it at once, even if it is in use. Does not wait for the
/// daemon to end.
pub fn unmount(path: &Path, lazy: bool) -> Result<UnmountResult, MountError> {
    let HealResult { removed_count, remaining } = heal(path)?;
    let Some((entry, liveness)) = remaining else {
        if removed_count > 0 {
            let path = PathHandle::open(path)?.path().to_path_buf();
            return Ok(UnmountResult { path, server: MountServer::Dead });
        }
        return Err(not_ckptfs_error(path)?);
    };
    let superblock = Superblock::of_mount(entry.clone());
    let is_silent = liveness == Liveness::Silent;
    let daemon = match liveness {
        Liveness::Alive(Some(stats)) => Daemon::from_pid(stats.pid),
        _ => Daemon::serving(entry.device),
    };
    let result = if lazy {
        detach(path, &entry)
    } else {
        // A stuck mount may be busy with our own probe, which is given up.
        let busy_timeout = if is_silent { ANSWER_TIMEOUT } else { attach::BUSY_TIMEOUT };
        attach::unmount(&entry.mountpoint, busy_timeout).map_err(|error| match error {
            MountError::Busy { path } if is_silent => MountError::Silent { path },
            error => error,
        })
    };
    match result {
        // Another process has unmounted it already.
        Err(_) if !is_mounted(&entry)? => {}
        result => result?,
    }
    let server = match daemon {
        Some(daemon) => MountServer::Process(daemon, superblock),
        None => MountServer::Unknown(superblock),
    };
    Ok(UnmountResult { path: entry.mountpoint, server })
}

fn detach(path: &Path, entry: &MountEntry) -> Result<(), MountError> {
    let handle = PathHandle::open(path)?;
    if handle.mount_id() != entry.id {
        return Err(not_ckptfs_error(path)?);
    }
    attach::detach(&handle)
}

fn is_mounted(entry: &MountEntry) -> Result<bool, MountError> {
    // The kernel gives the numbers of a mount that is gone to the next one, anywhere.
    let key = |entry: &MountEntry| (entry.id, entry.device, entry.mountpoint.clone());
    Ok(mountinfo::mounts()?.iter().any(|other| key(other) == key(entry)))
}

/// The error of a path that is no mountpoint of ckptfs.
fn not_ckptfs_error(path: &Path) -> Result<MountError, MountError> {
    let handle = PathHandle::open(path)?;
    let path = path.to_path_buf();
    let Some(entry) = handle.mount_entry()? else {
        return Ok(MountError::NotCkptfs {
            path,
            what: "nothing is mounted there".into(),
            within: None,
        });
    };
    let kind = mountinfo::to_display(&entry.fs_type);
    let mountpoint = entry.mountpoint.display().to_string();
    let (what, within) = if entry.mountpoint == handle.path() {
        (format!("a mount of type {kind} shows there"), None)
    } else if entry.is_ckptfs() {
        (format!("it lies inside the one at {mountpoint}"), Some(entry.mountpoint))
    } else {
        (format!("it lies on {mountpoint} (type {kind}), and nothing is mounted there"), None)
    };
    Ok(MountError::NotCkptfs { path, what, within })
}
