//! Whether finding what lies at a path may wait for another program or another machine, told without
//! asking either: what `stat` or `statfs` would ask is the very one that may not answer.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, fstat, openat2, statx,
};
use rustix::io::Errno;

use super::mountinfo;

/// Filesystems whose bytes come from this machine's own disk or memory, as the table of mounts calls
/// them. What is not known is taken for one that may keep a caller waiting.
const LOCAL_TYPES: [&str; 17] = [
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "ntfs3",
    "overlay", "ramfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs",
];

/// The mount that was last seen to be local, by the number that no other will ever have: reading the table takes
/// longer than opening a small file. 0 is no mount's. The number that the table has is given to another mount as
/// soon as this one is gone.
static LAST_LOCAL_MOUNT: AtomicU64 = AtomicU64::new(0);

/// Of `statx`: that number (since Linux 6.8).
const UNIQUE_MOUNT_ID: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Whether it may. The same is said where the system has not even the folder at hand: to find that takes a
/// while anywhere.
pub fn may_block(path: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let at_hand = |path: &Path| openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED);
    match at_hand(path) {
        Ok(found) => may_be_remote(&found),
        Err(Errno::AGAIN) => {
            let Some(name) = path.file_name() else { return true };
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let Ok(folder) = at_hand(folder.unwrap_or(Path::new("."))) else { return true };
            // What lies in a folder of this machine does too, if no other is mounted there and no link
            // leads away. A folder may have much in it, and to read that takes a while.
            let here = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
            let is_file = || {
                let found = openat2(&folder, name, flags, Mode::empty(), here).and_then(fstat);
                found.is_ok_and(|stat| {
                    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                })
            };
            may_be_remote(&folder) || !is_file()
        }
        Err(_) => true,
    }
}

/// Whether it lies where finding something may take any time.
fn may_be_remote(found: &OwnedFd) -> bool {
    let known = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(about) = statx(found, "", known, UNIQUE_MOUNT_ID) else { return true };
    let unique = (about.stx_mask & UNIQUE_MOUNT_ID.bits() != 0).then_some(about.stx_mnt_id);
    if unique.is_some_and(|unique| unique == LAST_LOCAL_MOUNT.load(Ordering::Relaxed)) {
        return false;
    }
    let Ok(about) = statx(found, "", known, StatxFlags::MNT_ID) else { return true };
    let mount = about.stx_mnt_id;
    if mount == 0 {
        // Linux before 5.8 does not tell.
        return true;
    }
    let entry =
        mountinfo::mounts().ok().and_then(|all| all.into_iter().find(|entry| entry.id == mount));
    let is_local = entry.is_some_and(|entry| LOCAL_TYPES.iter().any(|kind| entry.fs_type == *kind));
    if let Some(unique) = unique.filter(|_| is_local) {
        LAST_LOCAL_MOUNT.store(unique, Ordering::Relaxed);
    }
    !is_local
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_on_this_machine_does_not_and_what_is_not_known_may() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "text").unwrap();
        // Twice: from the table, and from what is known.
        for _ in 0..2 {
            assert!(!may_block(&file));
            assert!(may_block(&folder.path().join("nothing")));
            // It is at hand, and of a kind that is not known.
            assert!(may_block(Path::new("/proc")));
        }
    }
}
