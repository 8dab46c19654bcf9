//! What our reads brought into the page cache of a source, to let go of it there: it would be in memory twice.
//!
//! In: which range of a file is about to be read through its page cache. Out: nothing: of what was not there before, and
//! is now, that range is let go of when it was read, or when the image is closed. What others have had read stays, as far
//! as the system tells.

use std::ops::Range;
use std::sync::Mutex;

use rangemap::RangeSet;
use rustix::param::page_size;

use crate::source::{BEYOND, Error, OpenFile, ReadAt, Ways, forget, whole_pages};
use crate::threads::lock;

/// Read before any of it is let go of, which takes the kernel as long as a small read.
const TOGETHER: u64 = 1 << 20;

/// Ranges that are remembered of one file at the most. Before there are more, all are let go of.
const MOST: usize = 16 << 10;

/// Ranges that are tried again after others, at the most.
const AGAIN: usize = 64;

#[derive(Default)]
pub struct Brought(Mutex<Pages>);

#[derive(Default)]
struct Pages {
    /// What was not there before our reads, and may be since.
    ours: RangeSet<u64>,
    /// What is being read, in whole pages: what is let go of there may come back.
    reading: Vec<Range<u64>>,
    /// What of ours was read and need not stay. Pages of which only a part was read are there until what is beside them is
    /// read, or the image is closed.
    passed: RangeSet<u64>,
    /// What of that is to be let go of next, and how much was read since that was done.
    next: Vec<Range<u64>>,
    owed: u64,
    /// What was asked about before reads other than those that pass. Its pages, like those that others had read, may be
    /// such that the kernel reads on at, whoever comes to them.
    kept: RangeSet<u64>,
    /// There are too many ranges, and others hold on to them.
    stuck: bool,
}

impl Pages {
    fn add(&mut self, missing: &[Range<u64>]) {
        for range in missing {
            if self.ours.len() < MOST {
                self.ours.insert(range.clone());
            }
        }
    }

    /// Sees what of a range is not there any more. To be asked under the lock: what is read since is there, or being read.
    fn remove_gone(&mut self, ways: &Ways, file: &OpenFile, range: &Range<u64>) {
        let reading: RangeSet<u64> = self.reading.iter().cloned().collect();
        let gone = ways.uncached(file, range).unwrap_or_default();
        for gone in gone.iter().flat_map(|gone| reading.gaps(gone)) {
            self.ours.remove(gone.clone());
            self.kept.remove(gone);
        }
    }

    /// What of a range is ours.
    fn ours_in(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        within(&self.ours, range)
    }

    /// What was read since this was called last, with what was left of what lies beside it.
    fn take_next(&mut self) -> Vec<Range<u64>> {
        let mut taken = Vec::new();
        for next in std::mem::take(&mut self.next) {
            for passed in within(&self.passed, &whole_pages(&next)) {
                self.passed.remove(passed.clone());
                taken.push(passed);
            }
        }
        taken
    }
}

fn within(set: &RangeSet<u64>, range: &Range<u64>) -> Vec<Range<u64>> {
    let common = |of: &Range<u64>| of.start.max(range.start)..of.end.min(range.end);
    set.overlapping(range).map(common).collect()
}

/// A range is being read for as long as this lives.
pub struct Reading<'a>(&'a Mutex<Pages>, Range<u64>);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let reading = &mut lock(self.0).reading;
        if let Some(this) = reading.iter().position(|reading| *reading == self.1) {
            reading.swap_remove(this);
        }
    }
}

