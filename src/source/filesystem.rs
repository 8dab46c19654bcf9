//! What kind of filesystem a file lies on.

use rustix::fs::{FsWord, fstatfs};

use super::OpenFile;

/// Filesystems that ask somebody else for the bytes, a program or another machine, and so may keep
/// a caller waiting for any time even to say whether a file changed.
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

/// Its files' pages belong to the filesystem beneath, and asking about its own finds none.
const OVERLAYFS_MAGIC: FsWord = 0x794c_7630;

/// Filesystems without write-back: a page stays writable through a mapping, and stores to it leave no timestamp.
const IN_MEMORY_MAGICS: [FsWord; 3] = [
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x9584_58f6, // hugetlbfs
];

/// What is known of the filesystem of a file.
#[derive(Clone, Copy, Debug)]
pub struct FilesystemKind {
    /// The bytes come from this machine's own disk or memory. What cannot be told is taken for remote:
    /// that is slower, and never holds anybody up.
    pub is_local: bool,
    /// The file's pages are kept under another inode than its own.
    pub is_overlay: bool,
    /// It has no disk behind it.
    pub is_in_memory: bool,
}

impl OpenFile {
    /// What it lies on.
    pub(super) fn filesystem_kind(&self) -> FilesystemKind {
        let kind = fstatfs(self).map(|stat| stat.f_type).ok();
        FilesystemKind {
            is_local: kind.is_some_and(|kind| !REMOTE_MAGICS.contains(&kind)),
            is_overlay: kind == Some(OVERLAYFS_MAGIC),
            is_in_memory: kind.is_some_and(|kind| IN_MEMORY_MAGICS.contains(&kind)),
        }
    }
}
