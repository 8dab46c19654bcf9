//! The space that a process knows of: bytes of all blocks, bytes reserved for new blocks, and free bytes of their disk.
//!
//! Its lock is held for arithmetic alone. The caller measures the disk and scans the folder between two calls.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::threads::{ForkSafeGuard, lock_holding_forks};

use super::limits::DiskLimits;

/// Bytes that this process writes before it scans for what others wrote meanwhile.
const RESCAN_BYTES: u64 = 1 << 30;

/// The age at which the free space is measured again. A disk that other programs fill sooner fails a write.
const FREE_SPACE_AGE: Duration = Duration::from_secs(1);

/// The decision on a request for room.
#[derive(Debug)]
pub enum RoomDecision<'a> {
    /// There is room, or a scan of another thread will make it.
    Granted(SpaceReservation<'a>),
    /// The free space is unknown or old: measure it, and request again.
    MeasureDisk,
    /// What is known leaves no room, or is old: scan the folder, and evict.
    ScanFolder,
}

/// Room for a block that is being written. A drop without a commit releases it.
#[derive(Debug)]
pub struct SpaceReservation<'a> {
    ledger: &'a SpaceLedger,
    bytes: u64,
}

/// Bytes that blocks take, bytes that are reserved, and bytes that the disk has free.
#[derive(Debug)]
pub struct SpaceLedger {
    limits: DiskLimits,
    space: Mutex<KnownSpace>,
}

#[derive(Debug, Default)]
struct KnownSpace {
    /// The process that reserves and scans: a forked child lacks the threads of its parent.
    pid: u32,
    used: u64,
    /// Bytes that were written since the last scan began; `None` before the first scan.
    written: Option<u64>,
    /// Bytes of blocks that are being written.
    reserved: u64,
    free: u64,
    measured_at: Option<Instant>,
    is_scanning: bool,
}

impl SpaceLedger {
    pub fn new(limits: DiskLimits) -> SpaceLedger {
        SpaceLedger { limits, space: Mutex::default() }
    }

    /// Locks the space. In a forked child, it first forgets the parent's reservations and scan.
    fn lock(&self) -> ForkSafeGuard<'_, KnownSpace> {
        let mut space = lock_holding_forks(&self.space);
        let pid = std::process::id();
        if space.pid != pid {
            (space.pid, space.reserved, space.is_scanning) = (pid, 0, false);
        }
        space
    }

    /// Decides whether bytes may be written. While one thread scans, others are granted room at once. They may exceed
    /// the limit until the scan ends, as writers of another process may.
    pub fn request(&self, bytes: u64) -> RoomDecision<'_> {
        let mut space = self.lock();
        if space.is_scanning {
            return RoomDecision::Granted(self.reserve_in(&mut space, bytes));
        }
        if space.measured_at.is_none_or(|at| at.elapsed() >= FREE_SPACE_AGE) {
            return RoomDecision::MeasureDisk;
        }
        let is_recent = space.written.is_some_and(|written| written < RESCAN_BYTES);
        let needed = space.reserved.saturating_add(bytes);
        if is_recent && self.limits.has_room(space.used, space.free, needed) {
            return RoomDecision::Granted(self.reserve_in(&mut space, bytes));
        }
        space.is_scanning = true;
        space.written = Some(0);
        RoomDecision::ScanFolder
    }

    fn reserve_in(&self, space: &mut KnownSpace, bytes: u64) -> SpaceReservation<'_> {
        space.reserved += bytes;
        SpaceReservation { ledger: self, bytes }
    }

    /// Reserves bytes, whether they have room or not.
    pub fn reserve(&self, bytes: u64) -> SpaceReservation<'_> {
        self.reserve_in(&mut self.lock(), bytes)
    }

    /// Bytes of blocks that are being written.
    pub fn reserved_bytes(&self) -> u64 {
        self.lock().reserved
    }

    /// Records the free space of the disk.
    pub fn set_free(&self, bytes: u64) {
        let mut space = self.lock();
        (space.free, space.measured_at) = (bytes, Some(Instant::now()));
    }

    /// Records the result of a scan, and reserves bytes if they have room. Blocks that were written during the scan may
    /// be counted twice, until the next scan.
    pub fn end_scan(&self, used: u64, free: u64, bytes: u64) -> Option<SpaceReservation<'_>> {
        let mut space = self.lock();
        space.used = used + space.written.unwrap_or(0);
        (space.free, space.measured_at) = (free, Some(Instant::now()));
        space.is_scanning = false;
        let needed = space.reserved.saturating_add(bytes);
        self.limits.has_room(used, free, needed).then(|| self.reserve_in(&mut space, bytes))
    }
}

