//! What a daemon has freed goes back to the system: it lives for months, and a look through ten thousand
//! directories is over in a second.
//!
//! The system's allocator keeps an arena for every few threads, and what is freed in each.

#![allow(unsafe_code)] // The allocator's own calls.

use std::time::Duration;

/// How often what was freed is given back. It takes a millisecond or two.
const TRIM_INTERVAL: Duration = Duration::from_secs(10);

/// Arenas for small things. Buffers do not come from there, so that no thread waits for another long.
#[cfg(target_env = "gnu")]
const ARENA_COUNT: libc::c_int = 2;

/// What is no smaller has pages of its own. Without a number the allocator raises its own to the largest that was ever
/// given back: the 16 MiB that each thread has for requests, of which few pages are used, are then cleared in an arena,
/// and there to stay.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: libc::c_int = 1 << 20;

/// To be called before there are threads.
pub fn limit_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets numbers of the allocator, which locks what it has to.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENA_COUNT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES);
    }
}

/// Gives back what was freed, for as long as it is polled.
pub async fn trim_periodically() {
    loop {
        tokio::time::sleep(TRIM_INTERVAL).await;
        #[cfg(target_env = "gnu")]
        // SAFETY: touches only what is free, and locks it meanwhile.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}
