//! Tunes malloc so that freed memory returns to the system.
//!
//! A daemon lives for months, and a listing of ten thousand directories ends within a second. glibc keeps an arena for
//! every few threads, and the memory that is freed in each.

#![allow(unsafe_code)] // The allocator's own calls.

use std::time::Duration;

/// How often freed memory is returned. Each time takes a millisecond or two.
const TRIM_INTERVAL: Duration = Duration::from_secs(10);

/// Arenas for small allocations. Buffers are not allocated there, so threads hardly wait for each other.
#[cfg(target_env = "gnu")]
const ARENA_COUNT: libc::c_int = 2;

/// Allocations of at least this size are mapped by themselves.
///
/// Without it glibc raises its threshold to the largest mapping that was ever freed. Each thread has a request buffer
/// of 16 MiB, of which few pages are used. It would then be cleared in an arena, and stay there.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: libc::c_int = 1 << 20;

/// Sets the limits of malloc. To be called before there are threads.
pub fn limit_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt sets numbers of the allocator, which does its own locking.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENA_COUNT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES);
    }
}

/// Returns freed memory to the system periodically, as long as it is polled.
pub async fn trim_periodically() {
    loop {
        tokio::time::sleep(TRIM_INTERVAL).await;
        #[cfg(target_env = "gnu")]
        // SAFETY: malloc_trim touches only free memory, and does its own locking.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}
