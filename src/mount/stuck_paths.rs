//! Whether a path can be looked at without waiting for a mount of ours that is stuck.
//!
//! In: a path, or a directory. Out: nothing, or the mount that does not answer. What else keeps a path
//! from being found is for those to say who want what is there.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::time::Instant;

use rustix::fs::{CWD, readlinkat};

use crate::mount_info::mountinfo::{self, Entry, Spot};
use crate::source;

use super::Error;
use super::liveness::{self, Answer, Question};
use super::stale_mounts::PATIENCE;

/// Links that are followed in one path, as many as the kernel follows.
const MAX_LINKS: usize = 40;

/// Asks every mount of ours that the path leads through or to, links followed.
pub fn check(path: &Path) -> Result<(), Error> {
    walk(path, true)
}

/// The same, but for what the path itself stands for: a mount that is to be taken away need not answer.
pub fn check_way(path: &Path) -> Result<(), Error> {
    walk(path, false)
}

fn walk(path: &Path, to_its_end: bool) -> Result<(), Error> {
    let Ok(ours) = mountinfo::ours() else { return Ok(()) };
    let Ok(whole) = std::path::absolute(path) else { return Ok(()) };
    if ours.is_empty() {
        return Ok(());
    }
    let mut asked = Vec::new();
    let mut way = PathBuf::from("/");
    let mut rest = Vec::new();
    let mut links = 0;
    push(&mut rest, &whole);
    // From the top, and link by link: each step is taken through those that have answered.
    loop {
        if rest.is_empty() && !to_its_end {
            return Ok(());
        }
        let Ok(spot) = Spot::at(&way) else { return Ok(()) };
        let id = spot.mount();
        if !asked.contains(&id) && ours.iter().any(|entry| entry.id == id) {
            asked.push(id);
            if liveness::ask(spot.path(), PATIENCE) == Answer::Silent {
                return Err(Error::Silent { path: spot.path().to_path_buf() });
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
        push(&mut rest, &target);
    }
}

/// Puts the parts of a path before those that are yet to come; the next is the last of the list.
fn push(rest: &mut Vec<OsString>, path: &Path) {
    let parts = path.components().rev();
    let named = parts.filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    rest.extend(named.map(|part| part.as_os_str().to_owned()));
}

/// The mounts of ours right in a directory, given absolutely and without links, that cannot be looked
/// into: each by its name, with what is wrong.
pub fn beneath(directory: &Path) -> Vec<(OsString, Error)> {
    let ours = mountinfo::ours().unwrap_or_default().into_iter();
    let shows = |entry: &Entry| {
        entry.mountpoint.parent() == Some(directory)
            && Spot::at(&entry.mountpoint).is_ok_and(|spot| spot.mount() == entry.id)
    };
    // All at once: the stuck are waited for together.
    let asked: Vec<_> =
        ours.filter(shows).map(|entry| (Question::ask(&entry.mountpoint), entry)).collect();
    let until = Instant::now() + PATIENCE;
    let mut wrong = Vec::new();
    for (mut question, Entry { mountpoint: path, .. }) in asked {
        let Some(name) = path.file_name().map(OsString::from) else { continue };
        match question.answer(until.saturating_duration_since(Instant::now())) {
            None | Some(Answer::Silent) => wrong.push((name, Error::Silent { path })),
            Some(Answer::Dead) => {
                wrong.push((name, Error::View(source::Error::Gone { path }.into())));
            }
            Some(_) => {}
        }
    }
    wrong
}
