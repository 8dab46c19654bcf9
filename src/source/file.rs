//! A regular file: its location and state at rest, its descriptor while in use.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{
    Advice, AtFlags, CWD, FileType, Mode, OFlags, Stat, fadvise, fstat, openat, statat,
};
use rustix::io::Errno;

use crate::huge_pages::{self, HUGE_PAGE_BYTES};

use super::error::SourceError;
use super::file_limit::open_within_limit;
use super::metadata::{FileIdentity, FileState};
use super::read_at::ReadAt;
use super::root::{LinkPolicy, Root};

/// Flags for a file whose kind was checked before: opening a pipe blocks, and opening a device can have effects.
const READ_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// A regular file, as it was when it was first opened. Holds no descriptor.
pub struct SourceFile {
    location: FileLocation,
    state: FileState,
}

impl SourceFile {
    /// The path for messages.
    pub fn path(&self) -> PathBuf {
        self.location.path()
    }

    /// The identity that was parsed; every later read must find the same.
    pub fn identity(&self) -> FileIdentity {
        self.state.identity
    }

    /// The identity and the change time.
    pub fn state(&self) -> FileState {
        self.state
    }

    /// Opens the file again, and refuses another file than the one that was parsed.
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
        f.debug_struct("SourceFile")
            .field("path", &self.path())
            .field("state", &self.state)
            .finish()
    }
}

/// A source file held open: its bytes remain readable when its name is gone.
#[derive(Debug)]
pub struct OpenFile {
    fd: OwnedFd,
    file: Arc<SourceFile>,
}

impl OpenFile {
    /// Opens a file whose path comes from a directory or a file, by the root's policy for links.
    pub fn open_in_root(root: &Arc<Root>, path: &Path) -> Result<OpenFile, SourceError> {
        OpenFile::open_in_root_with_policy(root, path, root.link_policy())
    }

    /// Opens a file whose path the user typed: its links may lead anywhere.
    pub fn open_user_path_in_root(root: &Arc<Root>, path: &Path) -> Result<OpenFile, SourceError> {
        OpenFile::open_in_root_with_policy(root, path, LinkPolicy::Anywhere)
    }

    fn open_in_root_with_policy(
        root: &Arc<Root>,
        path: &Path,
        links: LinkPolicy,
    ) -> Result<OpenFile, SourceError> {
        let root = Arc::clone(root);
        let location = FileLocation::InRoot { root, path: path.to_path_buf(), links };
        let (fd, stat) = location.open()?;
        Ok(OpenFile::new(fd, &stat, location))
    }

    fn new(fd: OwnedFd, stat: &Stat, location: FileLocation) -> OpenFile {
        OpenFile { fd, file: Arc::new(SourceFile { location, state: FileState::from(stat) }) }
    }

    /// The file at rest.
    pub fn file(&self) -> &Arc<SourceFile> {
        &self.file
    }

