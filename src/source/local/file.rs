//! A regular file of this machine, held by a descriptor.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fadvise, fstat, openat, statat};
use rustix::io::Errno;

use crate::source::error::SourceError;
use crate::source::file_limit::open_within_limit;
use crate::source::metadata::FileState;
use crate::source::store::FileHandle;

/// Flags for a file whose kind was checked before: opening a pipe blocks, and opening a device can have effects.
const READ_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// An open regular file.
#[derive(Debug)]
pub struct LocalFile {
    fd: OwnedFd,
    /// The path for messages.
    path: PathBuf,
}

impl LocalFile {
    /// Opens a path that the user typed; `None` if it is a directory.
    pub fn open_user_path(path: &Path) -> Result<Option<LocalFile>, SourceError> {
        let stat = statat(CWD, path, AtFlags::empty())
            .map_err(|e| SourceError::io(path, "look at it", e))?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Ok(None);
        }
        let open = |flags| {
            open_within_limit(|| openat(CWD, path, flags, Mode::empty()))
                .map_err(|e| SourceError::io(path, "open it", e))
        };
        LocalFile::open_checked(path.to_path_buf(), &stat, open).map(Some)
    }

    /// Calls `open` if `stat` is of a regular file, and checks the opened file again.
    pub fn open_checked(
        path: PathBuf,
        stat: &Stat,
        open: impl FnOnce(OFlags) -> Result<OwnedFd, SourceError>,
    ) -> Result<LocalFile, SourceError> {
        require_regular(stat, &path)?;
        let file = LocalFile { fd: open(READ_FLAGS)?, path };
        require_regular(&file.stat()?, &file.path)?;
        Ok(file)
    }

    fn stat(&self) -> Result<Stat, SourceError> {
        fstat(&self.fd).map_err(|e| SourceError::io(&self.path, "look at it", e))
    }
}

impl FileHandle for LocalFile {
    fn state(&self) -> Result<FileState, SourceError> {
        Ok(FileState::from(&self.stat()?))
    }

    fn read_available_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, SourceError> {
        read_available(&self.fd, buf, offset).map_err(|e| SourceError::io(&self.path, "read it", e))
    }

    fn read_scattered(&self, targets: &mut [(u64, &mut [u8])]) -> Result<u64, SourceError> {
        for (offset, target) in targets {
            if self.read_available_at(target, *offset)? < target.len() {
                return Err(SourceError::Truncated { path: self.path.clone(), offset: *offset });
            }
        }
        Ok(0)
    }

    fn advise_will_need(&self, range: Range<u64>) {
        let len = NonZeroU64::new(range.end.saturating_sub(range.start));
        let _ = fadvise(&self.fd, range.start, len, rustix::fs::Advice::WillNeed);
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}

/// Fills `buf` up to the current end of the file, and returns the number of bytes read.
pub fn read_available(fd: impl AsFd, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < buf.len() {
        match rustix::io::pread(&fd, &mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

fn require_regular(stat: &Stat, path: &Path) -> Result<(), SourceError> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        kind => {
            let kind = kind_with_article(kind);
            Err(SourceError::NotAFile { path: path.to_path_buf(), kind })
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
