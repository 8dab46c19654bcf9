//! Counts the requests to stores of this process.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Totals of all requests to stores; zeros without any. The statistics of a mount have its fields, by their names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct RequestCounters {
    /// Requests that were sent.
    pub requests: u64,
    /// Requests in flight: sent, and without a complete answer.
    pub in_flight: u64,
    /// Bytes of objects that were received.
    pub bytes: u64,
    /// Bytes of objects a second, over the last seconds.
    pub bytes_per_second: u64,
    /// Bytes of objects that a cache on disk had, for which no request was sent.
    pub cached_bytes: u64,
    /// Requests that were sent again after a failure.
    pub retries: u64,
}

impl RequestCounters {
    /// The share of bytes from the cache on disk, from 0 to 1; `None` before the first byte.
    pub fn hit_ratio(&self) -> Option<f64> {
        let all = self.cached_bytes + self.bytes;
        (all > 0).then(|| self.cached_bytes as f64 / all as f64)
    }
}

static REQUESTS: AtomicU64 = AtomicU64::new(0);
static IN_FLIGHT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static CACHED_BYTES: AtomicU64 = AtomicU64::new(0);
static RETRIES: AtomicU64 = AtomicU64::new(0);
static RATE: RateWindow = RateWindow([const { AtomicU64::new(0) }; WINDOW_SECONDS as usize]);

static FAILURES: AtomicU64 = AtomicU64::new(0);

/// The number of reads and listings that stores failed. If it grew during a scan, the scan may be incomplete.
pub fn store_failures() -> u64 {
    FAILURES.load(Relaxed)
}

/// Counts a read or a listing that a store failed.
#[cfg(feature = "remote")]
pub(super) fn count_failure() {
    FAILURES.fetch_add(1, Relaxed);
}

/// The time from which the seconds of the rate are counted.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The counters of this process.
pub fn request_counters() -> RequestCounters {
    RequestCounters {
        requests: REQUESTS.load(Relaxed),
        in_flight: IN_FLIGHT.load(Relaxed),
        bytes: BYTES.load(Relaxed),
        bytes_per_second: RATE.per_second(START.elapsed()),
        cached_bytes: CACHED_BYTES.load(Relaxed),
        retries: RETRIES.load(Relaxed),
    }
}

/// A request that is in flight until this is dropped.
#[cfg(feature = "remote")]
#[derive(Debug)]
pub(super) struct InFlightRequest(());

#[cfg(feature = "remote")]
impl Drop for InFlightRequest {
    fn drop(&mut self) {
        IN_FLIGHT.fetch_sub(1, Relaxed);
    }
}

/// Counts a request that is sent.
#[cfg(feature = "remote")]
pub(super) fn count_request() -> InFlightRequest {
    REQUESTS.fetch_add(1, Relaxed);
    IN_FLIGHT.fetch_add(1, Relaxed);
    InFlightRequest(())
}

/// Counts bytes of an object.
#[cfg(feature = "remote")]
pub(super) fn count_bytes(bytes: usize) {
    BYTES.fetch_add(bytes as u64, Relaxed);
    RATE.add(START.elapsed(), bytes as u64);
}

/// Counts bytes of an object that the cache on disk had.
#[cfg(feature = "remote")]
pub(super) fn count_cached(bytes: u64) {
    CACHED_BYTES.fetch_add(bytes, Relaxed);
}

/// Counts a request that is sent again.
#[cfg(feature = "remote")]
pub(super) fn count_retry() {
    RETRIES.fetch_add(1, Relaxed);
}

/// The seconds that a rate is over: parts of 8 MiB arrive unevenly.
const WINDOW_SECONDS: u64 = 5;

/// The bits of a slot that hold its bytes: no machine receives a TiB in a second. The others hold the second.
const BYTES_BITS: u32 = 40;

/// The bytes of each of the last seconds, in the slot of that second.
#[derive(Debug)]
struct RateWindow([AtomicU64; WINDOW_SECONDS as usize]);

impl RateWindow {
    fn slot(&self, second: u64) -> &AtomicU64 {
        &self.0[(second % WINDOW_SECONDS) as usize]
    }

    /// The bytes that a slot has for a second.
    fn bytes_of(slot: u64, second: u64) -> u64 {
        let is_its_own = slot >> BYTES_BITS == second & (u64::MAX >> BYTES_BITS);
        if is_its_own { slot & ((1 << BYTES_BITS) - 1) } else { 0 }
    }

    #[cfg(any(feature = "remote", test))]
    fn add(&self, now: Duration, bytes: u64) {
        let second = now.as_secs();
        let add = |slot| Some(second << BYTES_BITS | (RateWindow::bytes_of(slot, second) + bytes));
        // It never refuses.
        let _ = self.slot(second).fetch_update(Relaxed, Relaxed, add);
    }

    /// The bytes of the window, over its length.
    fn per_second(&self, now: Duration) -> u64 {
        let last = now.as_secs();
        let first = (last + 1).saturating_sub(WINDOW_SECONDS);
        let seconds = first..=last;
        let bytes: u64 = seconds
            .map(|second| RateWindow::bytes_of(self.slot(second).load(Relaxed), second))
            .sum();
        let length = (now - Duration::from_secs(first)).max(Duration::from_secs(1));
        (bytes as f64 / length.as_secs_f64()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_the_last_seconds() {
        let window = RateWindow(Default::default());
        let at = Duration::from_secs_f64;
        assert_eq!(window.per_second(at(0.0)), 0);
        window.add(at(0.1), 600);
        assert_eq!(window.per_second(at(0.5)), 600);
        for second in 1..=20 {
            window.add(at(f64::from(second)), 500);
            window.add(at(f64::from(second) + 0.4), 500);
        }
        // Four whole seconds, and half of the fifth.
        assert_eq!(window.per_second(at(20.5)), 5 * 1000 * 2 / 9);
        assert_eq!(window.per_second(at(22.0)), 3 * 1000 / 4);
        assert_eq!(window.per_second(at(25.0)), 0);
        // A slot of long ago has the same place, and another second.
        assert_eq!(window.per_second(at(1020.5)), 0);
    }
}
