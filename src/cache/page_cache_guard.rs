//! What our reads brought into the page cache of a source, to let go of it there: it would be in memory twice.
//!
//! In: which range of a file is about to be read through its page cache. Out: nothing: of what was not there before, and
//! is now, that range is let go of when it was read, or when the image is closed. What others have had read stays, as far
//! as the system tells.

use std::ops::Range;
use std::sync::Mutex;

use rangemap::RangeSet;
use rustix::param::page_size;

use crate::source::{
    OpenFile, READAHEAD_MARGIN_BYTES, ReadAt, ReadStrategy, SourceError, evict, to_whole_pages,
};
use crate::threads::lock;

/// Read before any of it is let go of, which takes the kernel as long as a small read.
const EVICT_BATCH_BYTES: u64 = 1 << 20;

/// Ranges that are remembered of one file at the most. Before there are more, all are let go of.
const MAX_RANGE_COUNT: usize = 16 << 10;

/// Ranges that are tried again after others, at the most.
const MAX_RETRY_RANGES: usize = 64;

#[derive(Default)]
pub struct PageCacheGuard(Mutex<GuardState>);

#[derive(Default)]
struct GuardState {
    /// What was not there before our reads, and may be since.
    populated: RangeSet<u64>,
    /// What is being read, in whole pages: what is let go of there may come back.
    active_reads: Vec<Range<u64>>,
    /// What of ours was read and need not stay. Pages of which only a part was read are there until what is beside them is
    /// read, or the image is closed.
    evictable: RangeSet<u64>,
    /// What of that is to be let go of next, and how much was read since that was done.
    evict_queue: Vec<Range<u64>>,
    unevicted_bytes: u64,
    /// What was asked about before reads other than those that pass. Its pages, like those that others had read, may be
    /// such that the kernel reads on at, whoever comes to them.
    retained: RangeSet<u64>,
    /// There are too many ranges, and others hold on to them.
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

    /// Sees what of a range is not there any more. To be asked under the lock: what is read since is there, or being read.
    fn remove_evicted(&mut self, ways: &ReadStrategy, file: &OpenFile, range: &Range<u64>) {
        let reading: RangeSet<u64> = self.active_reads.iter().cloned().collect();
        let gone = ways.uncached_ranges(file, range).unwrap_or_default();
        for gone in gone.iter().flat_map(|gone| reading.gaps(gone)) {
            self.populated.remove(gone.clone());
            self.retained.remove(gone);
        }
    }

    /// What of a range is ours.
    fn populated_in(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        intersections(&self.populated, range)
    }

    /// What was read since this was called last, with what was left of what lies beside it.
    fn take_evictable(&mut self) -> Vec<Range<u64>> {
        let mut taken = Vec::new();
        for next in std::mem::take(&mut self.evict_queue) {
            for passed in intersections(&self.evictable, &to_whole_pages(&next)) {
                self.evictable.remove(passed.clone());
                taken.push(passed);
            }
        }
        taken
    }
}

fn intersections(set: &RangeSet<u64>, range: &Range<u64>) -> Vec<Range<u64>> {
    let common = |of: &Range<u64>| of.start.max(range.start)..of.end.min(range.end);
    set.overlapping(range).map(common).collect()
}

/// A range is being read for as long as this lives.
pub struct ActiveRead<'a>(&'a Mutex<GuardState>, Range<u64>);

impl Drop for ActiveRead<'_> {
    fn drop(&mut self) {
        let reading = &mut lock(self.0).active_reads;
        if let Some(this) = reading.iter().position(|reading| *reading == self.1) {
            reading.swap_remove(this);
        }
    }
}