    /// Another descriptor of the same file, with its own flags; `None` if the file cannot be opened any more.
    pub(super) fn reopen(&self, flags: OFlags) -> Option<OwnedFd> {
        let flags = flags | READ_FLAGS;
        // The path by descriptor also leads to a file whose name is gone.
        let by_descriptor = PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        let fd = match open_within_limit(|| openat(CWD, &by_descriptor, flags, Mode::empty())) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::ACCESS | Errno::PERM | Errno::LOOP) => {
                self.file.location.open_with_flags(flags).ok()?
            }
            Err(_) => return None,
        };
        let stat = fstat(&fd).ok()?;
        (FileIdentity::from(&stat) == self.file.identity()).then_some(fd)
    }

    /// Refuses bytes of a file that has been written or truncated since it was parsed. Must be called after the
    /// read and before the bytes are used.
    pub fn check_unchanged(&self) -> Result<(), SourceError> {
        if FileIdentity::from(&self.stat()?) != self.file.state.identity {
            return Err(SourceError::Changed { path: self.file.path() });
        }
        Ok(())
    }

    /// Refuses a file whose metadata has changed in any way, even if its bytes are the same.
    pub fn check_state_unchanged(&self) -> Result<(), SourceError> {
        if FileState::from(&self.stat()?) != self.file.state {
            return Err(SourceError::Changed { path: self.file.path() });
        }
        Ok(())
    }

    fn stat(&self) -> Result<Stat, SourceError> {
        fstat(&self.fd).map_err(|e| SourceError::io(&self.file.path(), "look at it", e))
    }

    /// Advises the kernel that all of a range will be read soon: it fetches the range in one go.
    pub fn advise_will_need(&self, range: Range<u64>) {
        let len = NonZeroU64::new(range.end.saturating_sub(range.start));
        let _ = fadvise(&self.fd, range.start, len, Advice::WillNeed);
    }

    /// Fills `buf` up to the current end of the file, and returns the number of bytes read.
    pub fn read_available_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, SourceError> {
        self.read_available_with(&self.fd, buf, offset)
    }

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

    /// Fills `buf` with another descriptor of the same file.
    pub(super) fn read_exact_with(
        &self,
        fd: &OwnedFd,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<(), SourceError> {
        if self.read_available_with(fd, buf, offset)? < buf.len() {
            // Shorter than its own size: it was truncated meanwhile.
            self.check_unchanged()?;
            return Err(SourceError::Truncated { path: self.file.path(), offset });
        }
        Ok(())
    }

    /// Reads the whole file. The caller has checked its size.
    pub fn read_whole(&self) -> Result<FileBytes, SourceError> {
        let Some(len) = usize::try_from(self.size()).ok().filter(|&len| len > 0) else {
            return Ok(FileBytes { map: None, len: 0 });
        };
        // To the end of its last huge page, which is freed with the rest soon.
        let map_len =
            if len < HUGE_PAGE_BYTES { len } else { len.next_multiple_of(HUGE_PAGE_BYTES) };
        let mut map = huge_pages::allocate_zeroed(map_len)
            .map_err(|e| SourceError::io(&self.file.path(), "have memory for it", e))?;
        self.read_exact_at(&mut map[..len], 0)?;
        Ok(FileBytes { map: Some(map), len })
    }

    /// Maps the whole file, privately: writes stay in this process. If the file is truncated, a later access ends
    /// the process (SIGBUS); the caller accepts that.
    #[allow(unsafe_code)]
    pub fn map_private(&self) -> Result<MmapRaw, SourceError> {
        let mut options = MmapOptions::new();
        // Only written pages take memory, so no swap is reserved.
        options
            .no_reserve_swap()
            .len(usize::try_from(self.file.identity().size).unwrap_or(usize::MAX));
        // SAFETY: only its address is handed out, never a slice that must not change.
        let map = unsafe { options.map_copy(self.fd.as_raw_fd()) };
        let map = map.map_err(|e| SourceError::io(&self.file.path(), "map it", e))?;
        self.check_unchanged()?;
        Ok(MmapRaw::from(map))
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
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

/// The bytes of a whole file. They are in huge pages: an index of many megabytes is read in less time than the
/// kernel takes to clear ordinary pages for it.
pub struct FileBytes {
    map: Option<MmapMut>,
    len: usize,
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().map_or(&[], |map| &map[..self.len])
    }
}

impl DerefMut for FileBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().map_or(&mut [], |map| &mut map[..self.len])
    }
}

/// The place where a file was found.
enum FileLocation {
    /// A path beneath a root.
    InRoot { root: Arc<Root>, path: PathBuf, links: LinkPolicy },
    /// A path as the user typed it, and absolute: the process may change its directory.
    User { path: PathBuf, absolute: PathBuf },
}

impl FileLocation {
    /// The location of a path that the user typed.
    fn user(path: &Path) -> FileLocation {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        FileLocation::User { path: path.to_path_buf(), absolute }
    }

    /// The path for messages.
    fn path(&self) -> PathBuf {
        match self {
            FileLocation::InRoot { root, path, .. } => root.path().join(path),
            FileLocation::User { path, .. } => path.clone(),
        }
    }

    /// Opens the file for reading, if it is a regular one.
    fn open(&self) -> Result<(OwnedFd, Stat), SourceError> {
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
    fn open_checked(
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
    fn open_with_flags(&self, flags: OFlags) -> Result<OwnedFd, SourceError> {
        match self {
            FileLocation::InRoot { root, path, links } => root.resolve(path, flags, *links),
            FileLocation::User { path, absolute } => {
                open_within_limit(|| openat(CWD, absolute, flags, Mode::empty()))
                    .map_err(|e| SourceError::io(path, "open it", e))
            }
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

/// A path that the user typed; its links may lead anywhere.
pub enum UserPath {
    /// An existing directory.
    Directory,
    /// A regular file, opened.
    File(OpenFile),
}

impl UserPath {
    /// Opens what the path leads to, unless that is a directory.
    pub fn open(path: &Path) -> Result<UserPath, SourceError> {
        let stat = statat(CWD, path, AtFlags::empty())
            .map_err(|e| SourceError::io(path, "look at it", e))?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Ok(UserPath::Directory);
        }
        let location = FileLocation::user(path);
        // Not by the absolute path: it may be too long, or lead through directories that this user may not pass.
        let open = || {
            open_within_limit(|| openat(CWD, path, READ_FLAGS, Mode::empty()))
                .map_err(|e| SourceError::io(path, "open it", e))
        };
        let (fd, stat) = location.open_checked(&stat, open)?;
        Ok(UserPath::File(OpenFile::new(fd, &stat, location)))
    }
}
