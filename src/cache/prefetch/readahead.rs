//! What to read before it is asked for.
//!
//! In: the range of each read of one virtual file, whoever asked, the tensor that it begins in, and what readers were
//! given so far. Out: the range to fetch ahead, if any, and whether a reader comes to a tensor. A pure state machine:
//! it reads nothing, knows no clock and cannot fail.
//!
//! Reads that follow one another closely are a stream. Real loaders have several at once, from
//! several threads, and before them they touch the first page of every tensor, which is hundreds
//! of jumps. So a jump fetches nothing ahead, and a stream earns its window: each time half of what
//! was fetched for it is used up, the window doubles.
//!
//! Loaders take tensors in the order of their names, or of their own, which is seldom that of the
//! file. So a stream that began in a tensor fetches not much more than that tensor, until it is seen
//! to go on behind it.
//!
//! What was given is not read again: a stream goes on where it meets something that was not.
//!
//! What the kernel reads around a page that is touched looks like the first steps of a stream. Where readers only
//! touch and go elsewhere, what lies further is not fetched until one of them goes on to it.

use std::cmp::Reverse;
use std::ops::Range;

use crate::cache::prefetch::delivered::DeliveredRanges;

/// Streams recognised at once. A loader uses no more threads than this to read one file.
const MAX_STREAMS: usize = 8;

/// The first window of a stream.
const FIRST_WINDOW_BYTES: u64 = 1 << 20;

/// How far a read may lie from where its stream is and still belong to it. The kernel reads around
/// a page fault, in requests that overtake one another.
const MAX_BACKWARD_BYTES: u64 = 1 << 20;

/// How far a read may lie beyond the furthest one of its stream: whoever leaves out more has jumped, also if
/// it is to where the stream has been fetched ahead.
const MAX_SKIP_BYTES: u64 = 4 << 20;

/// Both as a multiple of what is read, at the most: the kernel asks in small requests for what it reads close by, and
/// who reads a little here and there wants nothing of what lies between.
const MAX_SKIP_RATIO: u64 = 16;

/// What the kernel reads around a page that is touched, at the most: a stream that got no further touched it and
/// no more.
const FAULT_AROUND_BYTES: u64 = 8 << 20;

/// How many of the latest streams tell whether readers only touch, and how many of those must have. Those before
/// the first are taken to have: to fetch for nothing costs more than to wait once.
const TOUCH_HISTORY_STREAMS: u32 = 8;
const MIN_TOUCHED_STREAMS: u32 = 3;

/// How far behind the end of its tensor a stream fetches, and the kernel reads by itself: around a
/// page fault it asks for as much as it may read ahead.
const TENSOR_OVERRUN_BYTES: u64 = 4 << 20;

/// Reads after which a stream that made none of them is taken to be over, and its share of the
/// memory goes to the others.
const STREAM_EXPIRY_READS: u64 = 512;

/// How much further before a page that is touched the kernel may begin to read than it reads behind it.
const FAULT_SLACK_BYTES: u64 = 64 << 10;

/// The window of a stream that goes on before it grows for the first time.
const RESUMED_WINDOW_BYTES: u64 = 4 << 20;

/// What a read turned out to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadPattern {
    /// Nothing that was read before leads to it.
    pub is_jump: bool,
    /// The range to fetch ahead, if any.
    pub prefetch: Option<Range<u64>>,
    /// It is the first of a reader in its tensor, who does not only touch it.
    pub enters_tensor: bool,
    /// It may be what the kernel reads around the first page of a tensor that is touched: where that page is not in it,
    /// nobody waits for it yet.
    pub is_fault_around: bool,
}

#[derive(Debug)]
pub struct Readahead {
    streams: Vec<ReadStream>,
    read_count: u64,
    /// A bit for each of the latest streams that are over: whether it only touched.
    touch_history: u32,
}

#[derive(Debug)]
struct ReadStream {
    /// Where it began.
    start: u64,
    /// The end of its furthest read.
    end: u64,
    /// The end of what was fetched for it.
    prefetched_end: u64,
    window: u64,
    /// Where what it fetches ends as long as it is not known to go further.
    tensor_bound: u64,
    /// Where it ends then.
    next_bound: u64,
    /// The number of its latest read.
    last_read: u64,
    /// It began in the middle of a tensor whose beginning was given.
    is_resumed: bool,
    /// It began so near before a tensor that it may be what the kernel reads around that tensor's first page.
    is_near_tensor: bool,
    /// Where the furthest tensor begins that it came to.
    entered_tensor: Option<u64>,
}