impl PageCacheGuard {
    /// Reads a range with nothing ahead of it, and lets go of it.
    pub fn read_through(
        &self,
        ways: &ReadStrategy,
        file: &OpenFile,
        range: &Range<u64>,
        read: impl FnOnce() -> Result<(), SourceError>,
    ) -> Result<(), SourceError> {
        if range.is_empty() {
            return read();
        }
        self.make_room(ways, file);
        let whole = to_whole_pages(range);
        let reading = self.reading(whole.clone());
        let Some(missing) = ways.uncached_ranges(file, range) else { return read() };
        let may_go_on = {
            let mut pages = lock(&self.0);
            pages.add_missing(&missing);
            let all = whole.start..whole.end.min(file.size());
            !all.is_empty()
                && (pages.populated.gaps(&all).next().is_some() || pages.retained.overlaps(&all))
        };
        let ahead = may_go_on.then(|| range.end..range.end.saturating_add(READAHEAD_MARGIN_BYTES));
        let read = self.track_readahead(ways, file, ahead, read);
        let passed = {
            let mut pages = lock(&self.0);
            for ours in pages.populated_in(range) {
                pages.evictable.insert(ours.clone());
                pages.evict_queue.push(ours);
            }
            pages.unevicted_bytes += whole.end - whole.start;
            if pages.unevicted_bytes < EVICT_BATCH_BYTES {
                return read;
            }
            pages.unevicted_bytes = 0;
            pages.take_evictable()
        };
        drop(reading);
        let page = page_size() as u64;
        for passed in passed {
            evict(file, &passed);
            let mut pages = lock(&self.0);
            pages.remove_evicted(ways, file, &passed);
            for left in pages.populated_in(&passed) {
                pages.evictable.insert(left.clone());
                // Somebody is at it just now.
                let has_whole_page = left.start.next_multiple_of(page) + page <= left.end;
                if has_whole_page && pages.evict_queue.len() < MAX_RETRY_RANGES {
                    pages.evict_queue.push(left);
                }
            }
        }
        read
    }

    /// What comes to be there of what lies ahead while it is read is ours, too.
    fn track_readahead(
        &self,
        ways: &ReadStrategy,
        file: &OpenFile,
        ahead: Option<Range<u64>>,
        read: impl FnOnce() -> Result<(), SourceError>,
    ) -> Result<(), SourceError> {
        let Some(ahead) = ahead else { return read() };
        let before = ways.uncached_ranges(file, &ahead).unwrap_or_default();
        let read = read();
        let mut came: RangeSet<u64> = before.into_iter().collect();
        for missing in ways.uncached_ranges(file, &ahead).unwrap_or_default() {
            came.remove(missing);
        }
        let mut pages = lock(&self.0);
        for came in came {
            pages.add_missing(std::slice::from_ref(&came));
            pages.retained.insert(came);
        }
        read
    }

    /// To be called before a range is read and held until it was. Reads will come back to its pages, or to those behind it,
    /// until the image is closed: they are not asked about again, so that what others have had read of them by then is
    /// let go of, too.
    pub fn retain(
        &self,
        ways: &ReadStrategy,
        file: &OpenFile,
        range: &Range<u64>,
    ) -> ActiveRead<'_> {
        self.make_room(ways, file);
        // With what the kernel reads ahead.
        let end = range
            .end
            .saturating_add(READAHEAD_MARGIN_BYTES)
            .div_ceil(READAHEAD_MARGIN_BYTES)
            .saturating_mul(READAHEAD_MARGIN_BYTES);
        let range = to_whole_pages(&(range.start..end));
        let start_read = self.reading(range.clone());
        let new: Vec<Range<u64>> = lock(&self.0).retained.gaps(&range).collect();
        for range in new {
            let missing = ways.uncached_ranges(file, &range).unwrap_or_default();
            let mut pages = lock(&self.0);
            pages.add_missing(&missing);
            pages.retained.insert(range);
        }
        start_read
    }

    fn reading(&self, range: Range<u64>) -> ActiveRead<'_> {
        lock(&self.0).active_reads.push(range.clone());
        ActiveRead(&self.0, range)
    }

    fn make_room(&self, ways: &ReadStrategy, file: &OpenFile) {
        {
            let mut pages = lock(&self.0);
            pages.is_stuck &= pages.populated.len() >= MAX_RANGE_COUNT / 2;
            if pages.populated.len() < MAX_RANGE_COUNT || pages.is_stuck {
                return;
            }
        }
        self.evict_all(ways, file);
        let mut pages = lock(&self.0);
        pages.is_stuck = pages.populated.len() >= MAX_RANGE_COUNT / 2;
    }

    /// Lets go of all that is ours.
    pub fn evict_all(&self, ways: &ReadStrategy, file: &OpenFile) {
        let ours: Vec<Range<u64>> = {
            let mut pages = lock(&self.0);
            pages.evictable.clear();
            pages.evict_queue.clear();
            pages.populated.iter().cloned().collect()
        };
        for ours in ours {
            evict(file, &ours);
            lock(&self.0).remove_evicted(ways, file, &ours);
        }
    }
}

#[cfg(test)]
#[path = "page_cache_guard_tests.rs"]
mod tests;
