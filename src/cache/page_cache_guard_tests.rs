//! On real files: what was in the page cache before is there after, and nothing else.

use std::path::Path;

use rustix::fs::{Advice, fadvise};

use super::*;
use crate::source::{Links, Root};

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

    fn let_go(&self) {
        self.brought.let_go(&self.ways, &self.file);
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
        let _kept = self.brought.keep(&self.ways, &self.file, &range);
        self.others_read(&range);
    }

    /// What the page cache has.
    fn there(&self) -> Vec<Range<u64>> {
        let missing = self.ways.uncached(&self.file, &(0..SIZE)).unwrap();
        missing.into_iter().collect::<RangeSet<u64>>().gaps(&(0..SIZE)).collect()
    }
}

/// A system may let go of pages by itself, now and then: it is tried again where some are missing.
fn what_is_left(attempt: impl Fn() -> (Vec<Range<u64>>, Vec<Range<u64>>)) {
    for _ in 0..3 {
        let (left, expected) = attempt();
        if left == expected {
            return;
        }
        let expected: RangeSet<u64> = expected.into_iter().collect();
        assert!(left.iter().all(|left| expected.gaps(left).next().is_none()), "{left:?}");
    }
    panic!("what was there is let go of");
}

#[test]
fn what_was_there_stays_and_the_rest_is_let_go_of_as_it_is_read() {
    what_is_left(|| {
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
        let there: RangeSet<u64> = sample.there().into_iter().collect();
        assert!(there.iter().map(|range| range.end - range.start).sum::<u64>() <= 5 * page);
        assert!(there.contains(&0) && there.contains(&end), "{there:?}");
        sample.let_go();
        (sample.there(), before.into())
    });
}

#[test]
fn what_others_have_read_since_stays() {
    what_is_left(|| {
        let (sample, theirs) = (Sample::new(), 2 << 20..3 << 20);
        sample.pass(0..1 << 20);
        sample.others_read(&theirs);
        sample.pass(1 << 20..5 << 20);
        sample.let_go();
        (sample.there(), vec![theirs])
    });
}

#[test]
fn what_the_kernel_reads_ahead_from_pages_of_others_is_let_go_of() {
    what_is_left(|| {
        let sample = Sample::new();
        // As most others do.
        sample.file.read_exact_at(&mut vec![0; 256 << 10], 0).unwrap();
        let before = sample.there();
        for block in 0..4 {
            sample.pass(block * TOGETHER..(block + 1) * TOGETHER);
        }
        sample.let_go();
        (sample.there(), before)
    });
}

#[test]
fn what_is_let_go_of_while_it_is_read_again_is_let_go_of_again() {
    let (sample, range) = (Sample::new(), 77..77 + TOGETHER);
    let read = || {
        sample.pass(range.clone());
        assert!(sample.there().len() <= 2, "pages that were read in part");
        sample.others_read(&range);
        Ok(())
    };
    let Sample { file, ways, brought, .. } = &sample;
    brought.passing(ways, file, &range, read).unwrap();
    sample.let_go();
    assert_eq!(sample.there(), []);
}

#[test]
fn nothing_is_left_by_many_who_read_the_same() {
    what_is_left(|| {
        let sample = Sample::new();
        let before = 300 * page_size() as u64..301 * page_size() as u64;
        sample.others_read(&before);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let sample = &sample;
                scope.spawn(move || {
                    for n in 0..100 {
                        let start = (n * 1_234_567 + thread * 7_654_321) % (SIZE - TOGETHER);
                        if n % 10 == thread {
                            sample.keep(start..start + 100_000);
                        } else {
                            sample.pass(start..start + TOGETHER);
                        }
                    }
                });
            }
        });
        sample.let_go();
        (sample.there(), vec![before])
    });
}

#[test]
fn of_any_number_of_small_reads_nothing_is_left() {
    let (sample, page) = (Sample::new(), page_size() as u64);
    for round in 0..3 {
        for n in 0..SIZE / (2 * page) {
            sample.pass(n * 2 * page + 77..n * 2 * page + 78 + round);
        }
    }
    assert!(lock(&sample.brought.0).next.len() < (TOGETHER / page) as usize + AGAIN);
    sample.let_go();
    assert_eq!((sample.there(), lock(&sample.brought.0).ours.len()), (vec![], 0));
}

#[test]
fn what_would_be_too_much_to_remember_is_let_go_of_before() {
    let sample = Sample::new();
    for n in 0..MOST as u64 {
        lock(&sample.brought.0).ours.insert(2 * n..2 * n + 1);
    }
    sample.pass(0..2 * TOGETHER);
    assert_eq!(sample.there(), []);
    assert_eq!(lock(&sample.brought.0).ours.len(), 0);
}

#[test]
fn work_does_not_grow_with_what_others_hold_on_to() {
    let sample = Sample::new();
    for block in 0..SIZE / TOGETHER {
        sample.pass(block * TOGETHER + 77..((block + 1) * TOGETHER + 77).min(SIZE));
        let mut pages = lock(&sample.brought.0);
        // As if none of it had gone.
        pages.ours.insert(0..(block + 1) * TOGETHER);
        pages.passed.insert(0..(block + 1) * TOGETHER);
        pages.next.clear();
        pages.next.push((block + 1) * TOGETHER - 5..(block + 1) * TOGETHER - 3);
        let taken = pages.take_next();
        assert!(taken.iter().all(|taken| taken.end - taken.start <= page_size() as u64));
    }
}

#[test]
fn small_reads_are_let_go_of_together() {
    let (sample, page) = (Sample::new(), page_size() as u64);
    for n in 0..TOGETHER / page {
        assert!(n < 10 || !sample.there().is_empty());
        sample.pass(n * 3 * page..(n * 3 + 1) * page);
    }
    assert_eq!(sample.there(), []);
}

#[test]
fn what_is_kept_stays_until_all_is_let_go_of() {
    what_is_left(|| {
        let (sample, page) = (Sample::new(), page_size() as u64);
        sample.others_read(&(5 * page..6 * page));
        sample.keep(4 * page..8 * page);
        sample.pass(1 << 20..3 << 20);
        // What lies behind it was asked about with it: the kernel reads ahead.
        sample.others_read(&(4 << 20..5 << 20));
        sample.keep(2 * page..10 * page);
        let there: RangeSet<u64> = sample.there().into_iter().collect();
        assert!(there.contains(&(2 * page)) && there.contains(&(4 << 20)), "{there:?}");
        sample.let_go();
        let before = 5 * page..6 * page;
        (sample.there(), vec![before])
    });
}