impl SpaceReservation<'_> {
    /// Records that the block is written, with its size. Call it before the block gets its name: a scan that begins
    /// later then counts the block once.
    pub fn commit(mut self, written: u64) {
        let mut space = self.ledger.lock();
        space.used += written;
        space.free = space.free.saturating_sub(written);
        space.written = space.written.map(|before| before + written);
        space.release(std::mem::take(&mut self.bytes));
    }
}

impl Drop for SpaceReservation<'_> {
    fn drop(&mut self) {
        self.ledger.lock().release(self.bytes);
    }
}

impl KnownSpace {
    fn release(&mut self, bytes: u64) {
        // In a forked child, the ledger has already dropped the reservations of its parent.
        self.reserved = self.reserved.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> SpaceLedger {
        SpaceLedger::new(DiskLimits { max_bytes: 1000, min_free_bytes: 100 })
    }

    fn granted(decision: RoomDecision<'_>) -> Option<SpaceReservation<'_>> {
        match decision {
            RoomDecision::Granted(reservation) => Some(reservation),
            RoomDecision::MeasureDisk | RoomDecision::ScanFolder => None,
        }
    }

    fn is_scan(decision: &RoomDecision<'_>) -> bool {
        matches!(decision, RoomDecision::ScanFolder)
    }

    #[test]
    fn the_disk_is_measured_and_the_folder_scanned_once_for_many_blocks() {
        let ledger = ledger();
        assert!(matches!(ledger.request(10), RoomDecision::MeasureDisk));
        ledger.set_free(5000);
        assert!(is_scan(&ledger.request(10)));
        assert!(ledger.end_scan(500, 5000, 0).is_some());
        for _ in 0..50 {
            granted(ledger.request(10)).unwrap().commit(10);
        }
        assert!(is_scan(&ledger.request(10)));
    }

    #[test]
    fn reserved_bytes_are_not_granted_again() {
        let ledger = ledger();
        ledger.set_free(5000);
        assert!(is_scan(&ledger.request(300)));
        let first = ledger.end_scan(500, 5000, 300).unwrap();
        let second = granted(ledger.request(200)).unwrap();
        assert_eq!(ledger.reserved_bytes(), 500);
        assert!(is_scan(&ledger.request(1)));
        assert!(ledger.end_scan(500, 5000, 1).is_none());
        // One was written in part, the other not at all.
        first.commit(250);
        drop(second);
        assert_eq!(ledger.reserved_bytes(), 0);
        assert!(granted(ledger.request(250)).is_some());
        assert!(is_scan(&ledger.request(251)));
    }

    #[test]
    fn writers_do_not_wait_for_a_scan_and_what_they_write_counts() {
        let ledger = ledger();
        ledger.set_free(5000);
        assert!(is_scan(&ledger.request(10)));
        // Another thread, while the first one scans.
        granted(ledger.request(10)).unwrap().commit(10);
        assert!(ledger.end_scan(985, 5000, 0).is_some());
        assert!(granted(ledger.request(5)).is_some());
        assert!(is_scan(&ledger.request(6)));
    }

    #[test]
    fn written_bytes_count_before_the_disk_is_measured_again() {
        let ledger = ledger();
        ledger.set_free(130);
        assert!(is_scan(&ledger.request(10)));
        assert!(ledger.end_scan(0, 130, 0).is_some());
        granted(ledger.request(30)).unwrap().commit(30);
        assert!(is_scan(&ledger.request(1)));
    }
}
