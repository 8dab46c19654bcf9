//! The process that serves a mount, found by its number or by the mount.
//!
//! A [`Daemon`] holds a pidfd, so its number cannot be confused with that of a later process.

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
    /// The daemon of this number; `None` if the process is no daemon, as with a number from another container.
    pub(super) fn from_pid(pid: u32) -> Option<Daemon> {
        let number = Pid::from_raw(i32::try_from(pid).ok()?)?;
        let process = pidfd_open(number, PidfdFlags::empty()).ok()?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (name.trim_end() == "ckptfs").then_some(Daemon { pid, process })
    }

    /// The daemon that serves a mount, even if it does not answer.
    ///
    /// The kernel must tell the number of its connection (Linux 6.18 does), and this user must be permitted to read it.
    pub(super) fn serving(mount: DeviceNumber) -> Option<Daemon> {
        let numbers = fs::read_dir("/proc").ok()?;
        let pids = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        // A pidfd is opened before the process is inspected, so that both are the same process.
        let daemons = pids.filter_map(Daemon::from_pid).filter(|daemon| daemon.serves(mount));
        // A daemon that outlives its mount keeps the number, which the kernel reuses for the next mount. The youngest
        // one serves it.
        daemons.max_by_key(Daemon::start_ticks)
    }

    fn serves(&self, mount: DeviceNumber) -> bool {
        let directory = Path::new("/proc").join(self.pid.to_string()).join("fdinfo");
        let Ok(descriptors) = fs::read_dir(directory) else {
            return false;
        };
        descriptors.flatten().any(|descriptor| {
            let info = fs::read_to_string(descriptor.path()).unwrap_or_default();
            let mut numbers = info.lines().filter_map(|line| line.strip_prefix("fuse_connection:"));
            numbers.any(|number| number.trim().parse() == Ok(mount.minor))
        })
    }

    /// A field of its `/proc/PID/stat`, counted from the state.
    fn stat_field(&self, field: usize) -> Option<String> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        // The state follows the name, which may hold any character.
        Some(stat.rsplit_once(") ")?.1.split(' ').nth(field)?.to_owned())
    }

    /// Its start time in clock ticks.
    fn start_ticks(&self) -> Option<u64> {
        self.stat_field(19)?.parse().ok()
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it is stopped, as by SIGSTOP, until it is continued.
    pub fn is_stopped(&self) -> bool {
        self.stat_field(0).is_some_and(|state| matches!(&*state, "T" | "t"))
    }

    /// Waits for its end, for at most `limit`. Returns whether it has ended.
    pub fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let Ok(timeout) = Timespec::try_from(remaining) else {
                return false;
            };
            // Readable once the process has ended.
            match poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}
