//! A regular file of any kind of source: its location and state at rest, and its handle while in use.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use memmap2::{MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use crate::huge_pages::{self, HUGE_PAGE_BYTES};

use super::deferred_checks::{CheckedFile, DeferredChecks};
use super::error::SourceError;
use super::file_limit::open_within_limit;
use super::local::{LocalFile, read_available};
use super::metadata::{FileIdentity, FileState};
use super::read_at::ReadAt;
use super::root::{Root, is_directory, split_parent};
use super::store::{FileHandle, LinkPolicy, PreferredRequests, Storage};
use super::url::is_source_url;

/// A regular file, as it was when it was first opened. Holds no descriptor.
pub struct SourceFile {
    location: FileLocation,
    state: FileState,
    /// Checks that its parser leaves to the first reads.
    deferred: OnceLock<DeferredChecks>,
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

    /// Whether it lies in a store.
    pub fn is_remote(&self) -> bool {
        match &self.location {
            FileLocation::InRoot { root, .. } => root.descriptor().is_none(),
            FileLocation::User { .. } => false,
        }
    }

    /// The approximate bytes of memory that it takes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<SourceFile>() + self.deferred.get().map_or(0, DeferredChecks::memory_bytes)
    }

    /// Whether something in the same directory has this name.
    pub fn has_sibling(&self, name: &str) -> bool {
        match &self.location {
            FileLocation::InRoot { root, path, .. } => {
                root.metadata(&path.with_file_name(name)).is_ok()
            }
            FileLocation::User { absolute, .. } => absolute.with_file_name(name).exists(),
        }
    }

    /// Opens the file again, and refuses another file than the one that was parsed.
    pub fn open(self: &Arc<Self>) -> Result<OpenFile, SourceError> {
        let handle = self.location.open()?;
        if handle.state()?.identity != self.state.identity {
            return Err(SourceError::changed(self.path()));
        }
        Ok(OpenFile { handle, file: Arc::clone(self) })
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

/// A source file held open.
#[derive(Debug)]
pub struct OpenFile {
    handle: Box<dyn FileHandle>,
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
        OpenFile::new(location.open()?, location)
    }

    fn new(handle: Box<dyn FileHandle>, location: FileLocation) -> Result<OpenFile, SourceError> {
        let state = handle.state()?;
        let file = Arc::new(SourceFile { location, state, deferred: OnceLock::new() });
        Ok(OpenFile { handle, file })
    }

    /// The file at rest.
    pub fn file(&self) -> &Arc<SourceFile> {
        &self.file
    }

    /// The descriptor, if it is a file of this machine.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.handle.descriptor()
    }

    /// Another descriptor of the same file, with its own flags; `None` if the file cannot be opened any more, or is
    /// not of this machine.
    pub(super) fn reopen(&self, flags: OFlags) -> Option<OwnedFd> {
        let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        // The path by descriptor also leads to a file whose name is gone.
        let by_descriptor = format!("/proc/self/fd/{}", self.descriptor()?.as_raw_fd());
        let fd = match open_within_limit(|| openat(CWD, &by_descriptor, flags, Mode::empty())) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::ACCESS | Errno::PERM | Errno::LOOP) => {
                self.file.location.open_descriptor(flags)?
            }
            Err(_) => return None,
        };
        let stat = fstat(&fd).ok()?;
        (FileIdentity::from(&stat) == self.file.identity()).then_some(fd)
    }

    /// Refuses bytes of a file that has been written or truncated since it was parsed. Must be called after the
    /// read and before the bytes are used.
    pub fn check_unchanged(&self) -> Result<(), SourceError> {
        if self.handle.state()?.identity != self.file.state.identity {
            return Err(SourceError::changed(self.file.path()));
        }
        Ok(())
    }

    /// Refuses a file whose metadata has changed in any way, even if its bytes are the same.
    pub fn check_state_unchanged(&self) -> Result<(), SourceError> {
        if self.handle.state()? != self.file.state {
            return Err(SourceError::changed(self.file.path()));
        }
        Ok(())
    }

    /// Announces that all of a range will be read soon: it is fetched in one go.
    pub fn advise_will_need(&self, range: Range<u64>) {
        self.handle.advise_will_need(range);
    }

    /// Fills `buf` up to the current end of the file, and returns the number of bytes read.
    pub fn read_available_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, SourceError> {
        match self.file.deferred.get() {
            None => self.handle.read_available_at(buf, offset),
            Some(checks) => self.with_checked(|file| checks.read_available_at(file, buf, offset)),
        }
    }

    /// Calls `read` with the file in the form that deferred checks take.
    fn with_checked<T>(&self, read: impl FnOnce(&CheckedFile<'_>) -> T) -> T {
        let path = || self.file.path();
        read(&CheckedFile { handle: &*self.handle, size: self.size(), path: &path })
    }

    /// Fills each target from its offset. Targets are in order and lie close together. Returns the bytes that the cache
    /// on disk had.
    pub(super) fn read_scattered(
        &self,
        targets: &mut [(u64, &mut [u8])],
    ) -> Result<u64, SourceError> {
        match self.file.deferred.get() {
            None => self.handle.read_scattered(targets),
            Some(checks) => self.with_checked(|file| checks.read_scattered(file, targets)),
        }
    }

    /// Fills `buf` with another descriptor of the same file.
    pub(super) fn read_exact_with(
        &self,
        fd: &OwnedFd,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<(), SourceError> {
        let read = read_available(fd, buf, offset)
            .map_err(|e| SourceError::io(&self.file.path(), "read it", e))?;
        self.require_whole(read, buf, offset)
    }

    /// Fails if fewer bytes were read than `buf` has.
    fn require_whole(&self, read: usize, buf: &[u8], offset: u64) -> Result<(), SourceError> {
        if read < buf.len() {
            // Shorter than its own size: it was truncated meanwhile.
            self.check_unchanged()?;
            return Err(SourceError::Truncated { path: self.file.path(), offset });
        }
        Ok(())
    }

    /// Whether [`OpenFile::check_unchanged`] never waits for another program or machine, beside what its filesystem does.
    pub(super) fn is_state_known(&self) -> bool {
        self.handle.is_state_known()
    }

    /// Where its bytes are read.
    pub fn storage(&self) -> Storage {
        self.handle.storage()
    }

    /// The requests that it is to be read by, if each takes long whatever its size.
    pub fn preferred_requests(&self) -> Option<PreferredRequests> {
        match self.storage() {
            Storage::Store(preferred) => Some(preferred),
            Storage::Filesystem | Storage::DiskCache => None,
        }
    }

    /// Fetches a range into the cache on disk if the file lies in a store, with all headers that reads of it check.
    /// Returns how many bytes of the range were there.
    pub fn keep_on_disk(&self, range: Range<u64>) -> Result<u64, SourceError> {
        let Some(checks) = self.file.deferred.get() else {
            return self.handle.keep_on_disk(range);
        };
        let (len, with_header) = (range.end - range.start, checks.with_header(range.clone()));
        for header in checks.headers_outside(range, &with_header) {
            self.handle.keep_on_disk(header)?;
        }
        // Bytes of the header beyond the range do not count.
        Ok(self.handle.keep_on_disk(with_header)?.min(len))
    }

    /// Bytes of ranges that a read would fetch from a store, by the names of the blocks in the cache on disk.
    pub fn uncached_bytes(&self, ranges: &[Range<u64>]) -> u64 {
        self.handle.uncached_bytes(ranges)
    }

    /// Has later reads pass the cache on disk by.
    pub fn bypass_disk_cache(&self) {
        self.handle.bypass_disk_cache();
    }

    /// Drops what later reads add to the cache on disk from the page cache, after its writeback.
    pub fn keep_blocks_out_of_page_cache(&self) {
        self.handle.keep_blocks_out_of_page_cache();
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

    /// Maps the whole file, privately: writes stay in this process. `None` if it is not of this machine. If the file
    /// is truncated, a later access ends the process (SIGBUS); the caller accepts that.
    #[allow(unsafe_code)]
    pub fn map_private(&self) -> Result<Option<MmapRaw>, SourceError> {
        let Some(fd) = self.descriptor() else { return Ok(None) };
        let mut options = MmapOptions::new();
        // Only written pages take memory, so no swap is reserved.
        options
            .no_reserve_swap()
            .len(usize::try_from(self.file.identity().size).unwrap_or(usize::MAX));
        // SAFETY: only its address is handed out, never a slice that must not change.
        let map = unsafe { options.map_copy(fd.as_raw_fd()) };
        let map = map.map_err(|e| SourceError::io(&self.file.path(), "map it", e))?;
        self.check_unchanged()?;
        Ok(Some(MmapRaw::from(map)))
    }
}

impl ReadAt for OpenFile {
    fn size(&self) -> u64 {
        self.file.state.identity.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let read = self.read_available_at(buf, offset)?;
        self.require_whole(read, buf, offset)
    }

    fn read_nearby(&self, targets: &mut [(u64, &mut [u8])]) -> Result<(), SourceError> {
        self.read_scattered(targets).map(|_| ())
    }

    fn deferred_checks(&self) -> Option<&OnceLock<DeferredChecks>> {
        self.descriptor().is_none().then_some(&self.file.deferred)
    }
}

/// The bytes of a whole file. They are in huge pages: an index of many megabytes is read in less time than the
/// kernel takes to clear ordinary pages for it.
#[derive(Debug)]
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
            FileLocation::InRoot { root, path, .. } => root.shown_path(path),
            FileLocation::User { path, .. } => path.clone(),
        }
    }

    /// Opens the file for reading, if it is a regular one.
    fn open(&self) -> Result<Box<dyn FileHandle>, SourceError> {
        match self {
            FileLocation::InRoot { root, path, links } => root.open_file(path, *links),
            FileLocation::User { path, absolute } => match LocalFile::open_user_path(absolute)? {
                Some(file) => Ok(Box::new(file)),
                None => Err(SourceError::NotAFile { path: path.clone(), kind: "a directory" }),
            },
        }
    }

    /// Opens whatever is there on this machine.
    fn open_descriptor(&self, flags: OFlags) -> Option<OwnedFd> {
        match self {
            FileLocation::InRoot { root, path, links } => root.open_descriptor(path, flags, *links),
            FileLocation::User { absolute, .. } => {
                open_within_limit(|| openat(CWD, absolute, flags, Mode::empty())).ok()
            }
        }
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
        if is_source_url(path) {
            if is_directory(path)? {
                return Ok(UserPath::Directory);
            }
            let (parent, name) = split_parent(path)?;
            let (root, directory) = Root::for_directory(&parent, LinkPolicy::Inside)?;
            return OpenFile::open_in_root(&root, &directory.join(name)).map(UserPath::File);
        }
        // Not by the absolute path: it may be too long, or lead through directories that this user may not pass.
        match LocalFile::open_user_path(path)? {
            Some(file) => {
                Ok(UserPath::File(OpenFile::new(Box::new(file), FileLocation::user(path))?))
            }
            None => Ok(UserPath::Directory),
        }
    }
}
