//! Checks whether a path leads through a stuck ckptfs mount.
//!
//! Every other error of a path is ignored here, and reported where the path is used.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::time::Instant;

use rustix::fs::{CWD, readlinkat};

use crate::mount_info::mountinfo::{self, MountEntry, PathHandle};
use crate::source;

use super::liveness::{self, Liveness, LivenessProbe};
use super::stale_mounts::ANSWER_TIMEOUT;
use crate::mount::error::MountError;

/// As many links of one path as the kernel follows.
const MAX_LINKS: usize = 40;

/// Probes every ckptfs mount that a path leads through or to. Follows links.
pub fn check_path(path: &Path) -> Result<(), MountError> {
    walk(path, true)
}

/// Probes only the mounts that the path leads through. A mount at the path itself may be stuck.
pub fn check_parents(path: &Path) -> Result<(), MountError> {
    walk(path, false)
}

fn walk(path: &Path, to_its_end: bool) -> Result<(), MountError> {
    let Ok(ours) = mountinfo::ckptfs_mounts() else { return Ok(()) };
    let Ok(absolute) = std::path::absolute(path) else { return Ok(()) };
    if ours.is_empty() {
        return Ok(());
    }
    let mut probed = Vec::new();
    let mut walked = PathBuf::from("/");
    let mut rest = Vec::new();
    let mut links = 0;
    push_components(&mut rest, &absolute);
    // From the top, step by step: each step leads through mounts that have answered.
    loop {
        if rest.is_empty() && !to_its_end {
            return Ok(());
        }
        let Ok(handle) = PathHandle::open(&walked) else { return Ok(()) };
        let id = handle.mount_id();
        if !probed.contains(&id) && ours.iter().any(|entry| entry.id == id) {
            probed.push(id);
            if liveness::probe(handle.path(), ANSWER_TIMEOUT) == Liveness::Silent {
                return Err(MountError::Silent { path: handle.path().to_path_buf() });
            }
        }
        let Some(part) = rest.pop() else { return Ok(()) };
        if part == ".." {
            walked.pop();
            continue;
        }
        let next = walked.join(&part);
        // This never waits for a mount that has not answered: a mountpoint is no link.
        let Ok(target) = readlinkat(CWD, &next, Vec::new()) else {
            walked = next;
            continue;
        };
        links += 1;
        if links > MAX_LINKS {
            return Ok(());
        }
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            walked = PathBuf::from("/");
        }
        push_components(&mut rest, &target);
    }
}

/// Adds the components of a path in front of the others. The list is reversed: the last one is the next.
fn push_components(rest: &mut Vec<OsString>, path: &Path) {
    let parts = path.components().rev();
    let named = parts.filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    rest.extend(named.map(|part| part.as_os_str().to_owned()));
}

/// The ckptfs mounts in a directory that are stuck or dead, each by its name with its error. The path of the directory
/// must be absolute and without links.
pub fn unreachable_mounts_in(directory: &Path) -> Vec<(OsString, MountError)> {
    let ours = mountinfo::ckptfs_mounts().unwrap_or_default().into_iter();
    let is_topmost = |entry: &MountEntry| {
        entry.mountpoint.parent() == Some(directory)
            && PathHandle::open(&entry.mountpoint).is_ok_and(|handle| handle.mount_id() == entry.id)
    };
    // All at once, so that stuck mounts share the time limit.
    let probed: Vec<_> = ours
        .filter(is_topmost)
        .map(|entry| (LivenessProbe::start(&entry.mountpoint), entry))
        .collect();
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let mut unreachable = Vec::new();
    for (mut probe, MountEntry { mountpoint: path, .. }) in probed {
        let Some(name) = path.file_name().map(OsString::from) else { continue };
        match probe.wait(deadline.saturating_duration_since(Instant::now())) {
            None | Some(Liveness::Silent) => unreachable.push((name, MountError::Silent { path })),
            Some(Liveness::Dead) => {
                unreachable.push((
                    name,
                    MountError::View(source::SourceError::StaleMount { path }.into()),
                ));
            }
            Some(_) => {}
        }
    }
    unreachable
}
