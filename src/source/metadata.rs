//! Metadata of a file, directory or link, as `stat` reports it, and the kind of its filesystem.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{
    AtFlags, FileType, FsWord, Stat, Statx, StatxFlags, StatxTimestamp, fstatfs, makedev,
};

use super::error::SourceError;

/// The kind of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory of files.
    Directory,
    /// A symbolic link, not followed.
    Link,
    /// A named pipe.
    Pipe,
    /// A Unix-domain socket.
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

/// Distinguishes the contents of a file that is held open. The change time is not part of it: a link, a rename or
/// a chmod moves it and leaves every byte as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Number of the device that it is on.
    pub dev: u64,
    /// Number of the inode.
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

/// Distinguishes the contents of a file that is not held open. A program can set the modification time back, and a
/// replacement can reuse the inode number; the change time reveals both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileState {
    /// Sufficient while the file is held open.
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

/// Mode, owner, times and the other fields of `stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMetadata {
    /// File, directory, link or special file.
    pub kind: FileKind,
    /// Number of the device that it is on.
    pub dev: u64,
    /// Number of the inode.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Disk usage in units of 512 bytes.
    pub blocks: u64,
    /// Permission bits, without the kind.
    pub mode: u16,
    /// Number of hard links.
    pub links: u32,
    /// ID of the owner.
    pub uid: u32,
    /// ID of the group.
    pub gid: u32,
    /// Device number of a device file.
    pub rdev: u64,
    /// Time of the last read.
    pub atime: SystemTime,
    /// Time of the last write.
    pub mtime: SystemTime,
    /// Time of the last change, of metadata too.
    pub ctime: SystemTime,
    /// Birth time, where the filesystem stores it: it differs for a later file with the same inode number.
    pub btime: Option<SystemTime>,
    state: FileState,
}

impl FileMetadata {
    pub(super) fn of_fd(fd: impl AsFd, display_path: &Path) -> Result<FileMetadata, SourceError> {
        FileMetadata::statx(fd, AtFlags::EMPTY_PATH, display_path)
    }

    /// The attributes that the kernel has cached: a remote filesystem is not asked, and cannot block.
    pub(super) fn cached_of_fd(
        fd: impl AsFd,
        display_path: &Path,
    ) -> Result<FileMetadata, SourceError> {
        FileMetadata::statx(fd, AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, display_path)
    }

    /// Metadata of a file of which only the kind is known. Its mode grants no permission.
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

    /// Metadata of an object of a store, or of a directory of such. Only this user may read it.
    #[cfg(feature = "remote")]
    pub(super) fn of_remote(kind: FileKind, state: FileState, time: SystemTime) -> FileMetadata {
        let FileIdentity { dev, ino, size, .. } = state.identity;
        FileMetadata {
            size,
            blocks: size.div_ceil(512),
            mode: if kind == FileKind::Directory { 0o500 } else { 0o400 },
            links: if kind == FileKind::Directory { 2 } else { 1 },
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            atime: time,
            mtime: time,
            ctime: time,
            state,
            ..FileMetadata::placeholder(kind, dev, ino)
        }
    }

    fn statx(
        fd: impl AsFd,
        flags: AtFlags,
        display_path: &Path,
    ) -> Result<FileMetadata, SourceError> {
        let fields = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = rustix::fs::statx(fd, "", flags, fields)
            .map_err(|e| SourceError::io(display_path, "look at it", e))?;
        Ok(FileMetadata::from(&stat))
    }

    /// Removes from the mode what a directory on the path denies. The directory has this owner, group and mode;
    /// `None` is one that denies everything.
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

    /// Distinguishes the contents while the file is held open.
    pub fn identity(&self) -> FileIdentity {
        self.state.identity
    }

    /// Distinguishes the contents while the file is not held open.
    pub fn state(&self) -> FileState {
        self.state
    }
}

impl From<&Statx> for FileMetadata {
    fn from(stat: &Statx) -> Self {
        let dev = makedev(stat.stx_dev_major, stat.stx_dev_minor);
        let has_btime = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
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
            btime: has_btime.then(|| system_time(&stat.stx_btime)),
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
    // An impossible time becomes the epoch: it is shown, and decides nothing.
    base.and_then(|base| base.checked_add(Duration::from_nanos(time.tv_nsec.into())))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Filesystems that get the bytes from a program or another machine. Even a query for a change may block.
const REMOTE_MAGICS: [FsWord; 19] = [
    0x6573_5546, // fuse, virtiofs
    0x6969,      // nfs
    0x517b,      // smb
    0xff53_4d42, // cifs
    0xfe53_4d42, // smb2 and later
    0x0102_1997, // 9p
    0x00c3_6400, // ceph
    0x0bd0_0bd0, // lustre
    0x5346_414f, // afs
    0x6b41_4653, // kafs
    0x7375_7245, // coda
    0x564c,      // ncp
    0x0116_1970, // gfs2
    0x7461_636f, // ocfs2
    0x4750_4653, // gpfs
    0x1983_0326, // beegfs
    0xaad7_aaea, // panfs
    0x786f_4256, // vboxsf
    0xbacb_acbc, // vmhgfs
];

/// The cached pages of its files belong to the filesystem beneath; a query of its own inodes finds none.
const OVERLAYFS_MAGIC: FsWord = 0x794c_7630;

/// Filesystems without write-back: a page stays writable through a mapping, and stores to it leave no timestamp.
const IN_MEMORY_MAGICS: [FsWord; 3] = [
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x9584_58f6, // hugetlbfs
];

/// Properties of the filesystem of one file.
#[derive(Clone, Copy, Debug)]
pub struct FilesystemKind {
    /// The bytes come from this machine's own disk or memory. An unknown filesystem counts as remote: that is
    /// slower, and never blocks a caller.
    pub is_local: bool,
    /// The file's pages are cached under another inode than its own.
    pub is_overlay: bool,
    /// No disk backs it.
    pub is_in_memory: bool,
}

impl FilesystemKind {
    /// The filesystem of a file, given its descriptor. A file without one is not of this machine.
    pub fn of(descriptor: Option<BorrowedFd<'_>>) -> FilesystemKind {
        let magic = descriptor.and_then(|fd| fstatfs(fd).ok()).map(|stat| stat.f_type);
        FilesystemKind {
            is_local: magic.is_some_and(|magic| !REMOTE_MAGICS.contains(&magic)),
            is_overlay: magic == Some(OVERLAYFS_MAGIC),
            is_in_memory: magic.is_some_and(|magic| IN_MEMORY_MAGICS.contains(&magic)),
        }
    }
}
