//! What the machine has, and what this process may do with it.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use crate::mount::{default_memory, machine_memory};

use super::{DoctorCheck, privileges};
use crate::cli::terminal_text::format_bytes;

/// Everything, in the order in which a mount needs it.
pub(super) fn check_machine() -> Vec<DoctorCheck> {
    let kernel = kernel_version();
    let mut checks = privileges::check_privileges();
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

pub(super) fn read_trimmed(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Whether a field of this process's status has that value.
pub(super) fn has_status(field: &str, value: &str) -> bool {
    let status = read_trimmed("/proc/self/status").unwrap_or_default();
    let mut fields = status.lines().filter_map(|line| line.split_once(':'));
    fields.any(|(name, found)| name == field && found.trim() == value)
}

pub(super) fn has_capability(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Whether root here is root of the machine, rather than of a user namespace.
pub(super) fn is_outermost() -> bool {
    read_trimmed("/proc/self/uid_map")
        .is_none_or(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// The version of the kernel, as far as it can be read.
fn kernel_version() -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn check_kernel((major, minor): (u32, u32)) -> DoctorCheck {
    const WHAT: &str = "kernel";
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    // openat2, which bounds what a checkpoint's links may open.
    if (major, minor) < (5, 6) {
        return DoctorCheck::problem(
            WHAT,
            format!("Linux {release}: too old"),
            "use Linux 5.6 or later",
        );
    }
    DoctorCheck::ok(WHAT, format!("Linux {release}"))
}

fn check_passthrough(kernel: (u32, u32)) -> DoctorCheck {
    const WHAT: &str = "passthrough";
    if kernel < (6, 9) {
        DoctorCheck::note(
            WHAT,
            "no: files shown as they are go through the daemon",
            "Linux 6.9 or later reads them at full speed",
        )
    } else if has_capability(CapabilitySet::SYS_ADMIN) && is_outermost() {
        DoctorCheck::ok(WHAT, "yes: files shown as they are are read at full speed")
    } else {
        DoctorCheck::note(
            WHAT,
            "not for this user: files shown as they are go through the daemon",
            "mount as root to read them at full speed",
        )
    }
}

fn check_request_size() -> DoctorCheck {
    const WHAT: &str = "request size";
    /// What the kernel allows where it has no such setting, and by default where it has one.
    const USUAL_PAGES: u64 = 256;
    let limit =
        read_trimmed("/proc/sys/fs/fuse/max_pages_limit").and_then(|pages| pages.parse().ok());
    let pages = limit.unwrap_or(USUAL_PAGES);
    let size = pages.saturating_mul(rustix::param::page_size() as u64);
    let says = format!("{} at the most in one request", format_bytes(size));
    if pages < USUAL_PAGES {
        return DoctorCheck::note(
            WHAT,
            says,
            "root can raise it: sysctl fs.fuse.max_pages_limit=256",
        );
    }
    DoctorCheck::ok(WHAT, says)
}

fn check_readahead() -> DoctorCheck {
    const WHAT: &str = "kernel readahead";
    if has_capability(CapabilitySet::DAC_OVERRIDE)
        && is_outermost()
        && Path::new("/sys/class/bdi").is_dir()
    {
        return DoctorCheck::ok(WHAT, "this user may change how far the kernel reads ahead");
    }
    DoctorCheck::note(
        WHAT,
        "not for this user: the kernel reads 128 KiB ahead; the daemon's own reading ahead is not limited by that",
        "mount as root to change it",
    )
}

fn check_memory() -> DoctorCheck {
    const WHAT: &str = "memory";
    let (memory, budget) = (format_bytes(machine_memory()), format_bytes(default_memory()));
    DoctorCheck::ok(
        WHAT,
        format!("{memory}; a mount holds up to {budget} of it, unless --memory says"),
    )
}

fn check_files() -> DoctorCheck {
    const WHAT: &str = "open files";
    /// Sets of a thousand shards exist; each is a descriptor while the set is open.
    const ENOUGH: u64 = 4096;
    match getrlimit(Resource::Nofile).maximum {
        None => DoctorCheck::ok(WHAT, "without limit"),
        Some(limit) if limit >= ENOUGH => DoctorCheck::ok(WHAT, format!("up to {limit}")),
        Some(limit) => DoctorCheck::note(
            WHAT,
            format!("up to {limit}: large sets of shards are opened again and again"),
            format!("raise the hard limit (ulimit -Hn) to {ENOUGH} or more"),
        ),
    }
}

fn check_cachestat(kernel: (u32, u32)) -> DoctorCheck {
    const WHAT: &str = "cachestat";
    let is_filtered = has_status("Seccomp", "2");
    if kernel < (6, 5) {
        DoctorCheck::note(
            WHAT,
            "not there: whether a file is cached is found out by trying",
            "Linux 6.5 or later tells it at once",
        )
    } else if is_filtered {
        DoctorCheck::note(
            WHAT,
            "perhaps kept from this container (seccomp); then it is found out by trying",
            "allow the system call cachestat in the container's profile",
        )
    } else {
        DoctorCheck::ok(WHAT, "there: what is cached is known at once")
    }
}

fn check_io_uring() -> DoctorCheck {
    const WHAT: &str = "io_uring";
    match read_trimmed("/proc/sys/kernel/io_uring_disabled").as_deref() {
        Some("0") | None => DoctorCheck::ok(WHAT, "open to every user (nothing needs it yet)"),
        Some("1") => DoctorCheck::ok(WHAT, "open to root and a group (nothing needs it yet)"),
        Some(_) => DoctorCheck::ok(WHAT, "closed (nothing needs it yet)"),
    }
}

fn check_cuda() -> DoctorCheck {
    const WHAT: &str = "CUDA";
    const LIBRARY: &[u8] = b"libcuda.so.1";
    let driver = read_trimmed("/proc/driver/nvidia/version");
    // The loader's own list of libraries, whose names stand in it as they are.
    let list = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let is_listed = list.windows(LIBRARY.len()).any(|name| name == LIBRARY);
    match (driver, is_listed) {
        (Some(driver), true) => {
            let version = driver.lines().next().unwrap_or_default();
            DoctorCheck::ok(WHAT, format!("driver and libcuda.so.1 found ({version})"))
        }
        (None, true) => DoctorCheck::ok(WHAT, "libcuda.so.1 found, and no driver"),
        (Some(_), false) => DoctorCheck::note(
            WHAT,
            "a driver and no libcuda.so.1: GPUs cannot be used from here",
            "in a container, use the NVIDIA runtime (--gpus all)",
        ),
        (None, false) => DoctorCheck::ok(WHAT, "none; only loading onto a GPU needs it"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckVerdict;
    use super::*;

    #[test]
    fn every_remark_says_what_to_do() {
        let checks = check_machine();
        assert!(checks.len() >= 13);
        for check in checks {
            assert_eq!(check.verdict == CheckVerdict::Ok, check.remedy.is_empty(), "{check:?}");
        }
    }
}
