//! Evicts the source pages that our buffered reads populate: the cache or the target holds the same bytes.
//!
//! A guard asks the kernel what is uncached before each read, or once for the whole file. After the read it evicts
//! that, and only that: pages that other programs have read stay, as far as the kernel reports them. Where it
//! reports nothing, single reads evict nothing, and a guard of the whole file evicts all that it read.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use rangemap::RangeSet;
use rustix::param::page_size;

use crate::source::error::SourceError;
use crate::source::file::OpenFile;
use crate::source::read_at::ReadAt;
use crate::threads::lock;

use super::pages::{READAHEAD_MARGIN_BYTES, evict, to_whole_pages, uncached_ranges};

/// Bytes that are read before they are evicted: each eviction takes the kernel as long as a small read.
const EVICT_BATCH_BYTES: u64 = 1 << 20;

/// Populated ranges that are remembered of one file. Before there are more, all are evicted.
const MAX_RANGE_COUNT: usize = 16 << 10;

/// Ranges that are queued again because another program still uses them.
const MAX_RETRY_RANGE_COUNT: usize = 64;

/// Evicts the pages of one file that our reads populate.
pub struct PageCacheGuard {
    /// The kernel reports nothing useful: the pages of a file of an overlay belong to the file beneath.
    is_overlay: bool,
    state: Mutex<GuardState>,
}

#[derive(Default)]
struct GuardState {
    /// Ranges that were uncached before our reads, and may be cached since.
    populated: RangeSet<u64>,
    /// Ranges that are being read, in whole pages: what is evicted there may come back.
    active_reads: Vec<Range<u64>>,
    /// Populated ranges that were read and need not stay. A page that was read in part stays until its other bytes
    /// are read, or until the end.
    evictable: RangeSet<u64>,
    /// Evictable ranges to evict next.
    evict_queue: Vec<Range<u64>>,
    /// Bytes that were read since the last eviction.
    unevicted_bytes: u64,
    /// Ranges of retained reads and of readahead. Like pages that other programs populated, these may be marked by
    /// the kernel: a read of a marked page starts readahead.
    retained: RangeSet<u64>,
    /// There are too many ranges, and other programs use their pages.
    is_stuck: bool,
}

impl GuardState {
    fn add_missing(&mut self, missing: &[Range<u64>]) {
        for range in missing {
            if self.populated.len() < MAX_RANGE_COUNT {
                self.populated.insert(range.clone());
            }
        }
    }

    /// Removes the parts of a range that are uncached. The query must happen under the lock, so that a range that
    /// is read since is cached, or among the active reads.
    fn remove_evicted(&mut self, uncached: &[Range<u64>]) {
        let active: RangeSet<u64> = self.active_reads.iter().cloned().collect();
        for evicted in uncached.iter().flat_map(|range| active.gaps(range)) {
            self.populated.remove(evicted.clone());
            self.retained.remove(evicted);
        }
    }

    /// The populated parts of a range.
    fn populated_in(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        intersections(&self.populated, range)
    }

    /// Empties the queue, and returns its ranges with the evictable ranges beside them in the same pages.
    fn take_evictable(&mut self) -> Vec<Range<u64>> {
        let mut taken = Vec::new();
        for queued in std::mem::take(&mut self.evict_queue) {
            for evictable in intersections(&self.evictable, &to_whole_pages(&queued)) {
                self.evictable.remove(evictable.clone());
                taken.push(evictable);
            }
        }
        taken
    }
}

fn intersections(set: &RangeSet<u64>, range: &Range<u64>) -> Vec<Range<u64>> {
    let intersect = |other: &Range<u64>| other.start.max(range.start)..other.end.min(range.end);
    set.overlapping(range).map(intersect).collect()
}

/// Marks a range as being read, until it is dropped.
pub struct ActiveRead<'a> {
    state: &'a Mutex<GuardState>,
    range: Range<u64>,
}

impl Drop for ActiveRead<'_> {
    fn drop(&mut self) {
        let active_reads = &mut lock(self.state).active_reads;
        if let Some(this) = active_reads.iter().position(|range| *range == self.range) {
            active_reads.swap_remove(this);
        }
    }
}

impl PageCacheGuard {
    /// A guard that asks before each read.
    pub(in crate::source) fn new(is_overlay: bool) -> PageCacheGuard {
        PageCacheGuard { is_overlay, state: Mutex::default() }
    }

    fn uncached_ranges(&self, file: &OpenFile, range: &Range<u64>) -> Option<Vec<Range<u64>>> {
        if self.is_overlay { None } else { uncached_ranges(file, range) }
    }

