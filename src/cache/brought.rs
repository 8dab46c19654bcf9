//! What our reads brought into the page cache of a source, to let go of it there: it would be in memory twice.
//!
//! In: which range of a file is about to be read through its page cache. Out: nothing: of what was not there before, and
//! is now, that range is let go of when it was read, or when the image is closed. What others have had read stays, as far
//! as the system tells.

use std::ops::Range;
use std::sync::Mutex;

use rangemap::RangeSet;
use rustix::param::page_size;

use crate::source::{BEYOND, Error, OpenFile, Ways, forget};
use crate::threads::lock;

/// Read before any of it is let go of, which takes the kernel as long as a small read.
const TOGETHER: u64 = 1 << 20;

/// Ranges that are remembered of one file at the most. What would be more stays.
const MOST: usize = 16 << 10;

/// Ranges that are tried again after others, at the most.
const AGAIN: usize = 64;

#[derive(Default)]
pub struct Brought(Mutex<Pages>);

#[derive(Default)]
struct Pages {
    /// What was not there before our reads, and may be since.
    ours: RangeSet<u64>,
    /// What is being read, and let go of then; in whole pages.
    reading: Vec<Range<u64>>,
    /// What of ours was read and need not stay. Pages of which only a part was read are there until what is beside them is
    /// read, or the image is closed.
    passed: RangeSet<u64>,
    /// What of that is to be let go of next, and how much was read since that was done.
    next: Vec<Range<u64>>,
    owed: u64,
    /// What was asked about for reads that come back to it.
    kept: RangeSet<u64>,
}

impl Pages {
    fn add(&mut self, missing: &[Range<u64>]) {
        for range in missing {
            if self.ours.len() < MOST {
                self.ours.insert(range.clone());
            }
        }
    }

    /// These are not there any more. What is being read comes back.
    fn remove(&mut self, gone: &[Range<u64>]) {
        let reading: RangeSet<u64> = self.reading.iter().cloned().collect();
        for gone in gone.iter().flat_map(|gone| reading.gaps(gone)) {
            self.ours.remove(gone.clone());
            self.kept.remove(gone);
        }
    }

    /// What of a range is ours.
    fn ours_in(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let ours = self.ours.overlapping(range);
        ours.map(|ours| ours.start.max(range.start)..ours.end.min(range.end)).collect()
    }

    /// What was read since this was called last, with what was left of what lies beside it.
    fn take_next(&mut self) -> Vec<Range<u64>> {
        let mut taken = Vec::new();
        for next in std::mem::take(&mut self.next) {
            if let Some(all) = self.passed.get(&next.start).cloned() {
                self.passed.remove(all.clone());
                taken.push(all);
            }
        }
        taken
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
        let page = page_size() as u64;
        let whole = range.start / page * page..range.end.div_ceil(page) * page;
        lock(&self.0).reading.push(whole.clone());
        let missing = ways.uncached(file, range).unwrap_or_default();
        lock(&self.0).add(&missing);
        let read = read();
        let passed = {
            let mut pages = lock(&self.0);
            if let Some(this) = pages.reading.iter().position(|reading| *reading == whole) {
                pages.reading.swap_remove(this);
            }
            for ours in pages.ours_in(range) {
                pages.passed.insert(ours.clone());
                pages.next.push(ours);
            }
            pages.owed += range.end - range.start;
            if pages.owed < TOGETHER {
                return read;
            }
            pages.owed = 0;
            pages.take_next()
        };
        for passed in passed {
            forget(file, &passed);
            let gone = ways.uncached(file, &passed).unwrap_or_default();
            let mut pages = lock(&self.0);
            pages.remove(&gone);
            for left in pages.ours_in(&passed) {
                pages.passed.insert(left.clone());
                // Somebody is at it just now.
                if left.end - left.start >= page && pages.next.len() < AGAIN {
                    pages.next.push(left);
                }
            }
        }
        read
    }

    /// Reads will come back to the pages of a range, or to those behind it, until the image is closed: they are not asked
    /// about again, so that what others have had read of them by then is let go of, too.
    pub fn keep(&self, ways: &Ways, file: &OpenFile, range: &Range<u64>) {
        // With what the kernel reads ahead.
        let end = range.end.saturating_add(BEYOND).div_ceil(BEYOND).saturating_mul(BEYOND);
        let new = {
            let mut pages = lock(&self.0);
            let new: Vec<Range<u64>> = pages.kept.gaps(&(range.start..end)).collect();
            pages.kept.extend(new.iter().cloned());
            new
        };
        for range in new {
            let missing = ways.uncached(file, &range).unwrap_or_default();
            lock(&self.0).add(&missing);
        }
    }

