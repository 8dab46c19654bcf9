//! The readahead of typical readers, and the ranges delivered to them.

use std::slice;

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const STEP_BYTES: u64 = 128 << 10;
const MAX_WINDOW_BYTES: u64 = 32 * MIB;
const MAX_TOTAL_BYTES: u64 = 1 << 30;

/// What a read turns out to be, and what its stream does.
fn read_with(
    readahead: &mut Readahead,
    range: &Range<u64>,
    bounds: ReadBounds,
    delivered: &DeliveredRanges,
    max_window: u64,
    max_total: u64,
) -> (ReadPattern, StreamStep) {
    let pattern = readahead.classify(range, &bounds, delivered);
    (pattern, readahead.advance(range, &bounds, delivered, max_window, max_total))
}

/// The same where nothing was delivered before, with the usual limits.
fn read(
    readahead: &mut Readahead,
    range: Range<u64>,
    bounds: ReadBounds,
) -> (ReadPattern, StreamStep) {
    let nothing = DeliveredRanges::default();
    read_with(readahead, &range, bounds, &nothing, MAX_WINDOW_BYTES, MAX_TOTAL_BYTES)
}

fn fetched((_, step): (ReadPattern, StreamStep)) -> Option<Range<u64>> {
    step.prefetch
}

fn bounds(file_end: u64) -> ReadBounds {
    ReadBounds { tensor: None, file_end }
}

fn random() -> (ReadPattern, StreamStep) {
    let step = StreamStep { is_touch: true, ..StreamStep::default() };
    (ReadPattern { is_random: true, is_fault_around: false }, step)
}

fn step(readahead: &mut Readahead, at: u64, end: u64) -> Option<Range<u64>> {
    fetched(read(readahead, at..at + STEP_BYTES, bounds(end)))
}

#[test]
fn a_sequential_reader_never_waits_after_its_first_steps() {
    let (mut readahead, end) = (Readahead::new(MIB), 512 * MIB);
    let (mut fetched, mut max_window) = (STEP_BYTES, 0);
    for at in (0..end).step_by(STEP_BYTES as usize) {
        assert!(at <= 2 * STEP_BYTES || at + STEP_BYTES <= fetched, "{at} was not fetched");
        if let Some(range) = step(&mut readahead, at, end) {
            assert!(range.start == fetched.max(at + STEP_BYTES) && range.end <= end);
            max_window = max_window.max(range.end - at - STEP_BYTES);
            fetched = range.end;
        }
    }
    assert_eq!((fetched, max_window), (end, MAX_WINDOW_BYTES));
}

#[test]
fn rereads_prefetch_nothing() {
    let mut readahead = Readahead::new(MIB);
    assert_eq!(step(&mut readahead, 5 * MIB, MAX_TOTAL_BYTES), None);
    assert!(step(&mut readahead, 5 * MIB + STEP_BYTES, MAX_TOTAL_BYTES).is_some());
    for n in (0..100).rev() {
        assert_eq!(step(&mut readahead, 5 * MIB + n % 2 * STEP_BYTES, MAX_TOTAL_BYTES), None);
    }
}

#[test]
fn random_reads_prefetch_nothing() {
    let mut readahead = Readahead::new(MIB);
    for n in 0..1000 {
        let at = n * 11 * MIB;
        let seen = read(&mut readahead, at..at + STEP_BYTES, bounds(MAX_TOTAL_BYTES * 64));
        assert_eq!(seen, random());
    }
}

#[test]
fn small_scattered_reads_are_no_stream() {
    const PAGE_BYTES: u64 = 4096;
    for apart in [128 << 10, MIB, 4 * MIB] {
        let mut readahead = Readahead::new(MIB);
        for at in (0..1000).map(|n| n * apart) {
            let seen = read(&mut readahead, at..at + PAGE_BYTES, bounds(MAX_TOTAL_BYTES * 64));
            assert_eq!(seen, random());
        }
    }
    // Page by page they are one, even with small gaps.
    for apart in [PAGE_BYTES, 8 * PAGE_BYTES] {
        let mut readahead = Readahead::new(MIB);
        let read = |at| fetched(read(&mut readahead, at..at + PAGE_BYTES, bounds(MAX_TOTAL_BYTES)));
        assert!((0..1000).map(|n| n * apart).filter_map(read).last().is_some());
    }
}

