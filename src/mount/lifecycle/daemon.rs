//! The process that serves a mount: found, held on to, waited for.
//!
//! In: its number, or the mount. Out: a [`Daemon`], whose number cannot become another process's.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::mount_info::mountinfo::DeviceNumber;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process that serves a mount, or did.
#[derive(Debug)]
pub struct Daemon {
    pid: u32,
    process: OwnedFd,
}

impl Daemon {
    /// Holds on to the one of this number. A number that is not a daemon's, as from another
    /// container, is not believed.
    pub(in crate::mount) fn from_pid(pid: u32) -> Option<Daemon> {
        let number = Pid::from_raw(i32::try_from(pid).ok()?)?;
        let process = pidfd_open(number, PidfdFlags::empty()).ok()?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (name.trim_end() == "ckptfs").then_some(Daemon { pid, process })
    }

    /// The one that has the other end of a mount, which need not answer for that; where the kernel
    /// tells that end's number (Linux 6.18 does), and this user may look at the process.
    pub(in crate::mount) fn serving(mount: DeviceNumber) -> Option<Daemon> {
        let numbers = fs::read_dir("/proc").ok()?;
        let pids = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        // Held on to before it is looked at, so that it is the same that was looked at.
        let found = pids.filter_map(Daemon::from_pid).filter(|daemon| daemon.serves(mount));
        // One that outlived its mount keeps that number, which the kernel gives to the next mount:
        // the youngest has it.
        found.max_by_key(Daemon::start_ticks)
    }

    fn serves(&self, mount: DeviceNumber) -> bool {
        let about = Path::new("/proc").join(self.pid.to_string()).join("fdinfo");
        let Ok(descriptors) = fs::read_dir(about) else {
            return false;
        };
        descriptors.flatten().any(|descriptor| {
            let told = fs::read_to_string(descriptor.path()).unwrap_or_default();
            let mut numbers = told.lines().filter_map(|line| line.strip_prefix("fuse_connection:"));
            numbers.any(|number| number.trim().parse() == Ok(mount.minor))
        })
    }

    /// A field of what the system says of it, counted from its state on.
    fn stat_field(&self, field: usize) -> Option<String> {
        let about = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        // The state stands after the name, which may have anything in it.
        Some(about.rsplit_once(") ")?.1.split(' ').nth(field)?.to_owned())
    }

    /// When it began, in ticks of the system.
    fn start_ticks(&self) -> Option<u64> {
        self.stat_field(19)?.parse().ok()
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it was stopped, as by SIGSTOP, and does nothing until it is continued.
    pub fn is_stopped(&self) -> bool {
        self.stat_field(0).is_some_and(|state| matches!(&*state, "T" | "t"))
    }

    /// Waits for its end, so long at the most; whether it has ended.
    pub fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(left) = Timespec::try_from(left) else {
                return false;
            };
            // Readable once the process has ended.
            match poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&left)) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}
