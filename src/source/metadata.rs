//! What the system says of a file, directory or link.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, StatxTimestamp, makedev};

use super::{FileIdentity, FileState, SourceError};

/// What kind of thing a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, itself.
    Link,
    /// A named pipe.
    Pipe,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl From<FileType> for FileKind {
    fn from(kind: FileType) -> Self {
        match kind {
            FileType::Directory => FileKind::Directory,
            FileType::Symlink => FileKind::Link,
            FileType::Fifo => FileKind::Pipe,
            FileType::Socket => FileKind::Socket,
            FileType::CharacterDevice => FileKind::CharDevice,
            FileType::BlockDevice => FileKind::BlockDevice,
            _ => FileKind::File,
        }
    }
}

/// Mode, owner, times and the rest, as `stat` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMetadata {
    /// What it is.
    pub kind: FileKind,
    /// The device that it lies on.
    pub dev: u64,
    /// Its inode there.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes that it takes on the disk.
    pub blocks: u64,
    /// Permissions, without the kind.
    pub mode: u16,
    /// Names that it has.
    pub links: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Which device it is, if it is one.
    pub rdev: u64,
    /// Last read.
    pub atime: SystemTime,
    /// Last written.
    pub mtime: SystemTime,
    /// Last changed in any way.
    pub ctime: SystemTime,
    /// Made, where the filesystem knows: it tells a file from a later one with the same inode.
    pub btime: Option<SystemTime>,
    state: FileState,
}

impl FileMetadata {
    /// Of an open file or path.
    pub(super) fn of_fd(fd: impl AsFd, shown: &Path) -> Result<FileMetadata, SourceError> {
        FileMetadata::statx(fd, AtFlags::EMPTY_PATH, shown)
    }

    /// As the system last knew them: a filesystem that would have to ask somebody else, a daemon or
    /// another machine, is not waited for.
    pub(super) fn cached_of_fd(fd: impl AsFd, shown: &Path) -> Result<FileMetadata, SourceError> {
        FileMetadata::statx(fd, AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, shown)
    }

    /// Attributes of a file of which only the kind is known. Its mode grants no permission.
    pub fn placeholder(kind: FileKind, dev: u64, ino: u64) -> FileMetadata {
        let identity = FileIdentity { dev, ino, size: 0, mtime: 0, mtime_nsec: 0 };
        let epoch = SystemTime::UNIX_EPOCH;
        FileMetadata {
            kind,
            dev,
            ino,
            size: 0,
            blocks: 0,
            mode: 0,
            links: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            atime: epoch,
            mtime: epoch,
            ctime: epoch,
            btime: None,
            state: FileState { identity, ctime: 0, ctime_nsec: 0 },
        }
    }

    fn statx(fd: impl AsFd, flags: AtFlags, shown: &Path) -> Result<FileMetadata, SourceError> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = rustix::fs::statx(fd, "", flags, wanted)
            .map_err(|e| SourceError::io(shown, "look at it", e))?;
        Ok(FileMetadata::from(&stat))
    }

    /// Leaves to each class of users what a directory on the way there, of this owner, group and mode,
    /// lets through.
    pub(super) fn restrict_mode(&mut self, directory: Option<(u32, u32, u32)>) {
        let (uid, gid, mode) = directory.unwrap_or((u32::MAX, u32::MAX, 0));
        let others = mode & 0o001 != 0;
        let group = if gid == self.gid { mode & 0o010 != 0 } else { others };
        let owner = if uid == self.uid { mode & 0o100 != 0 } else { others };
        for (passes, class) in [(owner, 0o700), (group, 0o070), (others, 0o007)] {
            if !passes {
                self.mode &= !class;
            }
        }
    }

    /// What tells this state of a file from another.
    pub fn identity(&self) -> FileIdentity {
        self.state.identity
    }

    /// The same, and when anything about it last changed.
    pub fn state(&self) -> FileState {
        self.state
    }
}

impl From<&Statx> for FileMetadata {
    fn from(stat: &Statx) -> Self {
        let dev = makedev(stat.stx_dev_major, stat.stx_dev_minor);
        let has_born = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        FileMetadata {
            kind: FileType::from_raw_mode(u32::from(stat.stx_mode)).into(),
            dev,
            ino: stat.stx_ino,
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            mode: stat.stx_mode & 0o7777,
            links: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            rdev: makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
            atime: system_time(&stat.stx_atime),
            mtime: system_time(&stat.stx_mtime),
            ctime: system_time(&stat.stx_ctime),
            btime: has_born.then(|| system_time(&stat.stx_btime)),
            state: FileState {
                identity: FileIdentity {
                    dev,
                    ino: stat.stx_ino,
                    size: stat.stx_size,
                    mtime: stat.stx_mtime.tv_sec,
                    mtime_nsec: stat.stx_mtime.tv_nsec,
                },
                ctime: stat.stx_ctime.tv_sec,
                ctime_nsec: stat.stx_ctime.tv_nsec,
            },
        }
    }
}

fn system_time(time: &StatxTimestamp) -> SystemTime {
    let whole = Duration::from_secs(time.tv_sec.unsigned_abs());
    let base = if time.tv_sec < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(whole)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(whole)
    };
    // A time that cannot be is the oldest there is: it is shown, and decides nothing.
    base.and_then(|base| base.checked_add(Duration::from_nanos(time.tv_nsec.into())))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
