//! The hidden names that a file has until it takes its own, and what processes that were killed left there.
//!
//! In: the path that a file is to have. Out: the hidden name that goes with it, one that nobody else has,
//! and the removal of what the dead left. docs/semantics.md has the rule, which saving in Python keeps too:
//! who has a file under the name that goes with another holds a lock on it, from before others can see it
//! there until it is gone from there.

use std::fs::Metadata;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

/// The hidden name that goes with a path: the same for whoever writes it, and short however long it is.
pub fn name_for(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().as_bytes();
    // FNV-1a: names are told apart by it, and two that are not get along by the lock.
    let mix = |value: u64, &byte: &u8| (value ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let value = name.iter().fold(0xcbf2_9ce4_8422_2325, mix);
    path.with_file_name(format!(".ckptfs-{value:016x}.part"))
}

/// A hidden name beside a path that no other process, alive or dead, has used. Nobody knows of whom it is
/// either, so that it stays if its process is killed.
pub fn unique_name(path: &Path) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    path.with_file_name(format!(".ckptfs-{}-{now}.part", std::process::id()))
}

/// Says with a lock that a file has a living owner. Gives whether nobody else says so. Where there are no
/// locks nobody has one, and what is there is never taken for a dead one's.
pub fn try_lock(file: impl AsFd) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}

/// Makes a file of this hidden name.
pub fn create(path: &Path, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, mode)
}

/// The same, of a name that others look for: a file which is held. Nothing, if somebody takes it for a dead one's
/// just then: it is theirs to remove.
pub fn create_locked(path: &Path, mode: Mode) -> Result<Option<OwnedFd>, Errno> {
    let file = create(path, mode)?;
    // Whoever removes it has the lock first, and keeps it until it is gone.
    let mine = try_lock(&file) && is_still_at(path, &file).unwrap_or(false);
    Ok(mine.then_some(file))
}

/// Removes what has this hidden name, if its owner is dead. Gives whether the name is free.
pub fn remove_stale(path: &Path) -> bool {
    match try_remove_stale(path) {
        Ok(free) => free,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

fn try_remove_stale(path: &Path) -> io::Result<bool> {
    // What is no file is not even opened.
    if !std::fs::symlink_metadata(path)?.is_file() {
        return Ok(false);
    }
    let file = open_for_lock(path)?;
    // Two who found the same file: the second has the lock when the name is another file's, or nobody's.
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    if is_still_at(path, &file)? {
        std::fs::remove_file(path)?;
    }
    Ok(true)
}

fn open_for_lock(path: &Path) -> Result<OwnedFd, Errno> {
    let how = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // A network's filesystem may give the lock only to who may write.
    match rustix::fs::open(path, OFlags::RDWR | how, Mode::empty()) {
        Err(Errno::ACCESS) => rustix::fs::open(path, OFlags::RDONLY | how, Mode::empty()),
        opened => opened,
    }
}

/// Whether it is a regular file, and still that of this name.
fn is_still_at(path: &Path, file: &OwnedFd) -> io::Result<bool> {
    let held = std::fs::File::from(file.try_clone()?).metadata()?;
    let there = std::fs::symlink_metadata(path)?;
    let place = |of: &Metadata| (of.dev(), of.ino());
    Ok(held.is_file() && place(&held) == place(&there))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    /// tests/python/save/test_killed_while_saving.py has the same names.
    #[test]
    fn the_name_that_goes_with_another_is_known_everywhere() {
        let of = |name| name_for(Path::new(name));
        assert_eq!(of("a/model.safetensors"), Path::new("a/.ckptfs-f92548523eb0edb1.part"));
        assert_eq!(of("größe.bin"), Path::new(".ckptfs-a7631d0a463cca65.part"));
    }

    #[test]
    fn only_a_file_whose_owner_is_dead_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        assert!(remove_stale(&path));
        let held = File::create(&path).unwrap();
        assert!(try_lock(&held));
        assert!(!remove_stale(&path) && path.exists());
        drop(held);
        assert!(remove_stale(&path) && !path.exists());
        std::os::unix::fs::symlink(folder.path(), &path).unwrap();
        assert!(!remove_stale(&path));
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RWXU).unwrap();
        assert!(!remove_stale(&path) && path.exists());
    }

    #[test]
    fn a_claimed_name_is_held_and_nobody_elses() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mode = Mode::from_raw_mode(0o666);
        let held = create_locked(&path, mode).unwrap();
        assert!(held.is_some() && !remove_stale(&path));
        assert_eq!(create_locked(&path, mode).unwrap_err(), Errno::EXIST);
        drop(held);
        assert!(remove_stale(&path));
    }
}
