//! A source file: its place and identity at rest, its descriptor while in use.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::Stat;
use rustix::io::Errno;

use super::location::FileLocation;
use super::{ReadAt, SourceError};

/// What tells one state of a file from another. The change time is not part of it: a link, a
/// rename or a chmod moves it and leaves every byte as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Device.
    pub dev: u64,
    /// Inode.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Modification time, seconds.
    pub mtime: i64,
    /// Modification time, nanoseconds.
    pub mtime_nsec: u32,
}

impl From<&Stat> for FileIdentity {
    fn from(stat: &Stat) -> Self {
        FileIdentity {
            dev: stat.st_dev,
            ino: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: stat.st_mtime,
            mtime_nsec: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
        }
    }
}

/// A state of a file, for those who do not have it open: the time of a write can be set back, and a
/// file that takes the place of another can have its number; the time of a change tells both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileState {
    /// What those go by who have it open.
    pub identity: FileIdentity,
    /// Change time, seconds.
    pub ctime: i64,
    /// Change time, nanoseconds.
    pub ctime_nsec: u32,
}

impl From<&Stat> for FileState {
    fn from(stat: &Stat) -> Self {
        FileState {
            identity: FileIdentity::from(stat),
            ctime: stat.st_ctime,
            ctime_nsec: u32::try_from(stat.st_ctime_nsec).unwrap_or(0),
        }
    }
}

/// A regular file, as it was when it was first opened. Holds no descriptor.
pub struct SourceFile {
    pub(super) location: FileLocation,
    state: FileState,
}

impl SourceFile {
    /// The path to show to people.
    pub fn path(&self) -> PathBuf {
        self.location.path()
    }

    /// The state that was parsed; every later read must find the same.
    pub fn identity(&self) -> FileIdentity {
        self.state.identity
    }

    /// The same, and when anything about it had last changed.
    pub fn state(&self) -> FileState {
        self.state
    }

    /// Opens the file again, and refuses one that is not the one that was parsed.
    pub fn open(self: &Arc<Self>) -> Result<OpenFile, SourceError> {
        let (fd, stat) = self.location.open()?;
        if FileIdentity::from(&stat) != self.state.identity {
            return Err(SourceError::Changed { path: self.path() });
        }
        Ok(OpenFile { fd, file: Arc::clone(self) })
    }
}

impl fmt::Debug for SourceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File").field("path", &self.path()).field("state", &self.state).finish()
    }
}

/// A source file held open: its bytes stay, whatever happens to its name.
#[derive(Debug)]
pub struct OpenFile {
    pub(super) fd: OwnedFd,
    pub(super) file: Arc<SourceFile>,
}

impl OpenFile {
    /// Opens the regular file that lies at a place.
    pub(super) fn open(place: FileLocation) -> Result<OpenFile, SourceError> {
        let (fd, stat) = place.open()?;
        Ok(OpenFile::new(fd, &stat, place))
    }

    pub(super) fn new(fd: OwnedFd, stat: &Stat, place: FileLocation) -> OpenFile {
        OpenFile {
            fd,
            file: Arc::new(SourceFile { location: place, state: FileState::from(stat) }),
        }
    }

    /// The file at rest.
    pub fn file(&self) -> &Arc<SourceFile> {
        &self.file
    }

    /// Refuses bytes that were read from a file which has since been written or truncated.
    /// Ask after the read and before the bytes are used.
    pub fn check_unchanged(&self) -> Result<(), SourceError> {
        let stat = rustix::fs::fstat(&self.fd)
            .map_err(|e| SourceError::io(&self.file.path(), "look at it", e))?;
        if FileIdentity::from(&stat) != self.file.state.identity {
            return Err(SourceError::Changed { path: self.file.path() });
        }
        Ok(())
    }

    /// Refuses a file about which anything has changed, also what leaves its bytes as they are: who
    /// opens it now can be given a new look.
    pub fn check_state_unchanged(&self) -> Result<(), SourceError> {
        let stat = rustix::fs::fstat(&self.fd)
            .map_err(|e| SourceError::io(&self.file.path(), "look at it", e))?;
        if FileState::from(&stat) != self.file.state {
            return Err(SourceError::Changed { path: self.file.path() });
        }
        Ok(())
    }

    /// Tells the system that these bytes are wanted soon, all of them: it fetches them in one go.
    pub fn advise_will_need(&self, range: std::ops::Range<u64>) {
        let len = std::num::NonZeroU64::new(range.end.saturating_sub(range.start));
        let _ = rustix::fs::fadvise(&self.fd, range.start, len, rustix::fs::Advice::WillNeed);
    }

    /// Fills `buf` as far as the file goes now, whatever it was when it was opened.
    pub fn read_available_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, SourceError> {
        self.read_available_with(&self.fd, buf, offset)
    }

    /// The same by another descriptor of it.
    fn read_available_with(
        &self,
        fd: &OwnedFd,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize, SourceError> {
        let mut done = 0;
        while done < buf.len() {
            match rustix::io::pread(fd, &mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(SourceError::io(&self.file.path(), "read it", e)),
            }
        }
        Ok(done)
    }

    /// Fills `buf` by another descriptor of it.
    pub(super) fn read_exact_with(
        &self,
        fd: &OwnedFd,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<(), SourceError> {
        if self.read_available_with(fd, buf, offset)? < buf.len() {
            // Shorter than its own size: it was truncated under us.
            self.check_unchanged()?;
            return Err(SourceError::Truncated { path: self.file.path(), offset });
        }
        Ok(())
    }

    /// The whole file as memory that may be written: what is written stays in this process. Whoever
    /// uses it must bear that a file which is truncated under it ends the process (SIGBUS).
    #[allow(unsafe_code)]
    pub fn map_private(&self) -> Result<MmapRaw, SourceError> {
        let mut options = MmapOptions::new();
        // Only what is written takes memory of its own, so none is set aside.
        options
            .no_reserve_swap()
            .len(usize::try_from(self.file.identity().size).unwrap_or(usize::MAX));
        // SAFETY: it is handed out by its address alone, never as a slice that must not change.
        let map = unsafe { options.map_copy(self.fd.as_raw_fd()) };
        let map = map.map_err(|e| SourceError::io(&self.file.path(), "map it", e))?;
        self.check_unchanged()?;
        Ok(MmapRaw::from(map))
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl ReadAt for OpenFile {
    fn size(&self) -> u64 {
        self.file.state.identity.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.read_exact_with(&self.fd, buf, offset)
    }
}
