//! Where a source file was found, and opening a regular file there again.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, openat, statat};

use super::error::SourceError;
use super::root::{LinkPolicy, Root};

/// Flags for a file whose kind was checked before: opening a pipe blocks, and opening a device can have effects.
pub(super) const READ_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// The place where a file was found.
pub(super) enum FileLocation {
    /// A path beneath a root.
    InRoot { root: Arc<Root>, path: PathBuf, links: LinkPolicy },
    /// A path as the user typed it, and absolute: the process may change its directory.
    User { path: PathBuf, absolute: PathBuf },
}

impl FileLocation {
    /// The location of a path that the user typed.
    pub(super) fn user(path: &Path) -> FileLocation {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        FileLocation::User { path: path.to_path_buf(), absolute }
    }

    /// The path for messages.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            FileLocation::InRoot { root, path, .. } => root.path().join(path),
            FileLocation::User { path, .. } => path.clone(),
        }
    }

    /// Opens the file for reading, if it is a regular one.
    pub(super) fn open(&self) -> Result<(OwnedFd, Stat), SourceError> {
        let stat_error = |e| SourceError::io(&self.path(), "look at it", e);
        let stat = match self {
            FileLocation::InRoot { root, path, links } => {
                fstat(root.resolve(path, OFlags::PATH, *links)?).map_err(stat_error)?
            }
            FileLocation::User { absolute, .. } => {
                statat(CWD, absolute, AtFlags::empty()).map_err(stat_error)?
            }
        };
        self.open_checked(&stat, || self.open_with_flags(READ_FLAGS))
    }

    /// Calls `open` if `stat` is of a regular file, and checks the opened file again.
    pub(super) fn open_checked(
        &self,
        stat: &Stat,
        open: impl FnOnce() -> Result<OwnedFd, SourceError>,
    ) -> Result<(OwnedFd, Stat), SourceError> {
        self.require_regular(stat)?;
        let fd = open()?;
        let stat = fstat(&fd).map_err(|e| SourceError::io(&self.path(), "look at it", e))?;
        self.require_regular(&stat)?;
        Ok((fd, stat))
    }

    /// Opens whatever is there.
    pub(super) fn open_with_flags(&self, flags: OFlags) -> Result<OwnedFd, SourceError> {
        match self {
            FileLocation::InRoot { root, path, links } => root.resolve(path, flags, *links),
            FileLocation::User { path, absolute } => openat(CWD, absolute, flags, Mode::empty())
                .map_err(|e| SourceError::io(path, "open it", e)),
        }
    }

    fn require_regular(&self, stat: &Stat) -> Result<(), SourceError> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(()),
            kind => Err(SourceError::NotAFile { path: self.path(), kind: kind_with_article(kind) }),
        }
    }
}

fn kind_with_article(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "no regular file",
    }
}
