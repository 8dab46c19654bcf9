//! The superblock behind a mount. It outlives the mount while another mount shows it: a bind mount, or one in
//! another mount namespace, as containers have.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, Mode, OFlags};

use crate::mount_info::mountinfo::{self, MountEntry};

/// The filesystem that the kernel serves from one daemon, wherever it is mounted.
#[derive(Debug)]
pub struct Superblock {
    mount: MountEntry,
    /// Its directory in sysfs, which disappears with it. It must be opened while the mount is there, because the
    /// kernel reuses the number.
    sysfs: Option<OwnedFd>,
}

/// A mount that shows a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuperblockMount {
    /// The mountpoint, as its own namespace sees it.
    pub mountpoint: PathBuf,
    /// A process that sees the mount; `None` if this process does.
    pub process: Option<u32>,
}

impl Superblock {
    /// The superblock of a mount that is still there.
    pub(super) fn of_mount(mount: MountEntry) -> Superblock {
        let path = format!("/sys/class/bdi/{}", mount.device);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Without sysfs, the state of the superblock stays unknown.
        let sysfs = rustix::fs::open(path, flags, Mode::empty()).ok();
        Superblock { mount, sysfs }
    }

    /// Whether the kernel has dropped it, so that no program can use it; `false` if that is unknown.
    pub fn is_gone(&self) -> bool {
        let attribute =
            |dir| rustix::fs::accessat(dir, "read_ahead_kb", Access::EXISTS, AtFlags::empty());
        self.sysfs.as_ref().is_some_and(|dir| attribute(dir).is_err())
    }

    /// The mounts that show it, in this process's mount namespace and in those of all other processes.
    pub fn mounts(&self) -> Vec<SuperblockMount> {
        if self.is_gone() {
            return Vec::new();
        }
        let mut mounts = Vec::new();
        let mut ids = BTreeSet::new();
        let mut namespaces = BTreeSet::new();
        let mut look = |process: Option<u32>| {
            let name = process.map_or("self".to_owned(), |pid| pid.to_string());
            let proc = Path::new("/proc").join(name);
            // This link is unreadable for processes of other users, but their tables are not.
            if fs::read_link(proc.join("ns/mnt")).is_ok_and(|seen| !namespaces.insert(seen)) {
                return;
            }
            // A process that has ended in between sees nothing.
            let table = mountinfo::mounts_of_process(&proc).unwrap_or_default();
            let shows = table.into_iter().filter(|entry| {
                (entry.device, &entry.fs_type, &entry.source)
                    == (self.mount.device, &self.mount.fs_type, &self.mount.source)
            });
            // The number of a mount is unique among all namespaces.
            let new = shows.filter(|entry| ids.insert(entry.id));
            mounts
                .extend(new.map(|entry| SuperblockMount { mountpoint: entry.mountpoint, process }));
        };
        look(None);
        let numbers = fs::read_dir("/proc").into_iter().flatten();
        let mut pids: Vec<u32> =
            numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        pids.sort_unstable();
        pids.into_iter().for_each(|pid| look(Some(pid)));
        // If it is gone by now, its number may belong to another superblock.
        if self.is_gone() { Vec::new() } else { mounts }
    }
}

impl fmt::Display for SuperblockMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.mountpoint.display())?;
        match self.process {
            None => Ok(()),
            Some(pid) => write!(f, " in the mount namespace of process {pid}"),
        }
    }
}
