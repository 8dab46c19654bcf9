//! What the machine has, and what this process may do with it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use crate::mount::error::{DEVICE_OF_ROOT, NO_DEVICE};
use crate::mount::helper;

use super::super::words::bytes;
use super::Check;

/// Everything, in the order in which a mount needs it.
pub(super) fn look() -> Vec<Check> {
    let may_mount = has(CapabilitySet::SYS_ADMIN);
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let is_open = device.is_ok();
    let kernel = kernel();
    vec![
        check_device(device.err()),
        check_helper(may_mount && is_open),
        check_allow_other(),
        check_namespaces(may_mount),
        check_kernel(kernel),
        check_passthrough(kernel),
        check_request_size(),
        check_readahead(),
        check_memory(),
        check_files(),
        check_cachestat(kernel),
        check_io_uring(),
        check_cuda(),
    ]
}

fn text(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Whether a field of this process's status has that value.
fn says_status(field: &str, value: &str) -> bool {
    let status = text("/proc/self/status").unwrap_or_default();
    let mut fields = status.lines().filter_map(|line| line.split_once(':'));
    fields.any(|(name, found)| name == field && found.trim() == value)
}

fn has(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Whether root here is root of the machine, rather than of a user namespace.
fn is_outermost() -> bool {
    text("/proc/self/uid_map").is_none_or(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// The version of the kernel, as far as it can be read.
fn kernel() -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn check_device(refused: Option<Errno>) -> Check {
    const WHAT: &str = "/dev/fuse";
    match refused {
        None => Check::ok(WHAT, "there, and this user may open it"),
        Some(Errno::ACCESS) => {
            Check::problem(WHAT, "there, and this user may not open it", DEVICE_OF_ROOT)
        }
        Some(Errno::PERM) => {
            Check::problem(WHAT, "there, and this container may not open it", NO_DEVICE)
        }
        Some(Errno::NOENT) => Check::problem(WHAT, "not there: no FUSE, no mount", NO_DEVICE),
        Some(e) => Check::problem(WHAT, format!("cannot be opened: {e}"), NO_DEVICE),
    }
}

fn check_helper(mounts_itself: bool) -> Check {
    const WHAT: &str = "fusermount3";
    const REMEDY: &str = "install the package fuse3";
    let program = helper::find();
    let shown = program.as_ref().map(|program| program.display().to_string());
    let is_setuid = program.is_some_and(|program| {
        program.metadata().is_ok_and(|about| about.permissions().mode() & 0o4000 != 0)
    });
    match shown {
        Some(path) if is_setuid && says_status("NoNewPrivs", "1") && !mounts_itself => {
            Check::problem(
                WHAT,
                format!("{path}: this process may gain no privileges, so it cannot help"),
                "in a container, start it without no-new-privileges, or as root",
            )
        }
        Some(path) if is_setuid && is_outermost() => {
            Check::ok(WHAT, format!("{path}: ordinary users can mount"))
        }
        found if mounts_itself => {
            let state = if found.is_some() { "cannot help here" } else { "not there" };
            Check::ok(WHAT, format!("{state}, and not needed: this user may mount by itself"))
        }
        Some(path) if is_setuid => Check::problem(
            WHAT,
            format!("{path}: has no power inside a user namespace"),
            "let this user open /dev/fuse (mode 0666), or mount from outside the namespace",
        ),
        Some(path) => Check::problem(
            WHAT,
            format!("{path}: is not setuid root, so this user cannot mount"),
            "reinstall the package fuse3 (chmod u+s), or run as root",
        ),
        None => Check::problem(WHAT, "not there, so this user cannot mount", REMEDY),
    }
}

fn check_allow_other() -> Check {
    const WHAT: &str = "--allow-other";
    let config = text("/etc/fuse.conf").unwrap_or_default();
    if config.lines().any(|line| line.trim() == "user_allow_other") {
        Check::ok(WHAT, "anybody may use it (user_allow_other in /etc/fuse.conf)")
    } else if rustix::process::geteuid().is_root() {
        Check::ok(WHAT, "root may use it, other users not")
    } else {
        Check::note(
            WHAT,
            "not for this user: a mount is seen by its own user only",
            "have root put the line user_allow_other in /etc/fuse.conf",
        )
    }
}

fn check_namespaces(may_mount: bool) -> Check {
    const WHAT: &str = "user namespaces";
    let is = |path, value| text(path).is_some_and(|found| found == value);
    let shut = is("/proc/sys/user/max_user_namespaces", "0")
        || is("/proc/sys/kernel/unprivileged_userns_clone", "0")
        || is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1");
    match (is_outermost(), shut) {
        (false, _) if may_mount => Check::ok(WHAT, "inside one, with the right to mount"),
        (false, _) => Check::note(
            WHAT,
            "inside one, without the right to mount",
            "enter it as its root (unshare -Urm)",
        ),
        (true, false) => {
            Check::ok(WHAT, "open: unshare -Urm gives a place of one's own to mount in")
        }
        (true, true) => Check::note(
            WHAT,
            "closed to ordinary users",
            "only needed where there is neither root nor fusermount3",
        ),
    }
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
    const WHAT: &str = "--readahead";
    if has(CapabilitySet::DAC_OVERRIDE) && is_outermost() && Path::new("/sys/class/bdi").is_dir() {
        return Check::ok(WHAT, "this user may change how far the kernel reads ahead");
    }
    Check::note(
        WHAT,
        "not for this user: the kernel reads 128 KiB ahead; the daemon's own reading ahead is not limited by that",
        "mount as root to change it",
    )
}

/// What a mount may hold unless --memory says otherwise: a twentieth of the memory, which nobody
/// misses, and no more than is of use.
fn default_budget(memory: u64) -> u64 {
    const MOST: u64 = 1 << 30;
    MOST.min(memory / 20)
}

fn check_memory() -> Check {
    const WHAT: &str = "memory";
    let system = rustix::system::sysinfo();
    let memory = (system.totalram as u64).saturating_mul(u64::from(system.mem_unit));
    let budget = default_budget(memory);
    Check::ok(
        WHAT,
        format!("{}; a mount holds up to {budget} of it", bytes(memory), budget = bytes(budget)),
    )
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

    #[test]
    fn devices_that_cannot_be_used_are_problems() {
        assert_eq!(check_device(None).verdict, Verdict::Ok);
        for refused in [Errno::ACCESS, Errno::NOENT, Errno::PERM, Errno::NODEV] {
            assert_eq!(check_device(Some(refused)).verdict, Verdict::Problem);
        }
    }

    #[test]
    fn the_budget_is_small_on_small_machines() {
        assert_eq!(default_budget(64 << 30), 1 << 30);
        assert_eq!(default_budget(4_000_000_000), 200_000_000);
    }
}
