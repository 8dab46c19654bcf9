//! Files that have no name, or a hidden one, until they are whole and take their own.
//!
//! docs/semantics/saving.md has the rule, which `ckptfs export`, saving in Python and access traces share. A hidden name
//! is derived from the file's own name, or unique. A writer holds `flock` on its file while other processes can see it
//! there. A file without that lock is a dead process's, and the next writer of the name removes it.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

/// A file being written. Dropped before it took a name, it is gone.
#[derive(Debug)]
pub struct TempFile {
    /// The hidden name, while it has one: until it is whole on filesystems without unnamed files, elsewhere while it
    /// replaces another file. It is removed before the file is closed: without the lock it may be another process's.
    hidden: Option<HiddenName>,
    file: File,
    directory: PathBuf,
}

/// The hidden name of a file. Dropped before the file took its own, it is removed, and the file with it.
#[derive(Debug)]
pub struct HiddenName(Option<PathBuf>);

impl TempFile {
    /// Starts a file in a directory. `name` is the one that it will take: what a killed process left of it is removed.
    pub fn create(directory: &Path, name: Option<&OsStr>, mode: Mode) -> Result<TempFile, Errno> {
        TempFile::create_with(directory, name, mode, open_unnamed)
    }

    fn create_with(
        directory: &Path,
        name: Option<&OsStr>,
        mode: Mode,
        open_unnamed: impl Fn(&Path, Mode) -> Option<OwnedFd>,
    ) -> Result<TempFile, Errno> {
        let is_here = directory.as_os_str().is_empty();
        let directory = if is_here { Path::new(".") } else { directory };
        if let Some(name) = name {
            remove_stale(directory, name);
        }
        let (file, hidden) = match open_unnamed(directory, mode) {
            Some(file) => (file, None),
            None => {
                let create_locked = |path: &Path| create_locked(path, mode);
                let (file, path) =
                    claim(directory, name, create_locked, |path| create(path, mode))?;
                (file, Some(HiddenName(Some(path))))
            }
        };
        Ok(TempFile { hidden, file: file.into(), directory: directory.to_path_buf() })
    }

    /// The file, to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Closes the file, under a unique hidden name until it takes its own. If the process is killed, the file stays:
    /// no other process knows whose it is.
    #[cfg(any(feature = "python", test))]
    pub fn set_aside(mut self) -> Result<HiddenName, Errno> {
        match self.hidden.take() {
            Some(hidden) => Ok(hidden),
            None => self.link_hidden(None),
        }
    }

    /// Gives the file a name in its directory, in one step. Another file of that name is an error, or replaced.
    pub fn take(mut self, path: &Path, replace: bool) -> io::Result<()> {
        let hidden = match self.hidden.take() {
            Some(hidden) => hidden,
            None => match link(&self.file, path) {
                Err(Errno::EXIST) if replace => self.link_hidden(path.file_name())?,
                linked => return Ok(linked?),
            },
        };
        hidden.take(path, replace)
    }

    /// Gives a file without a name a hidden one: that of `name`, or a unique one.
    fn link_hidden(&self, name: Option<&OsStr>) -> Result<HiddenName, Errno> {
        let claim_name = |path: &Path| link(&self.file, path).map(Some);
        let ((), path) = claim(&self.directory, name, claim_name, |path| link(&self.file, path))?;
        Ok(HiddenName(Some(path)))
    }
}

impl HiddenName {
    /// Gives the file its own name, in one step. Another file of that name is an error, or replaced.
    pub fn take(mut self, path: &Path, replace: bool) -> io::Result<()> {
        let Some(hidden) = self.0.as_ref() else { return Ok(()) };
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        match renameat_with(CWD, hidden, CWD, path, flags) {
            // A filesystem without that flag. A link refuses an existing name as well.
            Err(Errno::INVAL) if !replace => std::fs::hard_link(hidden, path),
            renamed => {
                renamed?;
                self.0 = None;
                Ok(())
            }
        }
    }
}

impl Drop for HiddenName {
    fn drop(&mut self) {
        if let Some(hidden) = self.0.take() {
            let _ = std::fs::remove_file(hidden);
        }
    }
}

/// Writes the names in a directory to the disk. Some filesystems cannot, and need not.
pub fn sync_directory(directory: &Path) {
    let is_here = directory.as_os_str().is_empty();
    if let Ok(directory) = File::open(if is_here { Path::new(".") } else { directory }) {
        let _ = directory.sync_all();
    }
}

/// Removes what a killed process left of the file of a name.
pub fn remove_stale(directory: &Path, name: &OsStr) {
    remove_stale_at(&hidden_path(directory, name));
}

/// The hidden name of a file: the same in every process, and short however long the file's own name is.
fn hidden_path(directory: &Path, name: &OsStr) -> PathBuf {
    // FNV-1a. Two names with one hash take turns by the lock.
    let mix = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = name.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix);
    directory.join(format!(".ckptfs-{hash:016x}.part"))
}

/// A hidden name that no other process, alive or dead, has used.
fn unique_path(directory: &Path) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    directory.join(format!(".ckptfs-{}-{now}.part", std::process::id()))
}

/// Opens a file without a name, of which not even a killed process leaves anything. `None` where the filesystem has
/// no such files, or nothing could name it later: that goes through `/proc`.
fn open_unnamed(directory: &Path, mode: Mode) -> Option<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(directory, flags, mode).ok()?;
    try_lock(&file);
    Path::new(&fd_path(&file)).is_symlink().then_some(file)
}

/// Gives a file without a name this one.
fn link(file: &impl AsFd, path: &Path) -> Result<(), Errno> {
    rustix::fs::linkat(CWD, fd_path(file), CWD, path, AtFlags::SYMLINK_FOLLOW)
}

/// Removes the file of a hidden name if its owner is dead. Returns whether the name is free.
fn remove_stale_at(path: &Path) -> bool {
    match try_remove_stale(path) {
        Ok(free) => free,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

fn fd_path(file: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// Claims the hidden name of `name`, or makes a unique one if that is taken. `claim` and `make` return what then has
/// the name.
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
                Err(Errno::EXIST) if remove_stale_at(&path) => {}
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

/// Locks a file, which shows that its owner lives. Returns `false` if another process has the lock. On filesystems
/// without locks it returns `true`, and no file counts as a dead process's.
fn try_lock(file: impl AsFd) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}

fn create(path: &Path, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, mode)
}

/// Creates and locks a file. `None` if another process takes it for a dead process's in between, and removes it.
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
    // Of two processes that found it, the second gets the lock when the name is free, or another file's.
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
#[path = "temp_file_tests.rs"]
mod tests;
