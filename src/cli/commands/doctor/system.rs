//! What the system tells of itself and of this process.

use std::fs;

use rustix::thread::{CapabilitySet, capabilities};

/// The text of a file, trimmed.
pub fn read_trimmed(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Whether a field of this process's status has that value.
pub fn has_status(field: &str, value: &str) -> bool {
    let status = read_trimmed("/proc/self/status").unwrap_or_default();
    let mut fields = status.lines().filter_map(|line| line.split_once(':'));
    fields.any(|(name, found)| name == field && found.trim() == value)
}

pub fn has_capability(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Whether this process is in the machine's own user namespace.
pub fn is_outermost() -> bool {
    read_trimmed("/proc/self/uid_map")
        .is_none_or(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// The kernel's version, as far as it can be parsed.
pub fn kernel_version() -> (u32, u32) {
    let release = kernel_release();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}
