//! With real files: what was cached before is cached afterwards, and nothing else.

use std::sync::Arc;

use rustix::fs::{Advice, fadvise};
use tempfile::TempDir;

use super::*;
use crate::source::file_reader::FileReader;
use crate::source::test_file;

const SIZE_BYTES: u64 = 8 << 20;

struct Sample {
    file: Arc<OpenFile>,
    reader: FileReader,
    guard: PageCacheGuard,
    _dir: TempDir,
}

impl Sample {
    /// A file of which nothing is cached.
    fn new() -> Sample {
        let (dir, file) = test_file::on_disk(&vec![7; SIZE_BYTES as usize]);
        test_file::sync(&dir);
        let file = Arc::new(file);
        let reader = FileReader::new(&file);
        let guard = reader.guard_reads();
        evict(&file, &(0..SIZE_BYTES));
        let sample = Sample { file, reader, guard, _dir: dir };
        assert_eq!(sample.cached_ranges(), []);
        sample
    }

    fn evict_all(&self) {
        self.guard.evict_all(&self.file);
    }

    /// Reads as another program does, without readahead.
    fn others_read(&self, range: &Range<u64>) {
        fadvise(self.file.descriptor().unwrap(), 0, None, Advice::Random).unwrap();
        let mut out = vec![0; (range.end - range.start) as usize];
        self.file.read_exact_at(&mut out, range.start).unwrap();
    }

    fn read_through(&self, range: Range<u64>) {
        let mut out = vec![0; (range.end - range.start) as usize];
        let read = || self.reader.read_without_readahead(&mut out, range.start);
        self.guard.read_through(&self.file, &range, read).unwrap();
        assert!(out.iter().all(|byte| *byte == 7));
    }

    fn retain(&self, range: Range<u64>) {
        let _active_read = self.guard.retain(&self.file, &range);
        self.others_read(&range);
    }

    fn cached_ranges(&self) -> Vec<Range<u64>> {
        let missing = uncached_ranges(&self.file, &(0..SIZE_BYTES)).unwrap();
        missing.into_iter().collect::<RangeSet<u64>>().gaps(&(0..SIZE_BYTES)).collect()
    }
}

/// The kernel may evict pages by itself now and then: an attempt after which expected pages are missing is repeated.
fn retry_after_chance_eviction(attempt: impl Fn() -> (Vec<Range<u64>>, Vec<Range<u64>>)) {
    for _ in 0..3 {
        let (cached, expected) = attempt();
        if cached == expected {
            return;
        }
        let expected: RangeSet<u64> = expected.into_iter().collect();
        let is_expected = |range: &Range<u64>| expected.gaps(range).next().is_none();
        assert!(cached.iter().all(is_expected), "{cached:?}");
    }
    panic!("pages that were cached before are evicted");
}

#[test]
fn pages_cached_before_stay_and_the_rest_is_evicted() {
    retry_after_chance_eviction(|| {
        let (sample, page) = (Sample::new(), page_size() as u64);
        let before = [page..3 * page, 700 * page..701 * page];
        before.iter().for_each(|range| sample.others_read(range));
        // Blocks begin behind a header, and come in any order.
        for block in [3, 0, 1, 2, 6, 5, 4] {
            let start = 77 + block * EVICT_BATCH_BYTES;
            sample.read_through(start..start + EVICT_BATCH_BYTES);
            let cached =
                sample.cached_ranges().iter().map(|range| range.end - range.start).sum::<u64>();
            assert!(cached <= 4 * page + 7 * 2 * page, "{cached}");
        }
        // The first page and the last were read in part.
        let end = (77 + 7 * EVICT_BATCH_BYTES) / page * page;
        let cached: RangeSet<u64> = sample.cached_ranges().into_iter().collect();
        assert!(cached.iter().map(|range| range.end - range.start).sum::<u64>() <= 5 * page);
        assert!(cached.contains(&0) && cached.contains(&end), "{cached:?}");
        sample.evict_all();
        (sample.cached_ranges(), before.into())
    });
}

#[test]
fn pages_that_others_read_meanwhile_stay() {
    retry_after_chance_eviction(|| {
        let (sample, theirs) = (Sample::new(), 2 << 20..3 << 20);
        sample.read_through(0..1 << 20);
        sample.others_read(&theirs);
        sample.read_through(1 << 20..5 << 20);
        sample.evict_all();
        (sample.cached_ranges(), vec![theirs])
    });
}

#[test]
fn readahead_from_pages_of_others_is_evicted() {
    retry_after_chance_eviction(|| {
        let sample = Sample::new();
        // With readahead, as most programs do.
        sample.file.read_exact_at(&mut vec![0; 256 << 10], 0).unwrap();
        let before = sample.cached_ranges();
        for block in 0..4 {
            sample.read_through(block * EVICT_BATCH_BYTES..(block + 1) * EVICT_BATCH_BYTES);
        }
        sample.evict_all();
        (sample.cached_ranges(), before)
    });
}