    /// Calls `read`, which reads a range without readahead, and evicts what it populated.
    pub fn read_through(
        &self,
        file: &OpenFile,
        range: &Range<u64>,
        read: impl FnOnce() -> Result<(), SourceError>,
    ) -> Result<(), SourceError> {
        if range.is_empty() {
            return read();
        }
        self.make_room(file);
        let whole = to_whole_pages(range);
        let active_read = self.start_read(whole.clone());
        let Some(missing) = self.uncached_ranges(file, range) else { return read() };
        let may_read_ahead = {
            let mut state = lock(&self.state);
            state.add_missing(&missing);
            let pages = whole.start..whole.end.min(file.size());
            !pages.is_empty()
                && (state.populated.gaps(&pages).next().is_some()
                    || state.retained.overlaps(&pages))
        };
        let result = if may_read_ahead {
            let ahead = range.end..range.end.saturating_add(READAHEAD_MARGIN_BYTES);
            self.track_readahead(file, &ahead, read)
        } else {
            read()
        };
        let evictable = {
            let mut state = lock(&self.state);
            for populated in state.populated_in(range) {
                state.evictable.insert(populated.clone());
                state.evict_queue.push(populated);
            }
            state.unevicted_bytes += whole.end - whole.start;
            if state.unevicted_bytes < EVICT_BATCH_BYTES {
                return result;
            }
            state.unevicted_bytes = 0;
            state.take_evictable()
        };
        drop(active_read);
        let page = page_size() as u64;
        for evictable in evictable {
            let mut state = self.evict_populated(file, &evictable);
            for remaining in state.populated_in(&evictable) {
                state.evictable.insert(remaining.clone());
                // Another program reads it just now.
                let has_whole_page = remaining.start.next_multiple_of(page) + page <= remaining.end;
                if has_whole_page && state.evict_queue.len() < MAX_RETRY_RANGE_COUNT {
                    state.evict_queue.push(remaining);
                }
            }
        }
        result
    }

    /// Calls `read`, and regards what becomes cached of the range ahead meanwhile as populated by us.
    fn track_readahead(
        &self,
        file: &OpenFile,
        ahead: &Range<u64>,
        read: impl FnOnce() -> Result<(), SourceError>,
    ) -> Result<(), SourceError> {
        let before = self.uncached_ranges(file, ahead).unwrap_or_default();
        let result = read();
        let mut populated: RangeSet<u64> = before.into_iter().collect();
        for uncached in self.uncached_ranges(file, ahead).unwrap_or_default() {
            populated.remove(uncached);
        }
        let mut state = lock(&self.state);
        for range in populated {
            state.add_missing(std::slice::from_ref(&range));
            state.retained.insert(range);
        }
        result
    }

    /// Announces a read whose pages later reads come back to. Its pages, and those that the kernel may read ahead,
    /// stay until [`PageCacheGuard::evict_all`]. The kernel is not asked about them again: what other programs read
    /// of them meanwhile is evicted too.
    pub fn retain(&self, file: &OpenFile, range: &Range<u64>) -> ActiveRead<'_> {
        self.make_room(file);
        // With what the kernel reads ahead.
        let end = range
            .end
            .saturating_add(READAHEAD_MARGIN_BYTES)
            .div_ceil(READAHEAD_MARGIN_BYTES)
            .saturating_mul(READAHEAD_MARGIN_BYTES);
        let range = to_whole_pages(&(range.start..end));
        let active_read = self.start_read(range.clone());
        let unknown: Vec<Range<u64>> = lock(&self.state).retained.gaps(&range).collect();
        for range in unknown {
            let missing = self.uncached_ranges(file, &range).unwrap_or_default();
            let mut state = lock(&self.state);
            state.add_missing(&missing);
            state.retained.insert(range);
        }
        active_read
    }

    fn start_read(&self, range: Range<u64>) -> ActiveRead<'_> {
        lock(&self.state).active_reads.push(range.clone());
        ActiveRead { state: &self.state, range }
    }

    fn make_room(&self, file: &OpenFile) {
        {
            let mut state = lock(&self.state);
            state.is_stuck &= state.populated.len() >= MAX_RANGE_COUNT / 2;
            if state.populated.len() < MAX_RANGE_COUNT || state.is_stuck {
                return;
            }
        }
        self.evict_all(file);
        let mut state = lock(&self.state);
        state.is_stuck = state.populated.len() >= MAX_RANGE_COUNT / 2;
    }

    /// Evicts everything that our reads populated.
    pub fn evict_all(&self, file: &OpenFile) {
        let populated: Vec<Range<u64>> = {
            let mut state = lock(&self.state);
            state.evictable.clear();
            state.evict_queue.clear();
            state.populated.iter().cloned().collect()
        };
        for range in populated {
            drop(self.evict_populated(file, &range));
        }
    }

    /// Evicts a range, and removes from the populated ranges what is uncached then.
    fn evict_populated(&self, file: &OpenFile, range: &Range<u64>) -> MutexGuard<'_, GuardState> {
        evict(file, range);
        let mut state = lock(&self.state);
        let uncached = self.uncached_ranges(file, range).unwrap_or_default();
        state.remove_evicted(&uncached);
        state
    }
}

/// Leaves the page cache of one file as it was when the guard was created. When the guard is dropped, it evicts
/// everything that was uncached then.
pub struct WholeFileGuard<'a> {
    file: &'a OpenFile,
    guard: PageCacheGuard,
}

impl<'a> WholeFileGuard<'a> {
    /// Where the kernel does not report what is uncached, that is the whole file.
    pub(in crate::source) fn new(is_overlay: bool, file: &'a OpenFile) -> WholeFileGuard<'a> {
        let guard = PageCacheGuard::new(is_overlay);
        let whole = 0..file.size();
        let uncached = guard.uncached_ranges(file, &whole).unwrap_or_else(|| vec![whole]);
        let uncached = uncached.into_iter().filter(|range| !range.is_empty());
        lock(&guard.state).populated.extend(uncached);
        WholeFileGuard { file, guard }
    }

    /// Evicts what our reads populated of a range, so that little is cached at a time. Readahead may bring it back
    /// until the guard is dropped.
    pub fn evict_range(&self, range: &Range<u64>) {
        let populated = lock(&self.guard.state).populated_in(range);
        populated.iter().for_each(|populated| evict(self.file, populated));
    }
}

impl Drop for WholeFileGuard<'_> {
    fn drop(&mut self) {
        self.evict_range(&(0..u64::MAX));
    }
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
