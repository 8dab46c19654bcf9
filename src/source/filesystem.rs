//! The kind of filesystem that a file is on.

use std::os::fd::AsFd;

use rustix::fs::{FsWord, fstatfs};

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
    pub fn of(file: impl AsFd) -> FilesystemKind {
        let magic = fstatfs(file).map(|stat| stat.f_type).ok();
        FilesystemKind {
            is_local: magic.is_some_and(|magic| !REMOTE_MAGICS.contains(&magic)),
            is_overlay: magic == Some(OVERLAYFS_MAGIC),
            is_in_memory: magic.is_some_and(|magic| IN_MEMORY_MAGICS.contains(&magic)),
        }
    }
}