#[test]
fn a_reader_that_comes_back_to_a_touched_tensor_is_noticed() {
    let tensor = 100 * MIB..110 * MIB;
    let resumes = |at: u64, delivered: &[Range<u64>]| {
        let mut known = DeliveredRanges::default();
        delivered.iter().for_each(|range| known.record(range));
        let bounds = ReadBounds { tensor: Some(tensor.clone()), file_end: MAX_TOTAL_BYTES };
        let range = at..at + STEP_BYTES;
        let (_, step) = read_with(
            &mut Readahead::new(MIB),
            &range,
            bounds,
            &known,
            MAX_WINDOW_BYTES,
            MAX_TOTAL_BYTES,
        );
        step.resumes_tensor
    };
    let start = 98 * MIB..102 * MIB;
    assert!(resumes(102 * MIB, slice::from_ref(&start)));
    assert!(!resumes(102 * MIB, &[]));
    assert!(!resumes(tensor.start, &[]));
    // So near the end it may be what the kernel reads around the first page of the next tensor, unless that was read.
    assert!(!resumes(108 * MIB, slice::from_ref(&start)));
    assert!(resumes(108 * MIB, &[start, 110 * MIB..114 * MIB]));
}

#[test]
fn interleaved_streams_are_told_apart_and_share_the_memory() {
    let mut readahead = Readahead::new(MIB);
    let mut fetched = [0; MAX_STREAMS];
    for n in 0..2000 {
        for (stream, fetched) in fetched.iter_mut().enumerate() {
            let start = stream as u64 * 1000 * MIB;
            let at = start + n * STEP_BYTES;
            let range = at..at + STEP_BYTES;
            if let Some(range) = self::fetched(read_with(
                &mut readahead,
                &range,
                bounds(MAX_TOTAL_BYTES * 64),
                &DeliveredRanges::default(),
                MAX_WINDOW_BYTES,
                64 * MIB,
            )) {
                assert!(range.end - range.start <= MAX_WINDOW_BYTES);
                assert!(n < 200 || range.end - at <= 9 * MIB, "an eighth of it each");
                *fetched = range.end - start;
            }
            assert!(n < 3 || (n + 1) * STEP_BYTES <= *fetched);
        }
    }
}

#[test]
fn requests_that_overtake_one_another_are_one_stream() {
    let mut readahead = Readahead::new(MIB);
    let mut fetched = 0;
    for n in 0..800 {
        let at = (n ^ 3) * STEP_BYTES;
        assert!(n < 8 || at + STEP_BYTES <= fetched);
        fetched = step(&mut readahead, at, MAX_TOTAL_BYTES).map_or(fetched, |range| range.end);
    }
}

/// Reads tensors of 20 MiB each from end to end, in this order. Returns how much was fetched.
fn tensors(order: impl Iterator<Item = u64>) -> u64 {
    let (mut readahead, mut bytes) = (Readahead::new(MIB), 0);
    for tensor in order {
        let (start, end) = (MIB + tensor * 20 * MIB, MIB + (tensor + 1) * 20 * MIB);
        for at in (start..end).step_by(STEP_BYTES as usize) {
            let bounds = ReadBounds { tensor: Some(start..end), file_end: MAX_TOTAL_BYTES };
            let fetch = fetched(read(&mut readahead, at..at + STEP_BYTES, bounds));
            assert!(
                at < start + 3 * STEP_BYTES
                    || fetch.as_ref().is_none_or(|f| f.end > at + STEP_BYTES)
            );
            bytes += fetch.map_or(0, |range| range.end - range.start);
        }
    }
    bytes
}

#[test]
fn tensors_in_order_prefetch_everything_and_others_little_behind_them() {
    let scattered = (0..20).map(|n| n * 7 % 20);
    assert!(tensors(scattered) < 20 * (20 * MIB + TENSOR_OVERRUN_BYTES));
    assert!(tensors(0..20) > 20 * 20 * MIB);
}

/// Touches pages so far apart, around each of which the kernel reads 8 MiB. Returns how much else was fetched.
fn touches(readahead: &mut Readahead, count: u64, apart: u64) -> u64 {
    let mut bytes = 0;
    for touched in 0..count {
        let around = touched * apart..touched * apart + FAULT_AROUND_BYTES;
        for at in around.clone().step_by(MIB as usize) {
            let bounds = ReadBounds {
                tensor: Some(touched * apart..(touched + 1) * apart),
                file_end: MAX_TOTAL_BYTES,
            };
            let fetch = fetched(read(readahead, at..at + MIB, bounds));
            bytes += fetch.map_or(0, |fetch| fetch.end.saturating_sub(around.end.max(fetch.start)));
        }
    }
    bytes
}