/// Where to stop.
#[derive(Clone, Debug)]
pub struct ReadBounds {
    /// The tensor that the read begins in, if it begins in one.
    pub tensor: Option<Range<u64>>,
    /// The end of the virtual file.
    pub file_end: u64,
}

impl Default for Readahead {
    fn default() -> Self {
        Readahead {
            streams: Vec::new(),
            read_count: 0,
            touch_history: (1 << TOUCH_HISTORY_STREAMS) - 1,
        }
    }
}

impl Readahead {
    /// Takes note of a read, with what was given before it. `most` are the bytes that may be fetched ahead for all streams
    /// together, and `widest` those for one.
    pub fn classify(
        &mut self,
        range: &Range<u64>,
        ends: ReadBounds,
        given: &DeliveredRanges,
        widest: u64,
        most: u64,
    ) -> ReadPattern {
        self.read_count += 1;
        let now = self.read_count;
        let (n, is_jump) = match self.find_stream(range, given) {
            Some(n) => (n, false),
            None => (self.start_stream(range, &ends, given), true),
        };
        let only_touch = self.are_readers_touching();
        let alive = |stream: &&ReadStream| {
            stream.window > 0 && stream.last_read + STREAM_EXPIRY_READS > now
        };
        let share = most / (self.streams.iter().filter(alive).count().max(1) as u64);
        let stream = &mut self.streams[n];
        stream.last_read = now;
        let comes = stream.enter_tensor(&ends, only_touch);
        let ahead = match is_jump {
            true => None,
            false => stream.advance(range, given, widest.min(share), ends.file_end),
        };
        let is_around = stream.is_near_tensor && !stream.is_sequential();
        ReadPattern { is_jump, prefetch: ahead, enters_tensor: comes, is_fault_around: is_around }
    }

    /// Whether readers only touch, as far as is known.
    fn are_readers_touching(&self) -> bool {
        self.touch_history.count_ones() >= MIN_TOUCHED_STREAMS
    }

    /// The stream that a read belongs to: of those near it the one that is nearest, and of several the one that
    /// was read last.
    fn find_stream(&self, range: &Range<u64>, given: &DeliveredRanges) -> Option<usize> {
        let stride = (range.end - range.start).saturating_mul(MAX_SKIP_RATIO);
        let near = |(n, stream): (usize, &ReadStream)| {
            let next = given.next_undelivered(stream.end).max(stream.end);
            let is_near = range.end + MAX_BACKWARD_BYTES.min(stride) >= stream.end
                && range.start <= next + MAX_SKIP_BYTES.min(stride);
            let apart = stream.end.abs_diff(range.start).min(next.abs_diff(range.start));
            is_near.then_some((apart, Reverse(stream.last_read), n))
        };
        self.streams.iter().enumerate().filter_map(near).min().map(|(.., n)| n)
    }

    /// A stream that begins with this read, in the place of the oldest if there are enough.
    fn start_stream(
        &mut self,
        range: &Range<u64>,
        ends: &ReadBounds,
        given: &DeliveredRanges,
    ) -> usize {
        let (start, at, latest) = (range.start, range.end, self.read_count);
        // What is read before the first tensor is read from the start: all of it is wanted.
        let tensor =
            ends.tensor.as_ref().map_or(u64::MAX, |t| t.end.saturating_add(TENSOR_OVERRUN_BYTES));
        let goes_on = ends.tensor.as_ref().is_some_and(|tensor| {
            given.next_undelivered(tensor.start) > tensor.start
                && start + TENSOR_OVERRUN_BYTES + FAULT_SLACK_BYTES < tensor.end
        });
        let may_touch = ends.tensor.is_some() && self.are_readers_touching() && !goes_on;
        let (bound, beyond) = if may_touch {
            ((start + FAULT_AROUND_BYTES).min(tensor), tensor)
        } else {
            (tensor, u64::MAX)
        };
        let window = if goes_on { RESUMED_WINDOW_BYTES } else { 0 };
        let begins_near =
            |tensor: &Range<u64>| tensor.start == start || tensor.end < start + FAULT_AROUND_BYTES;
        let is_near_tensor = may_touch && ends.tensor.as_ref().is_some_and(begins_near);
        let came = None;
        let stream = ReadStream {
            start,
            end: at,
            prefetched_end: at,
            window,
            tensor_bound: bound,
            next_bound: beyond,
            last_read: latest,
            is_resumed: goes_on,
            is_near_tensor,
            entered_tensor: came,
        };
        if self.streams.len() < MAX_STREAMS {
            self.streams.push(stream);
            return self.streams.len() - 1;
        }
        let oldest =
            (0..MAX_STREAMS).min_by_key(|&n| self.streams[n].last_read).unwrap_or_default();
        let has_touched = u32::from(!self.streams[oldest].is_sequential());
        self.touch_history =
            (self.touch_history << 1 | has_touched) & ((1 << TOUCH_HISTORY_STREAMS) - 1);
        self.streams[oldest] = stream;
        oldest
    }
}

