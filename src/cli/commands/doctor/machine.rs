//! Checks of the machine: its kernel, its limits and its devices.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

use crate::cli::terminal_text::format_bytes;
use crate::mount::{cgroup_limit, default_memory, machine_memory};

use super::check::Check;
use super::system::{
    has_capability, has_status, is_outermost, kernel_release, kernel_version, read_trimmed,
};

/// Everything that a mount depends on besides privileges, in the order in which a mount needs it.
pub fn check_machine() -> Vec<Check> {
    let kernel = kernel_version();
    vec![
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

fn check_kernel((major, minor): (u32, u32)) -> Check {
    const WHAT: &str = "kernel";
    let release = kernel_release();
    // It has openat2, which bounds what the links of a checkpoint may open.
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
            "no: files shown unchanged go through the daemon",
            "Linux 6.9 or later reads them at full speed",
        )
    } else if has_capability(CapabilitySet::SYS_ADMIN) && is_outermost() {
        Check::ok(WHAT, "yes: files shown unchanged are read at full speed")
    } else {
        Check::note(
            WHAT,
            "not for this user: files shown unchanged go through the daemon",
            "mount as root to read them at full speed",
        )
    }
}

fn check_request_size() -> Check {
    const WHAT: &str = "request size";
    /// The kernel's limit without this setting, and the setting's default.
    const USUAL_PAGES: u64 = 256;
    let limit =
        read_trimmed("/proc/sys/fs/fuse/max_pages_limit").and_then(|pages| pages.parse().ok());
    let pages = limit.unwrap_or(USUAL_PAGES);
    let size = pages.saturating_mul(rustix::param::page_size() as u64);
    let says = format!("at most {} in one request", format_bytes(size));
    if pages < USUAL_PAGES {
        return Check::note(WHAT, says, "root can raise it: sysctl fs.fuse.max_pages_limit=256");
    }
    Check::ok(WHAT, says)
}

fn check_readahead() -> Check {
    const WHAT: &str = "kernel readahead";
    if has_capability(CapabilitySet::DAC_OVERRIDE)
        && is_outermost()
        && Path::new("/sys/class/bdi").is_dir()
    {
        return Check::ok(WHAT, "this user may change how far the kernel reads ahead");
    }
    Check::note(
        WHAT,
        "not for this user: the kernel reads 128 KiB ahead; that does not limit the daemon's own readahead",
        "mount as root to change it",
    )
}

fn check_memory() -> Check {
    const WHAT: &str = "memory";
    let (memory, budget) = (format_bytes(machine_memory()), format_bytes(default_memory()));
    let limit = cgroup_limit().map_or(String::new(), |limit| {
        format!(", limited to {} by the control group", format_bytes(limit))
    });
    Check::ok(
        WHAT,
        format!("{memory}{limit}; a mount holds up to {budget}, unless --memory says otherwise"),
    )
}

fn check_files() -> Check {
    const WHAT: &str = "open files";
    /// Sets of a thousand shards exist, and each shard takes descriptors while the set is open.
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
    let is_filtered = has_status("Seccomp", "2");
    if kernel < (6, 5) {
        Check::note(
            WHAT,
            "missing: reads find out by trying whether a file is cached",
            "use Linux 6.5 or later, which tells at once",
        )
    } else if is_filtered {
        Check::note(
            WHAT,
            "perhaps denied to this container (seccomp); reads then find out by trying",
            "allow the system call cachestat in the container's profile",
        )
    } else {
        Check::ok(WHAT, "works: reads know at once what is cached")
    }
}

fn check_io_uring() -> Check {
    const WHAT: &str = "io_uring";
    match read_trimmed("/proc/sys/kernel/io_uring_disabled").as_deref() {
        Some("0") | None => Check::ok(WHAT, "open to every user (nothing needs it yet)"),
        Some("1") => Check::ok(WHAT, "open to root and a group (nothing needs it yet)"),
        Some(_) => Check::ok(WHAT, "closed (nothing needs it yet)"),
    }
}

fn check_cuda() -> Check {
    const WHAT: &str = "CUDA";
    const LIBRARY: &[u8] = b"libcuda.so.1";
    let driver = read_trimmed("/proc/driver/nvidia/version");
    // The dynamic linker's list of libraries, which holds their names as plain text.
    let list = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let is_listed = list.windows(LIBRARY.len()).any(|name| name == LIBRARY);
    match (driver, is_listed) {
        (Some(driver), true) => {
            let version = driver.lines().next().unwrap_or_default();
            Check::ok(WHAT, format!("driver and libcuda.so.1 found ({version})"))
        }
        (None, true) => Check::ok(WHAT, "libcuda.so.1 found, but no driver"),
        (Some(_), false) => Check::note(
            WHAT,
            "a driver, but no libcuda.so.1: GPUs cannot be used from here",
            "in a container, use the NVIDIA runtime (--gpus all)",
        ),
        (None, false) => Check::ok(WHAT, "none; only loading onto a GPU needs it"),
    }
}