#[test]
fn pages_that_come_back_during_eviction_are_evicted_again() {
    let (sample, range) = (Sample::new(), 77..77 + EVICT_BATCH_BYTES);
    let read = || {
        sample.read_through(range.clone());
        assert!(sample.cached_ranges().len() <= 2, "pages that were read in part");
        sample.others_read(&range);
        Ok(())
    };
    sample.guard.read_through(&sample.file, &range, read).unwrap();
    sample.evict_all();
    assert_eq!(sample.cached_ranges(), []);
}

#[test]
fn concurrent_readers_of_one_file_leave_nothing() {
    retry_after_chance_eviction(|| {
        let sample = Sample::new();
        let before = 300 * page_size() as u64..301 * page_size() as u64;
        sample.others_read(&before);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let sample = &sample;
                scope.spawn(move || {
                    for n in 0..100 {
                        let start =
                            (n * 1_234_567 + thread * 7_654_321) % (SIZE_BYTES - EVICT_BATCH_BYTES);
                        if n % 10 == thread {
                            sample.retain(start..start + 100_000);
                        } else {
                            sample.read_through(start..start + EVICT_BATCH_BYTES);
                        }
                    }
                });
            }
        });
        sample.evict_all();
        (sample.cached_ranges(), vec![before])
    });
}

#[test]
fn many_small_reads_leave_nothing() {
    let (sample, page) = (Sample::new(), page_size() as u64);
    for round in 0..3 {
        for n in 0..SIZE_BYTES / (2 * page) {
            sample.read_through(n * 2 * page + 77..n * 2 * page + 78 + round);
        }
    }
    assert!(
        lock(&sample.guard.state).evict_queue.len()
            < (EVICT_BATCH_BYTES / page) as usize + MAX_RETRY_RANGE_COUNT
    );
    sample.evict_all();
    assert_eq!((sample.cached_ranges(), lock(&sample.guard.state).populated.len()), (vec![], 0));
}

#[test]
fn all_is_evicted_before_there_are_too_many_ranges() {
    let sample = Sample::new();
    for n in 0..MAX_RANGE_COUNT as u64 {
        lock(&sample.guard.state).populated.insert(2 * n..2 * n + 1);
    }
    sample.read_through(0..2 * EVICT_BATCH_BYTES);
    assert_eq!(sample.cached_ranges(), []);
    assert_eq!(lock(&sample.guard.state).populated.len(), 0);
}

#[test]
fn work_does_not_grow_with_pages_in_use_by_others() {
    let sample = Sample::new();
    for block in 0..SIZE_BYTES / EVICT_BATCH_BYTES {
        sample.read_through(
            block * EVICT_BATCH_BYTES + 77..((block + 1) * EVICT_BATCH_BYTES + 77).min(SIZE_BYTES),
        );
        let mut state = lock(&sample.guard.state);
        // As if nothing had been evicted.
        state.populated.insert(0..(block + 1) * EVICT_BATCH_BYTES);
        state.evictable.insert(0..(block + 1) * EVICT_BATCH_BYTES);
        state.evict_queue.clear();
        state
            .evict_queue
            .push((block + 1) * EVICT_BATCH_BYTES - 5..(block + 1) * EVICT_BATCH_BYTES - 3);
        let taken = state.take_evictable();
        assert!(taken.iter().all(|taken| taken.end - taken.start <= page_size() as u64));
    }
}

#[test]
fn small_reads_are_evicted_in_batches() {
    let (sample, page) = (Sample::new(), page_size() as u64);
    for n in 0..EVICT_BATCH_BYTES / page {
        assert!(n < 10 || !sample.cached_ranges().is_empty());
        sample.read_through(n * 3 * page..(n * 3 + 1) * page);
    }
    assert_eq!(sample.cached_ranges(), []);
}

#[test]
fn retained_pages_stay_until_all_is_evicted() {
    retry_after_chance_eviction(|| {
        let (sample, page) = (Sample::new(), page_size() as u64);
        sample.others_read(&(5 * page..6 * page));
        sample.retain(4 * page..8 * page);
        sample.read_through(1 << 20..3 << 20);
        // The range behind it belongs to the same query: the kernel reads ahead.
        sample.others_read(&(4 << 20..5 << 20));
        sample.retain(2 * page..10 * page);
        let cached: RangeSet<u64> = sample.cached_ranges().into_iter().collect();
        assert!(cached.contains(&(2 * page)) && cached.contains(&(4 << 20)), "{cached:?}");
        sample.evict_all();
        let before = 5 * page..6 * page;
        (sample.cached_ranges(), vec![before])
    });
}
