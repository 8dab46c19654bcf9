//! Whether a path can be looked at without waiting for a mount of ours that is stuck.
//!
//! In: a path, or a directory. Out: nothing, or the mount that does not answer. What else keeps a path
//! from being found is for those to say who want what is there.

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

/// Links that are followed in one path, as many as the kernel follows.
const MAX_LINKS: usize = 40;

/// Asks every mount of ours that the path leads through or to, links followed.
pub fn check_path(path: &Path) -> Result<(), MountError> {
    walk(path, true)
}

/// The same, but for what the path itself stands for: a mount that is to be taken away need not answer.
pub fn check_parents(path: &Path) -> Result<(), MountError> {
    walk(path, false)
}

fn walk(path: &Path, to_its_end: bool) -> Result<(), MountError> {
    let Ok(ours) = mountinfo::ckptfs_mounts() else { return Ok(()) };
    let Ok(whole) = std::path::absolute(path) else { return Ok(()) };
    if ours.is_empty() {
        return Ok(());
    }
    let mut asked = Vec::new();
    let mut way = PathBuf::from("/");
    let mut rest = Vec::new();
    let mut links = 0;
    push_components(&mut rest, &whole);
    // From the top, and link by link: each step is taken through those that have answered.
    loop {
        if rest.is_empty() && !to_its_end {
            return Ok(());
        }
        let Ok(spot) = PathHandle::open(&way) else { return Ok(()) };
        let id = spot.mount_id();
        if !asked.contains(&id) && ours.iter().any(|entry| entry.id == id) {
            asked.push(id);
            if liveness::probe(spot.path(), ANSWER_TIMEOUT) == Liveness::Silent {
                return Err(MountError::Silent { path: spot.path().to_path_buf() });
            }
        }
        let Some(part) = rest.pop() else { return Ok(()) };
        if part == ".." {
            way.pop();
            continue;
        }
        let next = way.join(&part);
        // Nobody is asked by this who has not answered: what is mounted right there is no link.
        let Ok(target) = readlinkat(CWD, &next, Vec::new()) else {
            way = next;
            continue;
        };
        links += 1;
        if links > MAX_LINKS {
            return Ok(());
        }
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            way = PathBuf::from("/");
        }
        push_components(&mut rest, &target);
    }
}

/// Puts the parts of a path before those that are yet to come; the next is the last of the list.
fn push_components(rest: &mut Vec<OsString>, path: &Path) {
    let parts = path.components().rev();
    let named = parts.filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    rest.extend(named.map(|part| part.as_os_str().to_owned()));
}

/// The mounts of ours right in a directory, given absolutely and without links, that cannot be looked
/// into: each by its name, with what is wrong.
pub fn unreachable_mounts_in(directory: &Path) -> Vec<(OsString, MountError)> {
    let ours = mountinfo::ckptfs_mounts().unwrap_or_default().into_iter();
    let shows = |entry: &MountEntry| {
        entry.mountpoint.parent() == Some(directory)
            && PathHandle::open(&entry.mountpoint).is_ok_and(|spot| spot.mount_id() == entry.id)
    };
    // All at once: the stuck are waited for together.
    let asked: Vec<_> =
        ours.filter(shows).map(|entry| (LivenessProbe::start(&entry.mountpoint), entry)).collect();
    let until = Instant::now() + ANSWER_TIMEOUT;
    let mut wrong = Vec::new();
    for (mut question, MountEntry { mountpoint: path, .. }) in asked {
        let Some(name) = path.file_name().map(OsString::from) else { continue };
        match question.wait(until.saturating_duration_since(Instant::now())) {
            None | Some(Liveness::Silent) => wrong.push((name, MountError::Silent { path })),
            Some(Liveness::Dead) => {
                wrong.push((
                    name,
                    MountError::View(source::SourceError::StaleMount { path }.into()),
                ));
            }
            Some(_) => {}
        }
    }
    wrong
}
