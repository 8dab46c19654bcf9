//! What to read before it is asked for.
//!
//! In: the range of each read of one image, whoever asked. Out: the range to fetch ahead, if any.
//! A pure state machine: it reads nothing, knows no clock and cannot fail.
//!
//! Reads that follow one another closely are a stream. Real loaders have several at once, from
//! several threads, and before them they touch the first page of every tensor, which is hundreds
//! of jumps. So a jump fetches nothing ahead, and a stream earns its window: each time half of what
//! was fetched for it is used up, the window doubles.

use std::ops::Range;

/// Streams recognised at once. A loader uses no more threads than this to read one file.
const STREAMS: usize = 8;

/// The first window of a stream.
const FIRST_WINDOW: u64 = 1 << 20;

/// How far a read may lie from where its stream is and still belong to it. The kernel reads around
/// a page fault, in requests that overtake one another.
const NEAR: u64 = 1 << 20;

/// Reads after which a stream that made none of them is taken to be over, and its share of the
/// memory goes to the others.
const FORGOTTEN: u64 = 512;

/// What a read turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Nothing that was read before leads to it.
    Jump,
    /// A step of a stream; the range to fetch ahead, if any.
    Step(Option<Range<u64>>),
}

#[derive(Debug, Default)]
pub struct Planner {
    streams: Vec<Stream>,
    reads: u64,
}

#[derive(Debug)]
struct Stream {
    /// The end of its furthest read.
    at: u64,
    /// The end of what was fetched for it.
    fetched: u64,
    window: u64,
    /// The number of its latest read.
    latest: u64,
}

impl Planner {
    /// Takes note of a read. `most` are the bytes that may be fetched ahead for all streams
    /// together, and `widest` those for one; the image ends at `end`.
    pub fn read(&mut self, range: &Range<u64>, end: u64, widest: u64, most: u64) -> Seen {
        self.reads += 1;
        let now = self.reads;
        let Some(n) = self.stream_of(range) else {
            self.begin(range);
            return Seen::Jump;
        };
        let alive = |stream: &&Stream| stream.window > 0 && stream.latest + FORGOTTEN > now;
        let share = most / (self.streams.iter().filter(alive).count().max(1) as u64);
        let stream = &mut self.streams[n];
        stream.latest = now;
        if range.end <= stream.at {
            return Seen::Step(None);
        }
        stream.at = range.end;
        let left = stream.fetched.saturating_sub(stream.at);
        if left > stream.window / 2 {
            return Seen::Step(None);
        }
        stream.window = (stream.window * 2).max(FIRST_WINDOW).min(widest).min(share);
        let fetch = stream.fetched.max(stream.at)..(stream.at + stream.window).min(end);
        if fetch.is_empty() {
            return Seen::Step(None);
        }
        stream.fetched = fetch.end;
        Seen::Step(Some(fetch))
    }

    /// The stream that a read belongs to: of those near it, the one that is nearest.
    fn stream_of(&self, range: &Range<u64>) -> Option<usize> {
        let near = |stream: &Stream| {
            range.end + NEAR >= stream.at && range.start <= stream.at.max(stream.fetched) + NEAR
        };
        let streams = self.streams.iter().enumerate().filter(|(_, stream)| near(stream));
        streams.min_by_key(|(_, stream)| stream.at.abs_diff(range.start)).map(|(n, _)| n)
    }

    fn begin(&mut self, range: &Range<u64>) {
        let stream = Stream { at: range.end, fetched: range.end, window: 0, latest: self.reads };
        if self.streams.len() < STREAMS {
            self.streams.push(stream);
        } else if let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.latest) {
            *oldest = stream;
        }
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

    fn fetched(seen: Seen) -> Option<Range<u64>> {
        match seen {
            Seen::Jump => None,
            Seen::Step(fetch) => fetch,
        }
    }

    fn step(planner: &mut Planner, at: u64, end: u64) -> Option<Range<u64>> {
        fetched(planner.read(&(at..at + STEP), end, WIDEST, MOST))
    }

    #[test]
    fn a_sequential_reader_is_never_caught_up_with_after_its_first_steps() {
        let (mut planner, end) = (Planner::default(), 512 * MIB);
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
        let mut planner = Planner::default();
        assert_eq!(step(&mut planner, 5 * MIB, MOST), None);
        assert!(step(&mut planner, 5 * MIB + STEP, MOST).is_some());
        for n in (0..100).rev() {
            assert_eq!(step(&mut planner, 5 * MIB + n % 2 * STEP, MOST), None);
        }
    }

    #[test]
    fn jumps_fetch_nothing() {
        let mut planner = Planner::default();
        for n in 0..1000 {
            let at = n * 11 * MIB;
            assert_eq!(planner.read(&(at..at + STEP), MOST * 64, WIDEST, MOST), Seen::Jump);
        }
    }

    #[test]
    fn streams_that_take_turns_are_told_apart_and_share_the_memory() {
        let mut planner = Planner::default();
        let mut fetched = [0; STREAMS];
        for n in 0..2000 {
            for (stream, fetched) in fetched.iter_mut().enumerate() {
                let start = stream as u64 * 1000 * MIB;
                let at = start + n * STEP;
                let read = at..at + STEP;
                if let Some(range) = self::fetched(planner.read(&read, MOST * 64, WIDEST, 64 * MIB))
                {
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
        let mut planner = Planner::default();
        let mut fetched = 0;
        for n in 0..800 {
            let at = (n ^ 3) * STEP;
            assert!(n < 8 || at + STEP <= fetched);
            fetched = step(&mut planner, at, MOST).map_or(fetched, |range| range.end);
        }
    }

    proptest! {
        #[test]
        fn whatever_is_read_what_is_fetched_is_ahead_and_within_bounds(
            reads in prop::collection::vec((0u64..400, 0u64..4 * MIB), 1..300),
            widest in 0..WIDEST, most in 0..4 * WIDEST,
        ) {
            let (mut planner, end) = (Planner::default(), 400 * MIB);
            for (at, len) in reads {
                let range = at * MIB..(at * MIB + len).min(end);
                if let Some(fetch) = fetched(planner.read(&range, end, widest, most)) {
                    prop_assert!(fetch.start >= range.end && fetch.end <= end && !fetch.is_empty());
                    prop_assert!(fetch.end - fetch.start <= widest.min(most));
                }
                prop_assert!(planner.streams.len() <= STREAMS);
            }
        }
    }
}
