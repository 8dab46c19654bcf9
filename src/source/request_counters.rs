//! Counts the requests to stores of this process.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What all requests to stores added up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounters {
    /// Requests that were sent.
    pub requests: u64,
    /// Bytes of objects that were received.
    pub bytes: u64,
    /// Requests that were sent again after a failure.
    pub retries: u64,
}

static REQUESTS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static RETRIES: AtomicU64 = AtomicU64::new(0);

/// The counters of this process.
pub fn request_counters() -> RequestCounters {
    RequestCounters {
        requests: REQUESTS.load(Relaxed),
        bytes: BYTES.load(Relaxed),
        retries: RETRIES.load(Relaxed),
    }
}

/// Counts a request that is sent.
#[cfg(feature = "remote")]
pub(super) fn count_request() {
    REQUESTS.fetch_add(1, Relaxed);
}

/// Counts bytes of an object.
#[cfg(feature = "remote")]
pub(super) fn count_bytes(bytes: usize) {
    BYTES.fetch_add(bytes as u64, Relaxed);
}

/// Counts a request that is sent again.
#[cfg(feature = "remote")]
pub(super) fn count_retry() {
    RETRIES.fetch_add(1, Relaxed);
}
