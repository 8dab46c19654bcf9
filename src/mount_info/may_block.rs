//! Decides whether a lookup of a path may block on another program or another machine, without asking either.
//! `stat` and `statfs` would ask, and may never return.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, fstat, openat2, statx,
};
use rustix::io::Errno;

use super::mountinfo;

/// Types of filesystems whose bytes come from this machine's own disk or memory. A filesystem of any other type may
/// block.
const LOCAL_TYPES: [&str; 17] = [
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "ntfs3",
    "overlay", "ramfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs",
];

/// The unique ID of the mount that was last found to be local, or 0. Reading the table of mounts takes longer than
/// opening a small file. The IDs in the table are reused as soon as a mount is gone; unique IDs never are.
static LAST_LOCAL_MOUNT: AtomicU64 = AtomicU64::new(0);

/// Asks `statx` for the unique ID of the mount. Since Linux 6.8.
const UNIQUE_MOUNT_ID: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Whether a lookup of the path may block. True also if the kernel has not cached even the folder: such a lookup
/// takes a while on any filesystem.
pub fn may_block(path: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let open_cached = |path: &Path| openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED);
    match open_cached(path) {
        Ok(fd) => may_be_remote(&fd),
        Err(Errno::AGAIN) => {
            let Some(name) = path.file_name() else { return true };
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let Ok(folder) = open_cached(folder.unwrap_or(Path::new("."))) else { return true };
            // An entry of a local folder is local, if it is neither a mountpoint nor a link. Only files: a folder
            // may have many entries, and reading them takes a while.
            let same_mount = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
            let is_file = || {
                let stat = openat2(&folder, name, flags, Mode::empty(), same_mount).and_then(fstat);
                stat.is_ok_and(|stat| {
                    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                })
            };
            may_be_remote(&folder) || !is_file()
        }
        Err(_) => true,
    }
}

/// Whether an open path may be on a remote filesystem.
fn may_be_remote(fd: &OwnedFd) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(stat) = statx(fd, "", flags, UNIQUE_MOUNT_ID) else { return true };
    let unique_id = (stat.stx_mask & UNIQUE_MOUNT_ID.bits() != 0).then_some(stat.stx_mnt_id);
    if unique_id.is_some_and(|id| id == LAST_LOCAL_MOUNT.load(Ordering::Relaxed)) {
        return false;
    }
    let Ok(stat) = statx(fd, "", flags, StatxFlags::MNT_ID) else { return true };
    let mount_id = stat.stx_mnt_id;
    if mount_id == 0 {
        // Linux before 5.8 does not report it.
        return true;
    }
    let mounts = mountinfo::mounts().unwrap_or_default();
    let mount = mounts.iter().find(|mount| mount.id == mount_id);
    let is_local =
        mount.is_some_and(|mount| LOCAL_TYPES.iter().any(|local| mount.fs_type == *local));
    if let Some(unique_id) = unique_id.filter(|_| is_local) {
        LAST_LOCAL_MOUNT.store(unique_id, Ordering::Relaxed);
    }
    !is_local
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_file_does_not_block_and_an_unknown_path_may() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "text").unwrap();
        // Twice: from the table of mounts, and from the remembered mount.
        for _ in 0..2 {
            assert!(!may_block(&file));
            assert!(may_block(&folder.path().join("nothing")));
            // Cached, and of an unknown type.
            assert!(may_block(Path::new("/proc")));
        }
    }
}
