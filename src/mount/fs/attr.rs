//! What the source says, in the words of the protocol.

use fuser::{Errno, FileAttr, FileType, INodeNo};

use crate::source::{self, FileKind, FileMetadata};
use crate::{checkpoint, view, virtual_file};

use super::inodes::LastAttributes;

/// The owner that is shown instead of the source's.
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

/// The read size that readers are advised to use, in bytes: that of the largest request.
const PREFERRED_READ_BYTES: u32 = 1 << 20;

pub fn file_attr(number: u64, attributes: &FileMetadata, owner: OwnerOverride) -> FileAttr {
    let (major, minor) = (rustix::fs::major(attributes.rdev), rustix::fs::minor(attributes.rdev));
    FileAttr {
        ino: INodeNo(number),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: attributes.atime,
        mtime: attributes.mtime,
        ctime: attributes.ctime,
        crtime: attributes.btime.unwrap_or(attributes.mtime),
        kind: file_type(attributes.kind),
        perm: attributes.mode,
        nlink: attributes.links,
        uid: owner.uid.unwrap_or(attributes.uid),
        gid: owner.gid.unwrap_or(attributes.gid),
        // As the kernel packs a device into 32 bits.
        rdev: (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12),
        blksize: PREFERRED_READ_BYTES,
        flags: 0,
    }
}

/// Attributes of a file that is no longer where it was, as it was last seen.
pub fn last_file_attr(number: u64, last: &LastAttributes, owner: OwnerOverride) -> FileAttr {
    let mtime = last.mtime.into();
    FileAttr {
        ino: INodeNo(number),
        size: last.size,
        blocks: last.size.div_ceil(512),
        atime: mtime,
        mtime,
        ctime: mtime,
        crtime: last.born.unwrap_or(last.mtime).into(),
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

/// The one place where an error becomes a number.
pub fn view_errno(error: &view::ViewError) -> Errno {
    match error {
        view::ViewError::Source(error) => source_errno(error),
        view::ViewError::VirtualFile(error) => virtual_file_errno(error),
        view::ViewError::Checkpoint(checkpoint::CheckpointError::Source(error)) => {
            source_errno(error)
        }
        view::ViewError::Checkpoint(_)
        | view::ViewError::Refused(_)
        | view::ViewError::KeepsChanging { .. } => Errno::EIO,
    }
}

pub fn virtual_file_errno(error: &virtual_file::VirtualFileError) -> Errno {
    match error {
        virtual_file::VirtualFileError::Source(error) => source_errno(error),
        _ => Errno::EIO,
    }
}

pub fn source_errno(error: &source::SourceError) -> Errno {
    match error {
        source::SourceError::Missing { .. } | source::SourceError::Dangling { .. } => Errno::ENOENT,
        source::SourceError::OutsideRoot { .. } => Errno::EACCES,
        source::SourceError::NotAFile { .. } | source::SourceError::Changed { .. } => Errno::EIO,
        source::SourceError::Truncated { .. } => Errno::EIO,
        source::SourceError::StaleMount { .. } => Errno::ENOTCONN,
        source::SourceError::Io { source, .. } => {
            source.raw_os_error().map_or(Errno::EIO, Errno::from_i32)
        }
    }
}

/// Whether the kernel looks a name up again after this error of an open.
pub fn is_stale(error: &view::ViewError) -> bool {
    i32::from(open_errno(error)) == i32::from(Errno::ESTALE)
}

/// The error of an open: what changed since the kernel looked it up, it looks up again. So it does
/// with what is gone: the file may have another name, which is the one that is opened.
pub fn open_errno(error: &view::ViewError) -> Errno {
    let source = match error {
        view::ViewError::Source(error)
        | view::ViewError::VirtualFile(virtual_file::VirtualFileError::Source(error))
        | view::ViewError::Checkpoint(checkpoint::CheckpointError::Source(error)) => error,
        // The name stood for a virtual file when it was looked up.
        view::ViewError::Checkpoint(_) => return Errno::ESTALE,
        error => return view_errno(error),
    };
    match source {
        source::SourceError::Missing { .. }
        | source::SourceError::Changed { .. }
        | source::SourceError::Truncated { .. } => Errno::ESTALE,
        error => source_errno(error),
    }
}
