//! The superblock behind a mount, which outlives the mount while another mount shows it: a bind mount, or
//! one in another mount namespace, as containers have.
//!
//! In: a mount that is about to be taken away. Out: whether its superblock is still there, and where it shows.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, Mode, OFlags};

use crate::meeting::table::{self, Entry};

/// What the kernel serves of one daemon, wherever it is mounted.
#[derive(Debug)]
pub struct Superblock {
    mount: Entry,
    /// Its directory in sysfs, which goes with it. Held from before, as its number is given again.
    node: Option<OwnedFd>,
}

/// A mount that shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Showing {
    /// Where it is mounted, as seen from there.
    pub mountpoint: PathBuf,
    /// A process that sees it there, where this one does not.
    pub process: Option<u32>,
}

impl Superblock {
    /// The one behind a mount, which must still be there.
    pub(super) fn behind(mount: Entry) -> Superblock {
        let node = format!("/sys/class/bdi/{}", mount.device);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Without sysfs it cannot be told.
        let node = rustix::fs::open(node, flags, Mode::empty()).ok();
        Superblock { mount, node }
    }

    /// Whether the kernel has it no more, so that nobody can use it; `false` where that cannot be told.
    pub fn is_gone(&self) -> bool {
        let attribute =
            |node| rustix::fs::accessat(node, "read_ahead_kb", Access::EXISTS, AtFlags::empty());
        self.node.as_ref().is_some_and(|node| attribute(node).is_err())
    }

    /// The mounts that show it, in this process's mount namespace and in those of all other processes.
    pub fn shown(&self) -> Vec<Showing> {
        if self.is_gone() {
            return Vec::new();
        }
        let mut found = Vec::new();
        let mut mounts = BTreeSet::new();
        let mut namespaces = BTreeSet::new();
        let mut look = |process: Option<u32>| {
            let about = process.map_or("self".to_owned(), |pid| pid.to_string());
            let about = Path::new("/proc").join(about);
            // Not told of the processes of others, whose tables may be read all the same.
            if fs::read_link(about.join("ns/mnt")).is_ok_and(|seen| !namespaces.insert(seen)) {
                return;
            }
            // A process that has ended meanwhile shows nothing.
            let table = table::of(&about).unwrap_or_default();
            let shows = table.into_iter().filter(|entry| {
                (entry.device, &entry.kind, &entry.source)
                    == (self.mount.device, &self.mount.kind, &self.mount.source)
            });
            // The number of a mount is its own among all namespaces.
            let new = shows.filter(|entry| mounts.insert(entry.id));
            found.extend(new.map(|entry| Showing { mountpoint: entry.mountpoint, process }));
        };
        look(None);
        let numbers = fs::read_dir("/proc").into_iter().flatten();
        let mut pids: Vec<u32> =
            numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        pids.sort_unstable();
        pids.into_iter().for_each(|pid| look(Some(pid)));
        // Gone meanwhile, its number may have become another's.
        if self.is_gone() { Vec::new() } else { found }
    }
}

impl fmt::Display for Showing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.mountpoint.display())?;
        match self.process {
            None => Ok(()),
            Some(pid) => write!(f, " in the mount namespace of process {pid}"),
        }
    }
}