    /// To be called when nothing more is read.
    pub fn let_go(&self, file: &OpenFile) {
        lock(&self.0).ours.iter().for_each(|range| forget(file, range));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustix::fs::{Advice, fadvise};

    use super::*;
    use crate::source::{Links, ReadAt, Root};

    const SIZE: u64 = 8 << 20;

    struct Sample {
        file: OpenFile,
        ways: Ways,
        brought: Brought,
        _dir: tempfile::TempDir,
    }

    impl Sample {
        /// A file of which the page cache has nothing.
        fn new() -> Sample {
            // Not /tmp, which may be of memory, where nothing can be evicted.
            let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            let path = dir.path().join("f");
            std::fs::write(&path, vec![7; SIZE as usize]).unwrap();
            std::fs::File::open(&path).unwrap().sync_all().unwrap();
            let (root, way) = Root::around(dir.path(), Links::Inside).unwrap();
            let file = root.open(&way.join(Path::new("f"))).unwrap();
            let (ways, brought) = (Ways::of(&file), Brought::default());
            forget(&file, &(0..SIZE));
            let sample = Sample { file, ways, brought, _dir: dir };
            assert_eq!(sample.there(), []);
            sample
        }

        /// As others do, with nothing ahead.
        fn others_read(&self, range: &Range<u64>) {
            fadvise(&self.file, 0, None, Advice::Random).unwrap();
            let mut out = vec![0; (range.end - range.start) as usize];
            self.file.read_exact_at(&mut out, range.start).unwrap();
        }

        fn pass(&self, range: Range<u64>) {
            let Sample { file, ways, brought, .. } = self;
            let mut out = vec![0; (range.end - range.start) as usize];
            let read = || ways.read_alone(file, &mut out, range.start);
            brought.passing(ways, file, &range, read).unwrap();
            assert!(out.iter().all(|byte| *byte == 7));
        }

        fn keep(&self, range: Range<u64>) {
            self.brought.keep(&self.ways, &self.file, &range);
            self.others_read(&range);
        }

        /// What the page cache has.
        fn there(&self) -> Vec<Range<u64>> {
            let missing = self.ways.uncached(&self.file, &(0..SIZE)).unwrap();
            missing.into_iter().collect::<RangeSet<u64>>().gaps(&(0..SIZE)).collect()
        }
    }

    #[test]
    fn what_was_there_stays_and_the_rest_is_let_go_of_as_it_is_read() {
        let (sample, page) = (Sample::new(), page_size() as u64);
        let before = [page..3 * page, 700 * page..701 * page];
        before.iter().for_each(|range| sample.others_read(range));
        // As blocks begin behind a header, in no order.
        for block in [3, 0, 1, 2, 6, 5, 4] {
            let start = 77 + block * TOGETHER;
            sample.pass(start..start + TOGETHER);
            let there = sample.there().iter().map(|range| range.end - range.start).sum::<u64>();
            assert!(there <= 4 * page + 7 * 2 * page, "{there}");
        }
        // The first page and the last were read in part.
        let end = (77 + 7 * TOGETHER) / page * page;
        assert_eq!(sample.there(), [0..3 * page, 700 * page..701 * page, end..end + page]);
        sample.brought.let_go(&sample.file);
        assert_eq!(sample.there(), before);
    }

    #[test]
    fn what_others_have_read_since_stays() {
        let (sample, theirs) = (Sample::new(), 2 << 20..3 << 20);
        sample.pass(0..1 << 20);
        sample.others_read(&theirs);
        sample.pass(1 << 20..5 << 20);
        assert_eq!(sample.there(), std::slice::from_ref(&theirs));
        sample.brought.let_go(&sample.file);
        assert_eq!(sample.there(), [theirs]);
    }

    #[test]
    fn what_is_let_go_of_while_it_is_read_again_is_let_go_of_again() {
        let (sample, range) = (Sample::new(), 77..77 + TOGETHER);
        let read = || {
            sample.pass(range.clone());
            assert_eq!(sample.there().len(), 2, "pages that were read in part");
            sample.others_read(&range);
            Ok(())
        };
        let Sample { file, ways, brought, .. } = &sample;
        brought.passing(ways, file, &range, read).unwrap();
        brought.let_go(file);
        assert_eq!(sample.there(), []);
    }

    #[test]
    fn nothing_is_left_by_many_who_read_the_same() {
        let sample = Sample::new();
        let before = 300 * page_size() as u64..301 * page_size() as u64;
        sample.others_read(&before);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let sample = &sample;
                scope.spawn(move || {
                    for n in 0..100 {
                        let start = (n * 1_234_567 + thread * 7_654_321) % (SIZE - TOGETHER);
                        sample.pass(start..start + TOGETHER);
                    }
                });
            }
        });
        sample.brought.let_go(&sample.file);
        assert_eq!(sample.there(), [before]);
    }

    #[test]
    fn small_reads_are_let_go_of_together() {
        let (sample, page) = (Sample::new(), page_size() as u64);
        for n in 0..TOGETHER / page {
            assert_eq!(sample.there().len() as u64, n);
            sample.pass(n * 3 * page..(n * 3 + 1) * page);
        }
        assert_eq!(sample.there(), []);
    }

    #[test]
    fn what_is_kept_stays_until_all_is_let_go_of() {
        let (sample, page) = (Sample::new(), page_size() as u64);
        sample.others_read(&(5 * page..6 * page));
        sample.keep(4 * page..8 * page);
        sample.pass(1 << 20..3 << 20);
        // What lies behind it was asked about with it: the kernel reads ahead.
        sample.others_read(&(4 << 20..5 << 20));
        sample.keep(2 * page..10 * page);
        assert_eq!(sample.there(), [2 * page..10 * page, 4 << 20..5 << 20]);
        sample.brought.let_go(&sample.file);
        assert_eq!(sample.there(), std::slice::from_ref(&(5 * page..6 * page)));
    }
}
