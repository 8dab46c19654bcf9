//! What the machine has, and what this process may do with it.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use crate::mount::{default_memory, machine_memory};

use super::super::terminal_text::bytes;
use super::{Check, privileges};

/// Everything, in the order in which a mount needs it.
pub(super) fn look() -> Vec<Check> {
    let kernel = kernel();
    let mut checks = privileges::look();
    checks.extend([
        check_kernel(kernel),
        check_passthrough(kernel),
        check_request_size(),
        check_readahead(),
        check_memory(),
        check_files(),
        check_cachestat(kernel),
        check_io_uring(),
        check_cuda(),
    ]);
    checks
}

pub(super) fn text(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Whether a field of this process's status has that value.
pub(super) fn says_status(field: &str, value: &str) -> bool {
    let status = text("/proc/self/status").unwrap_or_default();
    let mut fields = status.lines().filter_map(|line| line.split_once(':'));
    fields.any(|(name, found)| name == field && found.trim() == value)
}

pub(super) fn has(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Whether root here is root of the machine, rather than of a user namespace.
pub(super) fn is_outermost() -> bool {
    text("/proc/self/uid_map").is_none_or(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// The version of the kernel, as far as it can be read.
fn kernel() -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn check_kernel((major, minor): (u32, u32)) -> Check {
    const WHAT: &str = "kernel";
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    // openat2, which bounds what a checkpoint's links may open.
    if (major, minor) < (5, 6) {
        return Check::problem(WHAT, format!("Linux {release}: too old"), "use Linux 5.6 or later");
    }
    Check::ok(WHAT, format!("Linux {release}"))
}

fn check_passthrough(kernel: (u32, u32)) -> Check {
    const WHAT: &str = "passthrough";
    if kernel < (6, 9) {
        Check::note(
            WHAT,
            "no: files shown as they are go through the daemon",
            "Linux 6.9 or later reads them at full speed",
        )
    } else if has(CapabilitySet::SYS_ADMIN) && is_outermost() {
        Check::ok(WHAT, "yes: files shown as they are are read at full speed")
    } else {
        Check::note(
            WHAT,
            "not for this user: files shown as they are go through the daemon",
            "mount as root to read them at full speed",
        )
    }
}

fn check_request_size() -> Check {
    const WHAT: &str = "request size";
    /// What the kernel allows where it has no such setting, and by default where it has one.
    const USUAL_PAGES: u64 = 256;
    let limit = text("/proc/sys/fs/fuse/max_pages_limit").and_then(|pages| pages.parse().ok());
    let pages = limit.unwrap_or(USUAL_PAGES);
    let size = pages.saturating_mul(rustix::param::page_size() as u64);
    let says = format!("{} at the most in one request", bytes(size));
    if pages < USUAL_PAGES {
        return Check::note(WHAT, says, "root can raise it: sysctl fs.fuse.max_pages_limit=256");
    }
    Check::ok(WHAT, says)
}

fn check_readahead() -> Check {
    const WHAT: &str = "kernel readahead";
    if has(CapabilitySet::DAC_OVERRIDE) && is_outermost() && Path::new("/sys/class/bdi").is_dir() {
        return Check::ok(WHAT, "this user may change how far the kernel reads ahead");
    }
    Check::note(
        WHAT,
        "not for this user: the kernel reads 128 KiB ahead; the daemon's own reading ahead is not limited by that",
        "mount as root to change it",
    )
}

fn check_memory() -> Check {
    const WHAT: &str = "memory";
    let (memory, budget) = (bytes(machine_memory()), bytes(default_memory()));
    Check::ok(WHAT, format!("{memory}; a mount holds up to {budget} of it, unless --memory says"))
}

fn check_files() -> Check {
    const WHAT: &str = "open files";
    /// Sets of a thousand shards exist; each is a descriptor while the set is open.
    const ENOUGH: u64 = 4096;
    match getrlimit(Resource::Nofile).maximum {
        None => Check::ok(WHAT, "without limit"),
        Some(limit) if limit >= ENOUGH => Check::ok(WHAT, format!("up to {limit}")),
        Some(limit) => Check::note(
            WHAT,
            format!("up to {limit}: large sets of shards are opened again and again"),
            format!("raise the hard limit (ulimit -Hn) to {ENOUGH} or more"),
        ),
    }
}

fn check_cachestat(kernel: (u32, u32)) -> Check {
    const WHAT: &str = "cachestat";
    let is_filtered = says_status("Seccomp", "2");
    if kernel < (6, 5) {
        Check::note(
            WHAT,
            "not there: whether a file is cached is found out by trying",
            "Linux 6.5 or later tells it at once",
        )
    } else if is_filtered {
        Check::note(
            WHAT,
            "perhaps kept from this container (seccomp); then it is found out by trying",
            "allow the system call cachestat in the container's profile",
        )
    } else {
        Check::ok(WHAT, "there: what is cached is known at once")
    }
}

fn check_io_uring() -> Check {
    const WHAT: &str = "io_uring";
    match text("/proc/sys/kernel/io_uring_disabled").as_deref() {
        Some("0") | None => Check::ok(WHAT, "open to every user (nothing needs it yet)"),
        Some("1") => Check::ok(WHAT, "open to root and a group (nothing needs it yet)"),
        Some(_) => Check::ok(WHAT, "closed (nothing needs it yet)"),
    }
}

fn check_cuda() -> Check {
    const WHAT: &str = "CUDA";
    const LIBRARY: &[u8] = b"libcuda.so.1";
    let driver = text("/proc/driver/nvidia/version");
    // The loader's own list of libraries, whose names stand in it as they are.
    let list = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let is_listed = list.windows(LIBRARY.len()).any(|name| name == LIBRARY);
    match (driver, is_listed) {
        (Some(driver), true) => {
            let version = driver.lines().next().unwrap_or_default();
            Check::ok(WHAT, format!("driver and libcuda.so.1 found ({version})"))
        }
        (None, true) => Check::ok(WHAT, "libcuda.so.1 found, and no driver"),
        (Some(_), false) => Check::note(
            WHAT,
            "a driver and no libcuda.so.1: GPUs cannot be used from here",
            "in a container, use the NVIDIA runtime (--gpus all)",
        ),
        (None, false) => Check::ok(WHAT, "none; only loading onto a GPU needs it"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn every_remark_says_what_to_do() {
        let checks = look();
        assert!(checks.len() >= 13);
        for check in checks {
            assert_eq!(check.verdict == Verdict::Ok, check.remedy.is_empty(), "{check:?}");
        }
    }
}