#[test]
fn readers_that_only_touch_pages_prefetch_little() {
    let (mut readahead, apart) = (Readahead::new(MIB), 20 * MIB);
    assert!(
        touches(&mut readahead, 16, apart)
            < 16 * (apart - FAULT_AROUND_BYTES + TENSOR_OVERRUN_BYTES)
    );
    assert_eq!(touches(&mut readahead, 100, apart), 0);
    // A reader that continues is read ahead of again.
    let mut last = None;
    for at in (0..apart).step_by(MIB as usize) {
        let bounds = ReadBounds { tensor: Some(0..apart), file_end: MAX_TOTAL_BYTES };
        last = fetched(read(&mut readahead, at..at + MIB, bounds)).or(last);
    }
    assert!(last.as_ref().is_some_and(|fetch| fetch.end >= apart), "{last:?}");
}

#[test]
fn fault_around_is_told_from_sequential_reads() {
    let (mut readahead, apart) = (Readahead::new(MIB), 20 * MIB);
    let mut is_around = |at: u64| {
        let tensor = at / apart * apart;
        let bounds = ReadBounds { tensor: Some(tensor..tensor + apart), file_end: MAX_TOTAL_BYTES };
        read(&mut readahead, at..at + MIB, bounds).0.is_fault_around
    };
    for tensor in 0..10 {
        assert!(
            (0..FAULT_AROUND_BYTES).step_by(MIB as usize).all(|at| is_around(tensor * apart + at))
        );
    }
    assert!(
        (9 * apart + FAULT_AROUND_BYTES..10 * apart).step_by(MIB as usize).all(|at| !is_around(at))
    );
    // A reader in the middle of a tensor may wait for any of it.
    assert!(!is_around(10 * apart + 5 * MIB) && is_around(11 * apart + 15 * MIB));
    // A reader that begins at the start of the file reads all of it.
    let mut readahead = Readahead::new(MIB);
    let mut seen = |at, bounds| read(&mut readahead, at..at + MIB, bounds);
    assert!(!seen(0, bounds(MAX_TOTAL_BYTES)).0.is_fault_around);
    let tensor = || ReadBounds { tensor: Some(MIB..64 * MIB), file_end: MAX_TOTAL_BYTES };
    assert!((MIB..10 * MIB).step_by(MIB as usize).all(|at| !seen(at, tensor()).0.is_fault_around));
}

#[test]
fn touched_tensors_are_prefetched_from_one_to_the_next() {
    let (mut readahead, mut delivered) = (Readahead::new(MIB), DeliveredRanges::default());
    let apart = 20 * MIB;
    touches(&mut readahead, 40, apart);
    (0..40).for_each(|n| delivered.record(&(n * apart..n * apart + FAULT_AROUND_BYTES)));
    let mut fetched = DeliveredRanges::default();
    for at in (0..40 * apart).step_by(MIB as usize) {
        let range = at..at + MIB;
        if delivered.undelivered(&range).is_empty() {
            continue;
        }
        let tensor = at / apart * apart;
        let bounds = ReadBounds { tensor: Some(tensor..tensor + apart), file_end: MAX_TOTAL_BYTES };
        assert!(at < 2 * apart || fetched.undelivered(&range).is_empty(), "{at} was not fetched");
        let fetch = self::fetched(read_with(
            &mut readahead,
            &range,
            bounds,
            &delivered,
            MAX_WINDOW_BYTES,
            MAX_TOTAL_BYTES,
        ));
        delivered.record(&range);
        fetch.iter().for_each(|fetch| fetched.record(fetch));
    }
}

proptest! {
    #[test]
    fn prefetches_are_ahead_and_within_bounds(
        reads in prop::collection::vec((0u64..400, 0u64..4 * MIB, 0u64..500), 1..300),
        max_window in 0..MAX_WINDOW_BYTES, max_total in 0..4 * MAX_WINDOW_BYTES,
    ) {
        let (mut readahead, end) = (Readahead::new(MIB), 400 * MIB);
        let mut delivered = DeliveredRanges::default();
        for (at, len, tensor) in reads {
            let range = at * MIB..(at * MIB + len).min(end);
            let tensor = (tensor < 400).then_some(0..range.start.max(tensor * MIB) + 1);
            let bounds = ReadBounds { tensor, file_end: end };
            if let Some(fetch) = fetched(read_with(&mut readahead, &range, bounds, &delivered, max_window, max_total)) {
                prop_assert!(fetch.start >= range.end && fetch.end <= end && !fetch.is_empty());
                let left = delivered.undelivered(&fetch).into_iter().map(|left| left.end - left.start);
                prop_assert!(left.sum::<u64>() <= max_window.min(max_total));
            }
            delivered.record(&range);
            prop_assert!(readahead.streams.len() <= MAX_STREAMS);
        }
    }
}