impl Brought {
    /// Reads a range with nothing ahead of it, and lets go of it.
    pub fn passing(
        &self,
        ways: &Ways,
        file: &OpenFile,
        range: &Range<u64>,
        read: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        if range.is_empty() {
            return read();
        }
        self.make_room(ways, file);
        let whole = whole_pages(range);
        let reading = self.reading(whole.clone());
        let Some(missing) = ways.uncached(file, range) else { return read() };
        let may_go_on = {
            let mut pages = lock(&self.0);
            pages.add(&missing);
            let all = whole.start..whole.end.min(file.size());
            !all.is_empty() && (pages.ours.gaps(&all).next().is_some() || pages.kept.overlaps(&all))
        };
        let ahead = may_go_on.then(|| range.end..range.end.saturating_add(BEYOND));
        let read = self.with_ahead(ways, file, ahead, read);
        let passed = {
            let mut pages = lock(&self.0);
            for ours in pages.ours_in(range) {
                pages.passed.insert(ours.clone());
                pages.next.push(ours);
            }
            pages.owed += whole.end - whole.start;
            if pages.owed < TOGETHER {
                return read;
            }
            pages.owed = 0;
            pages.take_next()
        };
        drop(reading);
        let page = page_size() as u64;
        for passed in passed {
            forget(file, &passed);
            let mut pages = lock(&self.0);
            pages.remove_gone(ways, file, &passed);
            for left in pages.ours_in(&passed) {
                pages.passed.insert(left.clone());
                // Somebody is at it just now.
                let has_whole_page = left.start.next_multiple_of(page) + page <= left.end;
                if has_whole_page && pages.next.len() < AGAIN {
                    pages.next.push(left);
                }
            }
        }
        read
    }

    /// What comes to be there of what lies ahead while it is read is ours, too.
    fn with_ahead(
        &self,
        ways: &Ways,
        file: &OpenFile,
        ahead: Option<Range<u64>>,
        read: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(ahead) = ahead else { return read() };
        let before = ways.uncached(file, &ahead).unwrap_or_default();
        let read = read();
        let mut came: RangeSet<u64> = before.into_iter().collect();
        for missing in ways.uncached(file, &ahead).unwrap_or_default() {
            came.remove(missing);
        }
        let mut pages = lock(&self.0);
        for came in came {
            pages.add(std::slice::from_ref(&came));
            pages.kept.insert(came);
        }
        read
    }

    /// To be called before a range is read and held until it was. Reads will come back to its pages, or to those behind it,
    /// until the image is closed: they are not asked about again, so that what others have had read of them by then is
    /// let go of, too.
    pub fn keep(&self, ways: &Ways, file: &OpenFile, range: &Range<u64>) -> Reading<'_> {
        self.make_room(ways, file);
        // With what the kernel reads ahead.
        let end = range.end.saturating_add(BEYOND).div_ceil(BEYOND).saturating_mul(BEYOND);
        let range = whole_pages(&(range.start..end));
        let reading = self.reading(range.clone());
        let new: Vec<Range<u64>> = lock(&self.0).kept.gaps(&range).collect();
        for range in new {
            let missing = ways.uncached(file, &range).unwrap_or_default();
            let mut pages = lock(&self.0);
            pages.add(&missing);
            pages.kept.insert(range);
        }
        reading
    }

    fn reading(&self, range: Range<u64>) -> Reading<'_> {
        lock(&self.0).reading.push(range.clone());
        Reading(&self.0, range)
    }

    fn make_room(&self, ways: &Ways, file: &OpenFile) {
        {
            let mut pages = lock(&self.0);
            pages.stuck &= pages.ours.len() >= MOST / 2;
            if pages.ours.len() < MOST || pages.stuck {
                return;
            }
        }
        self.let_go(ways, file);
        let mut pages = lock(&self.0);
        pages.stuck = pages.ours.len() >= MOST / 2;
    }

    /// Lets go of all that is ours.
    pub fn let_go(&self, ways: &Ways, file: &OpenFile) {
        let ours: Vec<Range<u64>> = {
            let mut pages = lock(&self.0);
            pages.passed.clear();
            pages.next.clear();
            pages.ours.iter().cloned().collect()
        };
        for ours in ours {
            forget(file, &ours);
            lock(&self.0).remove_gone(ways, file, &ours);
        }
    }
}

#[cfg(test)]
#[path = "page_cache_guard_tests.rs"]
mod tests;
