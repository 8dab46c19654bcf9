//! What the source says, in the words of the protocol.

use fuser::{Errno, FileAttr, FileType, INodeNo};

use crate::source::{self, Attributes, Kind};
use crate::{checkpoint, image, view};

use super::inodes::LastSeen;

/// The owner that is shown instead of the source's.
#[derive(Clone, Copy, Debug, Default)]
pub struct Owner {
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

pub fn kind(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Link => FileType::Symlink,
        Kind::Pipe => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    }
}

/// The read size that readers are advised to use, in bytes: that of the largest request.
const BLOCK_BYTES: u32 = 1 << 20;

pub fn attr(number: u64, attributes: &Attributes, owner: Owner) -> FileAttr {
    let (major, minor) = (rustix::fs::major(attributes.rdev), rustix::fs::minor(attributes.rdev));
    FileAttr {
        ino: INodeNo(number),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: attributes.atime,
        mtime: attributes.mtime,
        ctime: attributes.ctime,
        crtime: attributes.born.unwrap_or(attributes.mtime),
        kind: kind(attributes.kind),
        perm: attributes.mode,
        nlink: attributes.links,
        uid: owner.uid.unwrap_or(attributes.uid),
        gid: owner.gid.unwrap_or(attributes.gid),
        // As the kernel packs a device into 32 bits.
        rdev: (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12),
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// Attributes of a file that is no longer where it was, as it was last seen.
pub fn last_attr(number: u64, last: &LastSeen, owner: Owner) -> FileAttr {
    let mtime = last.mtime.into();
    FileAttr {
        ino: INodeNo(number),
        size: last.size,
        blocks: last.size.div_ceil(512),
        atime: mtime,
        mtime,
        ctime: mtime,
        crtime: last.born.unwrap_or(last.mtime).into(),
        kind: kind(last.kind),
        perm: last.mode,
        nlink: last.links,
        uid: owner.uid.unwrap_or(last.uid),
        gid: owner.gid.unwrap_or(last.gid),
        rdev: 0,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// The one place where an error becomes a number.
pub fn errno(error: &view::Error) -> Errno {
    match error {
        view::Error::Source(error) => of_source(error),
        view::Error::Image(error) => of_image(error),
        view::Error::Checkpoint(checkpoint::Error::Source(error)) => of_source(error),
        view::Error::Checkpoint(_) | view::Error::Refused(_) | view::Error::Restless { .. } => {
            Errno::EIO
        }
    }
}

pub fn of_image(error: &image::Error) -> Errno {
    match error {
        image::Error::Source(error) => of_source(error),
        _ => Errno::EIO,
    }
}

pub fn of_source(error: &source::Error) -> Errno {
    match error {
        source::Error::Missing { .. } | source::Error::Dangling { .. } => Errno::ENOENT,
        source::Error::Outside { .. } => Errno::EACCES,
        source::Error::NotAFile { .. } | source::Error::Changed { .. } => Errno::EIO,
        source::Error::Short { .. } => Errno::EIO,
        source::Error::Gone { .. } => Errno::ENOTCONN,
        source::Error::Io { source, .. } => {
            source.raw_os_error().map_or(Errno::EIO, Errno::from_i32)
        }
    }
}

/// Whether the kernel looks a name up again after this error of an open.
pub fn is_stale(error: &view::Error) -> bool {
    i32::from(on_opening(error)) == i32::from(Errno::ESTALE)
}

/// The error of an open: what changed since the kernel looked it up, it looks up again. So it does
/// with what is gone: the file may have another name, which is the one that is opened.
pub fn on_opening(error: &view::Error) -> Errno {
    let source = match error {
        view::Error::Source(error)
        | view::Error::Image(image::Error::Source(error))
        | view::Error::Checkpoint(checkpoint::Error::Source(error)) => error,
        // The name stood for a virtual file when it was looked up.
        view::Error::Checkpoint(_) => return Errno::ESTALE,
        error => return errno(error),
    };
    match source {
        source::Error::Missing { .. }
        | source::Error::Changed { .. }
        | source::Error::Short { .. } => Errno::ESTALE,
        error => of_source(error),
    }
}