#[test]
fn many_rereads_reset_the_delivered_ranges() {
    let mut delivered = DeliveredRanges::default();
    delivered.record(&(0..2 * REREAD_RESET_BYTES));
    for at in (0..REREAD_RESET_BYTES - MIB).step_by(MIB as usize) {
        delivered.record(&(at..at + MIB));
    }
    let unread = 2 * REREAD_RESET_BYTES..4 * REREAD_RESET_BYTES;
    assert_eq!(delivered.undelivered(&(0..4 * REREAD_RESET_BYTES)), [unread]);
    delivered.record(&(REREAD_RESET_BYTES - MIB..REREAD_RESET_BYTES));
    assert_eq!(
        delivered.undelivered(&(0..4 * REREAD_RESET_BYTES)),
        [0..REREAD_RESET_BYTES - MIB, REREAD_RESET_BYTES..4 * REREAD_RESET_BYTES]
    );
}

#[test]
fn pages_that_the_kernel_dropped_reset_nothing() {
    let mut delivered = DeliveredRanges::default();
    delivered.record(&(0..512 * MIB));
    for n in 0..200 {
        delivered.record(&(n * MIB..(n + 1) * MIB));
        delivered.record(&((512 + n) * MIB..(513 + n) * MIB));
    }
    assert_eq!(delivered.next_undelivered(0), 712 * MIB);
}

#[test]
fn gaps_are_undelivered_to_the_byte_unless_small() {
    let mut delivered = DeliveredRanges::default();
    delivered.record(&(MIB..2 * MIB));
    delivered.record(&(4 * MIB..5 * MIB));
    delivered.record(&(2 * MIB + MIN_GAP_BYTES - 1..3 * MIB));
    delivered.record(&(3 * MIB + MIN_GAP_BYTES..3 * MIB + MIN_GAP_BYTES + 1));
    let left = [
        7..MIB,
        3 * MIB..3 * MIB + MIN_GAP_BYTES,
        3 * MIB + MIN_GAP_BYTES + 1..4 * MIB,
        5 * MIB..6 * MIB,
    ];
    assert_eq!(delivered.undelivered(&(7..6 * MIB)), left);
    assert_eq!(delivered.undelivered(&(MIB..3 * MIB)), []);
}

#[test]
fn delivered_ranges_are_skipped() {
    let mut delivered = DeliveredRanges::default();
    assert_eq!(
        (delivered.next_undelivered(5), delivered.skip_undelivered(5, 300 * MIB)),
        (5, 300 * MIB + 5)
    );
    delivered.record(&(2 * MIB..500 * MIB));
    assert_eq!(
        (delivered.next_undelivered(MIB), delivered.next_undelivered(3 * MIB + 1)),
        (MIB, 500 * MIB)
    );
    assert_eq!(delivered.skip_undelivered(MIB, MIB), 2 * MIB);
    assert_eq!(delivered.skip_undelivered(MIB, MIB + 1), 500 * MIB + 1);
    assert_eq!(delivered.skip_undelivered(400 * MIB, 10 * MIB), 510 * MIB);
    assert_eq!(
        (delivered.next_undelivered(u64::MAX), delivered.skip_undelivered(u64::MAX, 1)),
        (u64::MAX, u64::MAX)
    );
}

proptest! {
    #[test]
    fn undelivered_bytes_are_those_that_no_read_had(
        reads in prop::collection::vec((0u64..200, 1u64..40, 0u64..6), 0..24),
    ) {
        const PAGE_BYTES: u64 = 16 << 10;
        let (mut delivered, mut pages) = (DeliveredRanges::default(), [false; 300]);
        for (start, len, from) in reads {
            delivered.record(&(start * PAGE_BYTES..(start + len) * PAGE_BYTES));
            pages[start as usize..(start + len) as usize].fill(true);
            let mut left = [false; 300];
            for range in delivered.undelivered(&(from * PAGE_BYTES..300 * PAGE_BYTES)) {
                prop_assert!(!range.is_empty());
                left[(range.start / PAGE_BYTES) as usize..(range.end / PAGE_BYTES) as usize].fill(true);
            }
            for n in from as usize..300 {
                let before = pages[..n].iter().rposition(|&read| read);
                let after = pages[n..].iter().position(|&read| read);
                let is_small_gap =
                    before.zip(after).is_some_and(|(before, after)| n + after - before <= 4);
                prop_assert_eq!(left[n], !pages[n] && !is_small_gap, "{}", n);
            }
            let bounds: Vec<_> = delivered.ranges.iter().collect();
            prop_assert!(bounds.windows(2).all(|two| two[1].0 - two[0].1 >= MIN_GAP_BYTES));
            let forward = delivered.skip_undelivered(from * PAGE_BYTES, 20 * PAGE_BYTES);
            let passed: u64 =
                delivered.undelivered(&(from * PAGE_BYTES..forward)).iter().map(|left| left.end - left.start).sum();
            prop_assert_eq!(passed, 20 * PAGE_BYTES);
        }
    }
}
