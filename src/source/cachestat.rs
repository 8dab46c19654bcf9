//! How many pages of a range are in the page cache: cachestat(2), which neither starts a read nor
//! maps anything. Linux 6.5 and later; on a file that one neither owns nor may write, the kernel
//! refuses.

#![allow(unsafe_code)] // No safe wrapper of this call exists.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

/// The same on every architecture that Rust has, for it is newer than their common table.
const CACHESTAT_SYSCALL: libc::c_long = 451;

#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct CachestatCounts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// The pages that are there, those still being read among them.
pub fn count_cached_pages(fd: impl AsFd, range: &Range<u64>) -> Result<u64, Errno> {
    let asked = CachestatRange { offset: range.start, len: range.end - range.start };
    let mut answer = CachestatCounts::default();
    // SAFETY: both structures are laid out as the kernel's are and outlive the call, which writes
    // to the second alone; the descriptor is open for as long as it is borrowed.
    let code = unsafe {
        libc::syscall(
            CACHESTAT_SYSCALL,
            fd.as_fd().as_raw_fd(),
            &raw const asked,
            &raw mut answer,
            0 as libc::c_uint,
        )
    };
    if code == 0 {
        return Ok(answer.cached);
    }
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Err(Errno::from_raw_os_error(error))
}