impl ReadStream {
    /// Goes on to a read; what to fetch then, with no more than this much ahead.
    fn advance(
        &mut self,
        range: &Range<u64>,
        given: &DeliveredRanges,
        widest: u64,
        virtual_file: u64,
    ) -> Option<Range<u64>> {
        if range.end <= self.end {
            return None;
        }
        self.end = range.end;
        while self.end > self.tensor_bound {
            self.tensor_bound = std::mem::replace(&mut self.next_bound, u64::MAX);
        }
        if self.prefetched_end > given.advance(self.end, self.window / 2) {
            return None;
        }
        self.window = (self.window * 2).max(FIRST_WINDOW_BYTES).min(widest);
        let end = given.advance(self.end, self.window).min(self.tensor_bound).min(virtual_file);
        let fetch = self.prefetched_end.max(self.end)..end;
        self.prefetched_end = self.prefetched_end.max(fetch.end);
        (!fetch.is_empty()).then_some(fetch)
    }

    /// Whether it did more than to touch something.
    fn is_sequential(&self) -> bool {
        self.is_resumed || self.end > self.start + FAULT_AROUND_BYTES
    }

    /// Whether it comes to a tensor with this read.
    fn enter_tensor(&mut self, ends: &ReadBounds, only_touch: bool) -> bool {
        let Some(tensor) = &ends.tensor else { return false };
        let may_come = !only_touch || self.is_sequential();
        let comes = may_come && self.entered_tensor.is_none_or(|came| came < tensor.start);
        if comes {
            self.entered_tensor = Some(tensor.start);
        }
        comes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const STEP: u64 = 128 << 10;
    const WIDEST: u64 = 32 * MIB;
    const MOST: u64 = 1 << 30;

    fn fetched(seen: ReadPattern) -> Option<Range<u64>> {
        seen.prefetch
    }

    fn ends(virtual_file: u64) -> ReadBounds {
        ReadBounds { tensor: None, file_end: virtual_file }
    }

    fn nothing() -> DeliveredRanges {
        DeliveredRanges::default()
    }

    fn step(planner: &mut Readahead, at: u64, end: u64) -> Option<Range<u64>> {
        fetched(planner.classify(&(at..at + STEP), ends(end), &nothing(), WIDEST, MOST))
    }

    #[test]
    fn a_sequential_reader_is_never_caught_up_with_after_its_first_steps() {
        let (mut planner, end) = (Readahead::default(), 512 * MIB);
        let (mut fetched, mut widest) = (STEP, 0);
        for at in (0..end).step_by(STEP as usize) {
            assert!(at <= 2 * STEP || at + STEP <= fetched, "{at} was not fetched");
            if let Some(range) = step(&mut planner, at, end) {
                assert!(range.start == fetched.max(at + STEP) && range.end <= end);
                widest = widest.max(range.end - at - STEP);
                fetched = range.end;
            }
        }
        assert_eq!((fetched, widest), (end, WIDEST));
    }

    #[test]
    fn what_is_read_again_fetches_nothing() {
        let mut planner = Readahead::default();
        assert_eq!(step(&mut planner, 5 * MIB, MOST), None);
        assert!(step(&mut planner, 5 * MIB + STEP, MOST).is_some());
        for n in (0..100).rev() {
            assert_eq!(step(&mut planner, 5 * MIB + n % 2 * STEP, MOST), None);
        }
    }

    #[test]
    fn jumps_fetch_nothing() {
        let mut planner = Readahead::default();
        for n in 0..1000 {
            let at = n * 11 * MIB;
            let seen =
                planner.classify(&(at..at + STEP), ends(MOST * 64), &nothing(), WIDEST, MOST);
            assert_eq!(seen, ReadPattern { is_jump: true, ..ReadPattern::default() });
        }
    }

    #[test]
    fn who_reads_a_little_here_and_there_is_no_stream() {
        const PAGE: u64 = 4096;
        for apart in [128 << 10, MIB, 4 * MIB] {
            let mut planner = Readahead::default();
            for at in (0..1000).map(|n| n * apart) {
                let seen =
                    planner.classify(&(at..at + PAGE), ends(MOST * 64), &nothing(), WIDEST, MOST);
                assert_eq!(seen, ReadPattern { is_jump: true, ..ReadPattern::default() });
            }
        }
        // But page by page it is one, and so is a little of it left out.
        for apart in [PAGE, 8 * PAGE] {
            let mut planner = Readahead::default();
            let read = |at| {
                fetched(planner.classify(&(at..at + PAGE), ends(MOST), &nothing(), WIDEST, MOST))
            };
            assert!((0..1000).map(|n| n * apart).filter_map(read).last().is_some());
        }
    }

    #[test]
    fn streams_that_take_turns_are_told_apart_and_share_the_memory() {
        let mut planner = Readahead::default();
        let mut fetched = [0; MAX_STREAMS];
        for n in 0..2000 {
            for (stream, fetched) in fetched.iter_mut().enumerate() {
                let start = stream as u64 * 1000 * MIB;
                let at = start + n * STEP;
                let read = at..at + STEP;
                if let Some(range) = self::fetched(planner.classify(
                    &read,
                    ends(MOST * 64),
                    &nothing(),
                    WIDEST,
                    64 * MIB,
                )) {
                    assert!(range.end - range.start <= WIDEST);
                    assert!(n < 200 || range.end - at <= 9 * MIB, "an eighth of it each");
                    *fetched = range.end - start;
                }
                assert!(n < 3 || (n + 1) * STEP <= *fetched);
            }
        }
    }

    #[test]
    fn requests_that_overtake_one_another_are_one_stream() {
        let mut planner = Readahead::default();
        let mut fetched = 0;
        for n in 0..800 {
            let at = (n ^ 3) * STEP;
            assert!(n < 8 || at + STEP <= fetched);
            fetched = step(&mut planner, at, MOST).map_or(fetched, |range| range.end);
        }
    }

    /// Reads tensors of 20 MiB each from end to end, in this order; how much was fetched.
    fn tensors(order: impl Iterator<Item = u64>) -> u64 {
        let (mut planner, mut bytes) = (Readahead::default(), 0);
        for tensor in order {
            let (start, end) = (MIB + tensor * 20 * MIB, MIB + (tensor + 1) * 20 * MIB);
            for at in (start..end).step_by(STEP as usize) {
                let ends = ReadBounds { tensor: Some(start..end), file_end: MOST };
                let fetch =
                    fetched(planner.classify(&(at..at + STEP), ends, &nothing(), WIDEST, MOST));
                assert!(at < start + 3 * STEP || fetch.as_ref().is_none_or(|f| f.end > at + STEP));
                bytes += fetch.map_or(0, |range| range.end - range.start);
            }
        }
        bytes
    }

    #[test]
    fn tensors_out_of_order_fetch_little_behind_them_and_those_in_order_all() {
        let scattered = (0..20).map(|n| n * 7 % 20);
        assert!(tensors(scattered) < 20 * (20 * MIB + TENSOR_OVERRUN_BYTES));
        assert!(tensors(0..20) > 20 * 20 * MIB);
    }

    /// Touches pages so far apart, as the kernel does: it reads 8 MiB around each. How much was fetched besides.
    fn touches(planner: &mut Readahead, count: u64, apart: u64) -> u64 {
        let mut bytes = 0;
        for touched in 0..count {
            let around = touched * apart..touched * apart + FAULT_AROUND_BYTES;
            for at in around.clone().step_by(MIB as usize) {
                let ends = ReadBounds {
                    tensor: Some(touched * apart..(touched + 1) * apart),
                    file_end: MOST,
                };
                let fetch =
                    fetched(planner.classify(&(at..at + MIB), ends, &nothing(), WIDEST, MOST));
                bytes +=
                    fetch.map_or(0, |fetch| fetch.end.saturating_sub(around.end.max(fetch.start)));
            }
        }
        bytes
    }

    #[test]
    fn where_pages_are_only_touched_little_is_fetched_behind_them() {
        let (mut planner, apart) = (Readahead::default(), 20 * MIB);
        assert!(
            touches(&mut planner, 16, apart)
                < 16 * (apart - FAULT_AROUND_BYTES + TENSOR_OVERRUN_BYTES)
        );
        assert_eq!(touches(&mut planner, 100, apart), 0);
        // Whoever then goes on is fetched for again.
        let mut last = None;
        for at in (0..apart).step_by(MIB as usize) {
            let ends = ReadBounds { tensor: Some(0..apart), file_end: MOST };
            last =
                fetched(planner.classify(&(at..at + MIB), ends, &nothing(), WIDEST, MOST)).or(last);
        }
        assert!(last.as_ref().is_some_and(|fetch| fetch.end >= apart), "{last:?}");
    }

    #[test]
    fn what_is_read_around_a_page_is_told_from_what_its_reader_goes_on_to() {
        let (mut planner, apart) = (Readahead::default(), 20 * MIB);
        let mut is_around = |at: u64| {
            let tensor = at / apart * apart;
            let ends = ReadBounds { tensor: Some(tensor..tensor + apart), file_end: MOST };
            planner.classify(&(at..at + MIB), ends, &nothing(), WIDEST, MOST).is_fault_around
        };
        for tensor in 0..10 {
            assert!(
                (0..FAULT_AROUND_BYTES)
                    .step_by(MIB as usize)
                    .all(|at| is_around(tensor * apart + at))
            );
        }
        assert!(
            (9 * apart + FAULT_AROUND_BYTES..10 * apart)
                .step_by(MIB as usize)
                .all(|at| !is_around(at))
        );
        // Who reads in the middle of a tensor may wait for any of it.
        assert!(!is_around(10 * apart + 5 * MIB) && is_around(11 * apart + 15 * MIB));
        // Who reads from the virtual file's start reads all of it.
        let mut planner = Readahead::default();
        let mut seen = |at, ends| planner.classify(&(at..at + MIB), ends, &nothing(), WIDEST, MOST);
        assert!(!seen(0, ends(MOST)).is_fault_around);
        let tensor = || ReadBounds { tensor: Some(MIB..64 * MIB), file_end: MOST };
        assert!(
            (MIB..10 * MIB).step_by(MIB as usize).all(|at| !seen(at, tensor()).is_fault_around)
        );
    }

    #[test]
    fn who_goes_through_tensors_that_were_touched_before_is_fetched_for_from_one_to_the_next() {
        let (mut planner, mut given) = (Readahead::default(), DeliveredRanges::default());
        let apart = 20 * MIB;
        touches(&mut planner, 40, apart);
        (0..40).for_each(|n| given.record(&(n * apart..n * apart + FAULT_AROUND_BYTES)));
        let mut fetched = DeliveredRanges::default();
        for at in (0..40 * apart).step_by(MIB as usize) {
            let read = at..at + MIB;
            if given.undelivered(&read).is_empty() {
                continue;
            }
            let tensor = at / apart * apart;
            let ends = ReadBounds { tensor: Some(tensor..tensor + apart), file_end: MOST };
            assert!(
                at < 2 * apart || fetched.undelivered(&read).is_empty(),
                "{at} was not fetched"
            );
            let fetch = self::fetched(planner.classify(&read, ends, &given, WIDEST, MOST));
            given.record(&read);
            fetch.iter().for_each(|fetch| fetched.record(fetch));
        }
    }

    proptest! {
        #[test]
        fn whatever_is_read_what_is_fetched_is_ahead_and_within_bounds(
            reads in prop::collection::vec((0u64..400, 0u64..4 * MIB, 0u64..500), 1..300),
            widest in 0..WIDEST, most in 0..4 * WIDEST,
        ) {
            let (mut planner, end) = (Readahead::default(), 400 * MIB);
            let mut given = DeliveredRanges::default();
            for (at, len, tensor) in reads {
                let range = at * MIB..(at * MIB + len).min(end);
                let tensor = (tensor < 400).then_some(0..range.start.max(tensor * MIB) + 1);
                let ends = ReadBounds { tensor, file_end: end };
                if let Some(fetch) = fetched(planner.classify(&range, ends, &given, widest, most)) {
                    prop_assert!(fetch.start >= range.end && fetch.end <= end && !fetch.is_empty());
                    let left = given.undelivered(&fetch).into_iter().map(|left| left.end - left.start);
                    prop_assert!(left.sum::<u64>() <= widest.min(most));
                }
                given.record(&range);
                prop_assert!(planner.streams.len() <= MAX_STREAMS);
            }
        }
    }
}
