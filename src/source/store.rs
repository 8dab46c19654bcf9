//! What every kind of source can do, wherever its bytes lie: the traits behind [`Root`](super::Root) and
//! [`OpenFile`](super::OpenFile).
//!
//! A directory of this machine has links, devices and descriptors. A store without them has the default methods.

use std::ffi::OsString;
use std::fmt;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{OFlags, StatVfs, StatVfsMountFlags};

use super::error::SourceError;
use super::metadata::{FileKind, FileMetadata, FileState};

/// Where symbolic links may lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkPolicy {
    /// Only beneath the root.
    Inside,
    /// Anywhere: the user allowed it, or typed this very path.
    Anywhere,
}

/// One entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The file name.
    pub name: OsString,
    /// The kind of the entry itself: links are not followed.
    pub kind: FileKind,
}

/// A path with all links followed by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedPath {
    /// The path from the root, without links.
    pub path: PathBuf,
    /// The links that were followed, as paths from the root.
    pub links: Vec<PathBuf>,
}

/// Which metadata of a path is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataQuery {
    /// Metadata of what the path leads to, as it is now.
    Current,
    /// The same as it was last seen: nothing is waited for.
    Cached,
    /// Metadata of a link itself, if the path ends with one.
    Link,
}

/// Threads that read headers on this machine: they wait for a cold disk, or keep every core busy.
const LOCAL_READER_THREADS: usize = 8;

/// A directory that bounds what may be opened. Paths are relative to it.
pub trait SourceDirectory: fmt::Debug + Send + Sync {
    /// The path for messages.
    fn path(&self) -> &Path;

    /// The path of a file inside for messages.
    fn shown_path(&self, inside: &Path) -> PathBuf {
        self.path().join(inside)
    }

    /// The absolute path without links.
    fn real_path(&self) -> &Path {
        self.path()
    }

    /// The entries of a directory inside, in any order.
    fn entries(&self, inside: &Path) -> Result<Vec<DirEntry>, SourceError>;

    /// Metadata of a path inside.
    fn metadata(&self, inside: &Path, query: MetadataQuery) -> Result<FileMetadata, SourceError>;

    /// Opens a regular file inside.
    fn open(&self, inside: &Path, links: LinkPolicy) -> Result<Box<dyn FileHandle>, SourceError>;

    /// Opens whatever is there, if it is on this machine.
    fn open_descriptor(&self, _: &Path, _: OFlags, _: LinkPolicy) -> Option<OwnedFd> {
        None
    }

    /// The target of a link inside, as the link stores it.
    fn link_target(&self, inside: &Path) -> Result<PathBuf, SourceError> {
        let path = self.path().join(inside);
        Err(SourceError::io(&path, "read the link", std::io::ErrorKind::InvalidInput))
    }

    /// Follows all links of a path by name, whether its target exists or not; `None` if it leads out.
    fn resolve_by_name(&self, inside: &Path) -> Option<ResolvedPath> {
        let mut path = PathBuf::new();
        for part in inside.components() {
            match part {
                Component::Normal(name) => path.push(name),
                Component::ParentDir if !path.pop() => return None,
                Component::RootDir | Component::Prefix(_) => return None,
                Component::CurDir | Component::ParentDir => {}
            }
        }
        Some(ResolvedPath { path, links: Vec::new() })
    }

    /// Refuses from now on to open anything on a device: it is our own mount of this directory.
    fn exclude_device(&self, _device: u64) {}

    /// Threads that read headers of its files at once.
    fn reader_threads(&self) -> usize {
        LOCAL_READER_THREADS
    }

    /// Whether the directory was removed since it was opened: it can never have entries again, even if another is
    /// created under its name.
    fn is_removed(&self) -> bool {
        false
    }

    /// Total and free space.
    fn filesystem_stats(&self) -> Result<StatVfs, SourceError> {
        Ok(StatVfs {
            f_bsize: 4096,
            f_frsize: 4096,
            f_blocks: 0,
            f_bfree: 0,
            f_bavail: 0,
            f_files: 0,
            f_ffree: 0,
            f_favail: 0,
            f_fsid: 0,
            f_flag: StatVfsMountFlags::RDONLY,
            f_namemax: 255,
        })
    }

    /// The descriptor, if it is a directory of this machine.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Unwanted bytes that a store sends in the time of one more request.
pub const REMOTE_GAP_BYTES: u64 = 512 << 10;

/// The requests by which a source is read fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreferredRequests {
    /// Bytes of a long read that one request asks for.
    pub bytes: u64,
    /// The most requests that are of use at once.
    pub max_count: usize,
}

/// Where a file's bytes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// In a filesystem.
    Filesystem,
    /// In the cache on disk, which has nearly all of them.
    DiskCache,
    /// In a store, where each request takes long whatever its size.
    Store(PreferredRequests),
}

/// A file held open: its bytes remain readable, or reading them fails, when another has its name.
pub trait FileHandle: fmt::Debug + Send + Sync {
    /// The state of the file now.
    fn state(&self) -> Result<FileState, SourceError>;

    /// Fills `buf` up to the current end of the file, and returns the number of bytes read.
    fn read_available_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, SourceError>;

    /// Fills each target from its offset, all of a file of its size or larger. Targets are in order and lie close
    /// together: a store fetches what is between them too. Returns the bytes that its cache on disk had.
    fn read_scattered(&self, targets: &mut [(u64, &mut [u8])]) -> Result<u64, SourceError>;

    /// Whether [`FileHandle::state`] never waits for another program or machine.
    fn is_state_known(&self) -> bool {
        false
    }

    /// Where its bytes are read.
    fn storage(&self) -> Storage {
        Storage::Filesystem
    }

    /// Keeps a range in the cache on disk, where the kind of source has one. Returns the bytes that were there.
    fn keep_on_disk(&self, _range: Range<u64>) -> Result<u64, SourceError> {
        Ok(0)
    }

    /// Bytes of ranges that no block of the cache on disk has now.
    fn uncached_bytes(&self, _ranges: &[Range<u64>]) -> u64 {
        0
    }

    /// Has later reads pass the cache on disk by.
    fn bypass_disk_cache(&self) {}

    /// Drops what later reads add to the cache on disk from the page cache, after its writeback.
    fn keep_blocks_out_of_page_cache(&self) {}

    /// Announces that all of a range will be read soon.
    fn advise_will_need(&self, _range: Range<u64>) {}

    /// The descriptor, if it is a file of this machine.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
