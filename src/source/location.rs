//! Where files lie, and opening them there.
//!
//! In: a way beneath a root, or a path that the user typed. Out: a descriptor of a regular file that lies there,
//! and what the system says of it, now and whenever it is opened again.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, openat, statat};
use rustix::io::Errno;

use super::{LinkPolicy, OpenFile, Root, SourceError};

/// How a file is opened for reading. What it is was settled before: opening a pipe blocks, and opening a
/// device can do things.
const READ_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// Where a file is found.
pub(super) enum FileLocation {
    /// Beneath a root.
    InRoot { root: Arc<Root>, path: PathBuf, links: LinkPolicy },
    /// Where the path leads that the user typed; and that path from the top, wherever the process is by then.
    User { path: PathBuf, absolute: PathBuf },
}

impl FileLocation {
    pub(super) fn path(&self) -> PathBuf {
        match self {
            FileLocation::InRoot { root, path: way, .. } => root.path().join(way),
            FileLocation::User { path, .. } => path.clone(),
        }
    }

    /// Opens what is there for reading, if it is a regular file.
    pub(super) fn open(&self) -> Result<(OwnedFd, Stat), SourceError> {
        let look = |e| SourceError::io(&self.path(), "look at it", e);
        let stat = match self {
            FileLocation::InRoot { root, path: way, links } => {
                fstat(root.resolve(way, OFlags::PATH, *links)?).map_err(look)?
            }
            FileLocation::User { absolute: whole, .. } => {
                statat(CWD, whole, AtFlags::empty()).map_err(look)?
            }
        };
        self.open_checked(&stat, || self.open_with_flags(READ_FLAGS))
    }

    /// The same by `open`, of what was just looked at.
    fn open_checked(
        &self,
        stat: &Stat,
        open: impl FnOnce() -> Result<OwnedFd, SourceError>,
    ) -> Result<(OwnedFd, Stat), SourceError> {
        require_regular(stat, || self.path())?;
        let fd = open()?;
        let stat = fstat(&fd).map_err(|e| SourceError::io(&self.path(), "look at it", e))?;
        require_regular(&stat, || self.path())?;
        Ok((fd, stat))
    }

    /// Opens what is there.
    pub(super) fn open_with_flags(&self, flags: OFlags) -> Result<OwnedFd, SourceError> {
        match self {
            FileLocation::InRoot { root, path: way, links } => root.resolve(way, flags, *links),
            FileLocation::User { path, absolute: whole } => {
                openat(CWD, whole, flags, Mode::empty())
                    .map_err(|e| SourceError::io(path, "open it", e))
            }
        }
    }
}

/// What lies at a path that the user typed: where its links lead is theirs to say.
pub enum UserPath {
    /// A directory.
    Directory,
    /// A regular file.
    File(OpenFile),
}

impl UserPath {
    /// Opens it, but for a directory.
    pub fn open(path: &Path) -> Result<UserPath, SourceError> {
        let look = |e: Errno| SourceError::io(path, "look at it", e);
        let stat = statat(CWD, path, AtFlags::empty()).map_err(look)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Ok(UserPath::Directory);
        }
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let place = FileLocation::User { path: path.to_path_buf(), absolute: whole };
        // Not by the whole path, which may be too long, or lead through directories that nobody may pass.
        let open = || {
            openat(CWD, path, READ_FLAGS, Mode::empty())
                .map_err(|e| SourceError::io(path, "open it", e))
        };
        let (fd, stat) = place.open_checked(&stat, open)?;
        Ok(UserPath::File(OpenFile::new(fd, &stat, place)))
    }
}

/// What a thing that is not a regular file is, with its article.
fn describe_kind(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "no regular file",
    }
}

fn require_regular(stat: &Stat, path: impl FnOnce() -> PathBuf) -> Result<(), SourceError> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        kind => Err(SourceError::NotAFile { path: path(), kind: describe_kind(kind) }),
    }
}
