//! Attributes and errors of the source, as the protocol has them.

use std::time::Duration;

use fuser::{Errno, FileAttr, FileType, Generation, INodeNo};

use crate::checkpoint::CheckpointError;
use crate::source::{FileKind, FileMetadata, SourceError};
use crate::view::ViewError;
use crate::virtual_file::VirtualFileError;

use super::inodes::{Inode, InodeKind, LastAttributes};

/// How long the kernel may cache names and attributes. A change must show within a second.
const KERNEL_CACHE_TIMEOUT: Duration = Duration::from_millis(500);

/// The same for a file that follows the versions of a chain: a server opens it again and again until there is a new one.
const FOLLOWED_FILE_TIMEOUT: Duration = Duration::from_millis(50);

/// How long the kernel may cache the name and the attributes of an inode.
pub fn kernel_cache_timeout(inode: &Inode) -> Duration {
    match &inode.kind {
        InodeKind::VirtualFile(shown) if shown.follows_versions() => FOLLOWED_FILE_TIMEOUT,
        _ => KERNEL_CACHE_TIMEOUT,
    }
}

/// The kernel distinguishes reuses of an inode number by this. No number is reused while the kernel knows it.
pub const GENERATION: Generation = Generation(0);

/// The owner that files show instead of their own.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnerOverride {
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

pub fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Link => FileType::Symlink,
        FileKind::Pipe => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// The read size that readers are advised to use: that of the largest request.
const PREFERRED_READ_BYTES: u32 = 1 << 20;

pub fn file_attr(number: u64, metadata: &FileMetadata, owner: OwnerOverride) -> FileAttr {
    let (major, minor) = (rustix::fs::major(metadata.rdev), rustix::fs::minor(metadata.rdev));
    FileAttr {
        ino: INodeNo(number),
        size: metadata.size,
        blocks: metadata.blocks,
        atime: metadata.atime,
        mtime: metadata.mtime,
        ctime: metadata.ctime,
        crtime: metadata.btime.unwrap_or(metadata.mtime),
        kind: file_type(metadata.kind),
        perm: metadata.mode,
        nlink: metadata.links,
        uid: owner.uid.unwrap_or(metadata.uid),
        gid: owner.gid.unwrap_or(metadata.gid),
        // As the kernel packs a device into 32 bits.
        rdev: (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12),
        blksize: PREFERRED_READ_BYTES,
        flags: 0,
    }
}

/// The last known attributes of a file that is no longer where it was.
pub fn last_file_attr(number: u64, last: &LastAttributes, owner: OwnerOverride) -> FileAttr {
    let mtime = last.mtime.into();
    FileAttr {
        ino: INodeNo(number),
        size: last.size,
        blocks: last.size.div_ceil(512),
        atime: mtime,
        mtime,
        ctime: mtime,
        crtime: last.btime.unwrap_or(last.mtime).into(),
        kind: file_type(last.kind),
        perm: last.mode,
        nlink: last.links,
        uid: owner.uid.unwrap_or(last.uid),
        gid: owner.gid.unwrap_or(last.gid),
        rdev: 0,
        blksize: PREFERRED_READ_BYTES,
        flags: 0,
    }
}

/// The error number of a request that the view failed.
pub fn view_errno(error: &ViewError) -> Errno {
    match error {
        ViewError::Source(error)
        | ViewError::VirtualFile(VirtualFileError::Source(error))
        | ViewError::Checkpoint(CheckpointError::Source(error)) => source_errno(error),
        ViewError::VirtualFile(_)
        | ViewError::Checkpoint(_)
        | ViewError::Refused(_)
        | ViewError::Recipe { .. }
        | ViewError::KeepsChanging { .. } => Errno::EIO,
    }
}

pub fn source_errno(error: &SourceError) -> Errno {
    match error {
        SourceError::Missing { .. } | SourceError::Dangling { .. } => Errno::ENOENT,
        SourceError::OutsideRoot { .. } => Errno::EACCES,
        SourceError::NotAFile { .. }
        | SourceError::Changed { .. }
        | SourceError::Truncated { .. }
        | SourceError::HeaderMismatch { .. }
        | SourceError::Damaged { .. } => Errno::EIO,
        SourceError::NoRemote { .. } => Errno::EIO,
        #[cfg(feature = "remote")]
        SourceError::Remote { .. } => Errno::EIO,
        SourceError::StaleMount { .. } => Errno::ENOTCONN,
        SourceError::Io { source, .. } => source.raw_os_error().map_or(Errno::EIO, Errno::from_i32),
    }
}

/// Whether the kernel repeats the lookup after this error of an open.
pub fn is_stale(error: &ViewError) -> bool {
    i32::from(open_errno(error)) == i32::from(Errno::ESTALE)
}

/// The error number of an open. ESTALE makes the kernel repeat the lookup. It is for a file that changed since then,
/// and for one that is gone: the name may stand for another file by now.
pub fn open_errno(error: &ViewError) -> Errno {
    let source = match error {
        ViewError::Source(error)
        | ViewError::VirtualFile(VirtualFileError::Source(error))
        | ViewError::Checkpoint(CheckpointError::Source(error)) => error,
        // The name stood for a virtual file when it was looked up.
        ViewError::Checkpoint(_) => return Errno::ESTALE,
        error => return view_errno(error),
    };
    match source {
        SourceError::Missing { .. }
        | SourceError::Changed { .. }
        | SourceError::Truncated { .. } => Errno::ESTALE,
        error => source_errno(error),
    }
}
