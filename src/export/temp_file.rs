//! Files that have no name yet, or a hidden one, until they take their own.
//!
//! docs/semantics/saving.md has the rule, which `ckptfs export` and saving in Python share. A file under the hidden name
//! of another is locked from before other processes can see it there until it is gone. Without the lock its owner is
//! dead, and the next writer of that name removes it.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

/// The hidden name of a file: the same in every process, and short however long the file's own name is.
pub fn hidden_path(directory: &Path, name: &OsStr) -> PathBuf {
    // FNV-1a. Two names with one hash take turns by the lock.
    let mix = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = name.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix);
    directory.join(format!(".ckptfs-{hash:016x}.part"))
}

/// A hidden name that no other process, alive or dead, has used. Its file stays if the process is killed, because no
/// other knows whose it is.
fn unique_path(directory: &Path) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    directory.join(format!(".ckptfs-{}-{now}.part", std::process::id()))
}

/// Opens a file without a name, of which not even a killed process leaves anything. `None` where the filesystem has
/// no such files, or nothing could name it later: that goes through `/proc`.
pub fn open_unnamed(directory: &Path, mode: Mode) -> Option<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(directory, flags, mode).ok()?;
    try_lock(&file);
    Path::new(&fd_path(&file)).is_symlink().then_some(file)
}

/// Creates a file under a hidden name: that of `name`, or a unique one where a living process has that or no name is
/// given.
pub fn create_hidden(
    directory: &Path,
    name: Option<&OsStr>,
    mode: Mode,
) -> Result<(OwnedFd, PathBuf), Errno> {
    claim(directory, name, |path| create_locked(path, mode), |path| create(path, mode))
}

/// Gives a file without a name a hidden one, chosen as by [`create_hidden`].
pub fn link_hidden(
    file: &impl AsFd,
    directory: &Path,
    name: Option<&OsStr>,
) -> Result<PathBuf, Errno> {
    let ((), path) =
        claim(directory, name, |path| link(file, path).map(Some), |path| link(file, path))?;
    Ok(path)
}

/// Gives a file without a name this one.
pub fn link(file: &impl AsFd, path: &Path) -> Result<(), Errno> {
    rustix::fs::linkat(CWD, fd_path(file), CWD, path, AtFlags::SYMLINK_FOLLOW)
}

/// Removes the file of a hidden name if its owner is dead. Returns whether the name is free.
pub fn remove_stale(path: &Path) -> bool {
    match try_remove_stale(path) {
        Ok(free) => free,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

fn fd_path(file: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// Claims the hidden name of `name`; makes a unique one where that is taken. Both return what has the name then.
fn claim<T>(
    directory: &Path,
    name: Option<&OsStr>,
    claim: impl Fn(&Path) -> Result<Option<T>, Errno>,
    make: impl Fn(&Path) -> Result<T, Errno>,
) -> Result<(T, PathBuf), Errno> {
    if let Some(path) = name.map(|name| hidden_path(directory, name)) {
        loop {
            match claim(&path) {
                Ok(Some(made)) => return Ok((made, path)),
                Err(Errno::EXIST) if remove_stale(&path) => {}
                Ok(None) | Err(Errno::EXIST) => break,
                Err(error) => return Err(error),
            }
        }
    }
    loop {
        let path = unique_path(directory);
        match make(&path) {
            Err(Errno::EXIST) => {}
            made => return made.map(|made| (made, path)),
        }
    }
}

/// Locks a file, which says that its owner lives. Returns `false` where another has the lock. Filesystems without
/// locks give none, and nothing on them is taken for a dead process's.
fn try_lock(file: impl AsFd) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}

fn create(path: &Path, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, mode)
}

/// Creates and locks a file. `None` where another process takes it for a dead one's just then, and removes it.
fn create_locked(path: &Path, mode: Mode) -> Result<Option<OwnedFd>, Errno> {
    let file = create(path, mode)?;
    // A process that removes it has the lock first, and keeps it until the file is gone.
    let mine = try_lock(&file) && is_still_at(path, &file).unwrap_or(false);
    Ok(mine.then_some(file))
}

fn try_remove_stale(path: &Path) -> io::Result<bool> {
    // Only a regular file is opened at all.
    if !std::fs::symlink_metadata(path)?.is_file() {
        return Ok(false);
    }
    let file = open_for_lock(path)?;
    // Of two processes that found it, the second has the lock when the name is another file's, or free.
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    if is_still_at(path, &file)? {
        std::fs::remove_file(path)?;
    }
    Ok(true)
}

fn open_for_lock(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // Network filesystems may lock only files that are open for writing.
    match rustix::fs::open(path, OFlags::RDWR | flags, Mode::empty()) {
        Err(Errno::ACCESS) => rustix::fs::open(path, OFlags::RDONLY | flags, Mode::empty()),
        opened => opened,
    }
}

/// Whether it is a regular file, and still the one of this name.
fn is_still_at(path: &Path, file: &OwnedFd) -> io::Result<bool> {
    let held = std::fs::File::from(file.try_clone()?).metadata()?;
    let there = std::fs::symlink_metadata(path)?;
    let inode = |of: &Metadata| (of.dev(), of.ino());
    Ok(held.is_file() && inode(&held) == inode(&there))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

    /// tests/python/save/test_killed_while_saving.py has the same names.
    #[test]
    fn the_name_that_goes_with_another_is_known_everywhere() {
        let of = |directory, name| hidden_path(Path::new(directory), OsStr::new(name));
        assert_eq!(of("a", "model.safetensors"), Path::new("a/.ckptfs-f92548523eb0edb1.part"));
        assert_eq!(of("", "größe.bin"), Path::new(".ckptfs-a7631d0a463cca65.part"));
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
        let held = create_locked(&path, MODE).unwrap();
        assert!(held.is_some() && !remove_stale(&path));
        assert_eq!(create_locked(&path, MODE).unwrap_err(), Errno::EXIST);
        drop(held);
        assert!(remove_stale(&path));
    }

    /// As on a filesystem that says of every file that another has locked it, or that it is not the one of its name.
    #[test]
    fn where_the_hidden_name_cannot_be_claimed_a_unique_one_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let name = OsStr::new("x");
        let refused = |_: &Path| Ok(None);
        let (_, path) =
            claim(folder.path(), Some(name), refused, |path| create(path, MODE)).unwrap();
        assert!(path.exists() && path != hidden_path(folder.path(), name));
        let (_, other) = create_hidden(folder.path(), None, MODE).unwrap();
        assert!(other.exists() && other != path);
    }
}
