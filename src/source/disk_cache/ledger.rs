//! The space that a process knows of: bytes of all blocks, and bytes that are free on their disk.
//!
//! Its lock is held for arithmetic alone. The caller measures the disk and scans the folder between two calls.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::threads::lock_holding_forks;

use super::limits::DiskLimits;

/// Bytes that this process writes before it scans for what others wrote meanwhile.
const RESCAN_BYTES: u64 = 1 << 30;

/// The age at which the free space is measured again. A disk that other programs fill sooner fails a write.
const FREE_SPACE_AGE: Duration = Duration::from_secs(1);

/// The time after which a scan counts as abandoned: a forked child lacks the thread that began it.
const SCAN_TIMEOUT: Duration = Duration::from_secs(60);

/// The decision on a request for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoomDecision {
    /// There is room, or a scan of another thread will make it.
    Granted,
    /// The free space is unknown or old: measure it, and ask again.
    MeasureDisk,
    /// What is known leaves no room, or is old: scan the folder, and evict.
    ScanFolder,
}

/// Bytes that blocks take and that the disk has free.
#[derive(Debug)]
pub struct SpaceLedger {
    limits: DiskLimits,
    space: Mutex<KnownSpace>,
}

#[derive(Debug, Default)]
struct KnownSpace {
    used: u64,
    /// Bytes that were written since the last scan began; `None` before the first scan.
    written: Option<u64>,
    free: u64,
    measured_at: Option<Instant>,
    scanning_since: Option<Instant>,
}

impl SpaceLedger {
    pub fn new(limits: DiskLimits) -> SpaceLedger {
        SpaceLedger { limits, space: Mutex::default() }
    }

    /// Asks for room for bytes that will be written. One thread at a time is told to scan. Meanwhile the others write
    /// without asking, which exceeds the limit by no more than writers of another process do.
    pub fn request(&self, bytes: u64) -> RoomDecision {
        let mut space = lock_holding_forks(&self.space);
        let is_younger = |at: Option<Instant>, age| at.is_some_and(|at| at.elapsed() < age);
        if is_younger(space.scanning_since, SCAN_TIMEOUT) {
            return RoomDecision::Granted;
        }
        if !is_younger(space.measured_at, FREE_SPACE_AGE) {
            return RoomDecision::MeasureDisk;
        }
        let is_recent = space.written.is_some_and(|written| written < RESCAN_BYTES);
        if is_recent && self.limits.has_room(space.used, space.free, bytes) {
            return RoomDecision::Granted;
        }
        space.scanning_since = Some(Instant::now());
        space.written = Some(0);
        RoomDecision::ScanFolder
    }

    /// Records the free space of the disk.
    pub fn set_free(&self, bytes: u64) {
        let mut space = lock_holding_forks(&self.space);
        (space.free, space.measured_at) = (bytes, Some(Instant::now()));
    }

    /// Records the result of a scan. Blocks that were written during it may be counted twice, until the next one.
    pub fn end_scan(&self, used: u64, free: u64) {
        let mut space = lock_holding_forks(&self.space);
        space.used = used + space.written.unwrap_or(0);
        (space.free, space.measured_at) = (free, Some(Instant::now()));
        space.scanning_since = None;
    }

    /// Records bytes that were written.
    pub fn add_written(&self, bytes: u64) {
        let mut space = lock_holding_forks(&self.space);
        space.used += bytes;
        space.free = space.free.saturating_sub(bytes);
        space.written = space.written.map(|written| written + bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> SpaceLedger {
        SpaceLedger::new(DiskLimits { max_bytes: 1000, min_free_bytes: 100 })
    }

    #[test]
    fn the_disk_is_measured_and_the_folder_scanned_once_for_many_blocks() {
        let ledger = ledger();
        assert_eq!(ledger.request(10), RoomDecision::MeasureDisk);
        ledger.set_free(5000);
        assert_eq!(ledger.request(10), RoomDecision::ScanFolder);
        ledger.end_scan(500, 5000);
        for _ in 0..50 {
            assert_eq!(ledger.request(10), RoomDecision::Granted);
            ledger.add_written(10);
        }
        assert_eq!(ledger.request(10), RoomDecision::ScanFolder);
    }

    #[test]
    fn writers_do_not_wait_for_a_scan_and_what_they_write_counts() {
        let ledger = ledger();
        ledger.set_free(5000);
        assert_eq!(ledger.request(10), RoomDecision::ScanFolder);
        // Another thread, while the first one scans.
        assert_eq!(ledger.request(10), RoomDecision::Granted);
        ledger.add_written(10);
        ledger.end_scan(985, 5000);
        assert_eq!(ledger.request(5), RoomDecision::Granted);
        assert_eq!(ledger.request(6), RoomDecision::ScanFolder);
    }

    #[test]
    fn written_bytes_count_before_the_disk_is_measured_again() {
        let ledger = ledger();
        ledger.set_free(130);
        assert_eq!(ledger.request(10), RoomDecision::ScanFolder);
        ledger.end_scan(0, 130);
        assert_eq!(ledger.request(30), RoomDecision::Granted);
        ledger.add_written(30);
        assert_eq!(ledger.request(1), RoomDecision::ScanFolder);
    }
}
