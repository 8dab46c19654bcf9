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
    const CHECK_NAME: &str = "kernel";
    let release = kernel_release();
    // It has openat2, which bounds what the links of a checkpoint may open.
    if (major, minor) < (5, 6) {
        return Check::problem(
            CHECK_NAME,
            format!("Linux {release}: too old"),
            "use Linux 5.6 or later",
        );
    }
    Check::ok(CHECK_NAME, format!("Linux {release}"))
}

fn check_passthrough(kernel: (u32, u32)) -> Check {
    const CHECK_NAME: &str = "passthrough";
    if kernel < (6, 9) {
        Check::note(
            CHECK_NAME,
            "no: files shown unchanged go through the daemon",
            "Linux 6.9 or later reads them at full speed",
        )
    } else if has_capability(CapabilitySet::SYS_ADMIN) && is_outermost() {
        Check::ok(CHECK_NAME, "yes: files shown unchanged are read at full speed")
    } else {
        Check::note(
            CHECK_NAME,
            "not for this user: files shown unchanged go through the daemon",
            "mount as root to read them at full speed",
        )
    }
}

fn check_request_size() -> Check {
    const CHECK_NAME: &str = "request size";
    /// The kernel's limit without this setting, and the setting's default.
    const DEFAULT_REQUEST_PAGES: u64 = 256;
    let limit =
        read_trimmed("/proc/sys/fs/fuse/max_pages_limit").and_then(|pages| pages.parse().ok());
    let pages = limit.unwrap_or(DEFAULT_REQUEST_PAGES);
    let size = pages.saturating_mul(rustix::param::page_size() as u64);
    let says = format!("at most {} in one request", format_bytes(size));
    if pages < DEFAULT_REQUEST_PAGES {
        return Check::note(
            CHECK_NAME,
            says,
            "root can raise it: sysctl fs.fuse.max_pages_limit=256",
        );
    }
    Check::ok(CHECK_NAME, says)
}

fn check_readahead() -> Check {
    const CHECK_NAME: &str = "kernel readahead";
    if has_capability(CapabilitySet::DAC_OVERRIDE)
        && is_outermost()
        && Path::new("/sys/class/bdi").is_dir()
    {
        return Check::ok(CHECK_NAME, "this user may change how far the kernel reads ahead");
    }
    Check::note(
        CHECK_NAME,
        "not for this user: the kernel reads 128 KiB ahead; that does not limit the daemon's own readahead",
        "mount as root to change it",
    )
}

fn check_memory() -> Check {
    const CHECK_NAME: &str = "memory";
    let (memory, budget) = (format_bytes(machine_memory()), format_bytes(default_memory()));
    let limit = cgroup_limit().map_or(String::new(), |limit| {
        format!(", limited to {} by the control group", format_bytes(limit))
    });
    Check::ok(
        CHECK_NAME,
        format!("{memory}{limit}; a mount holds up to {budget}, unless --memory says otherwise"),
    )
}

fn check_files() -> Check {
    const CHECK_NAME: &str = "open files";
    /// Sets of a thousand shards exist, and each shard takes descriptors while the set is open.
    const RECOMMENDED_FILE_COUNT: u64 = 4096;
    match getrlimit(Resource::Nofile).maximum {
        None => Check::ok(CHECK_NAME, "without limit"),
        Some(limit) if limit >= RECOMMENDED_FILE_COUNT => {
            Check::ok(CHECK_NAME, format!("up to {limit}"))
        }
        Some(limit) => Check::note(
            CHECK_NAME,
            format!("up to {limit}: large sets of shards are opened again and again"),
            format!("raise the hard limit (ulimit -Hn) to {RECOMMENDED_FILE_COUNT} or more"),
        ),
    }
}

fn check_cachestat(kernel: (u32, u32)) -> Check {
    const CHECK_NAME: &str = "cachestat";
    let is_filtered = has_status("Seccomp", "2");
    if kernel < (6, 5) {
        Check::note(
            CHECK_NAME,
            "missing: reads find out by trying whether a file is cached",
            "use Linux 6.5 or later, which tells at once",
        )
    } else if is_filtered {
        Check::note(
            CHECK_NAME,
            "perhaps denied to this container (seccomp); reads then find out by trying",
            "allow the system call cachestat in the container's profile",
        )
    } else {
        Check::ok(CHECK_NAME, "works: reads know at once what is cached")
    }
}

fn check_io_uring() -> Check {
    const CHECK_NAME: &str = "io_uring";
    match read_trimmed("/proc/sys/kernel/io_uring_disabled").as_deref() {
        Some("0") | None => Check::ok(CHECK_NAME, "open to every user (nothing needs it yet)"),
        Some("1") => Check::ok(CHECK_NAME, "open to root and a group (nothing needs it yet)"),
        Some(_) => Check::ok(CHECK_NAME, "closed (nothing needs it yet)"),
    }
}

fn check_cuda() -> Check {
    const CHECK_NAME: &str = "CUDA";
    const LIBRARY: &[u8] = b"libcuda.so.1";
    let driver = read_trimmed("/proc/driver/nvidia/version");
    // The dynamic linker's list of libraries, which holds their names as plain text.
    let list = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let is_listed = list.windows(LIBRARY.len()).any(|name| name == LIBRARY);
    match (driver, is_listed) {
        (Some(driver), true) => {
            let version = driver.lines().next().unwrap_or_default();
            Check::ok(CHECK_NAME, format!("driver and libcuda.so.1 found ({version})"))
        }
        (None, true) => Check::ok(CHECK_NAME, "libcuda.so.1 found, but no driver"),
        (Some(_), false) => Check::note(
            CHECK_NAME,
            "a driver, but no libcuda.so.1: GPUs cannot be used from here",
            "in a container, use the NVIDIA runtime (--gpus all)",
        ),
        (None, false) => Check::ok(CHECK_NAME, "none; only loading onto a GPU needs it"),
    }
}
