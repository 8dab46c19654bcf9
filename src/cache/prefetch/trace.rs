//! The order in which the parts of a virtual file are first read, and following that of an earlier load.
//!
//! In: the range of each read of one virtual file, whoever asked, and perhaps the order of a load before. Out:
//! the order so far, and the ranges to fetch ahead because that load went on there.
//! A pure state machine, like `readahead`: it reads nothing, knows no clock and cannot fail.
//!
//! Programs take the tensors of a model in an order of their own, and in the same one each time. What
//! streams cannot foresee, where the next tensor lies, is known from the load before. A wrong guess costs
//! little: nothing is fetched before reads are where that load was, the window starts small and doubles as
//! they go on so, and an order that they do not follow is given up.

use std::ops::Range;

use crate::cache::prefetch::chunk_map::{ChunkMap, ChunkSet};

/// Stretches are at least as long as blocks are.
const MIN_CHUNK_BYTES: u64 = 1 << 20;

/// Stretches of a virtual file at the most, so that the number of one takes two bytes: those of a virtual file of
/// more than 64 GiB are longer.
const MAX_CHUNK_COUNT: u64 = 1 << 16;

/// Less than this, or than half of the virtual file, is nobody's load.
const MIN_LOAD_BYTES: u64 = 64 << 20;

/// The first window.
const FIRST_WINDOW_BYTES: u64 = 4 << 20;

/// How far in the order a read may be ahead of those before it: several threads never take turns in the
/// same way twice.
const MAX_LOOKAHEAD_CHUNKS: usize = 64;

/// Stretches in a row that are in the order, but not near where it is, after which it is given up.
const MAX_STRAY_CHUNKS: u32 = 8;

/// The stretches of a virtual file of so many bytes.
pub fn chunk_map(size: u64) -> ChunkMap {
    ChunkMap::new(size, MIN_CHUNK_BYTES, MAX_CHUNK_COUNT)
}

/// What is known of the order in which one open virtual file is read. At its largest, with an order to follow,
/// it takes 520 KiB.
#[derive(Debug)]
pub struct AccessTrace {
    chunks: ChunkMap,
    read_chunks: ChunkSet,
    /// The same in order.
    recorded: Vec<u16>,
    /// How much was read.
    read_bytes: u64,
    cursor: Option<TraceCursor>,
}

/// The order of an earlier load, and where in it this one is.
#[derive(Debug)]
struct TraceCursor {
    trace: Vec<u16>,
    /// Where in it each stretch is; [`NOWHERE`] if it is not.
    positions: Box<[u32]>,
    /// Behind the furthest that was read.
    position: usize,
    /// Behind the last that was fetched.
    prefetched: usize,
    window: u64,
    /// How many in a row strayed from it.
    stray_count: u32,
}

const NOT_IN_TRACE: u32 = u32::MAX;

impl AccessTrace {
    /// Of a virtual file of so many bytes; `None` if it is too small to be remembered.
    pub fn new(size: u64) -> Option<AccessTrace> {
        let stretches = chunk_map(size);
        let (asked, noted) = (ChunkSet::new(stretches), Vec::new());
        (size >= MIN_LOAD_BYTES).then_some(AccessTrace {
            chunks: stretches,
            read_chunks: asked,
            recorded: noted,
            read_bytes: 0,
            cursor: None,
        })
    }

    pub fn chunks(&self) -> ChunkMap {
        self.chunks
    }

    /// Follows an order, in which each stretch is at most once, from where reads are by now.
    pub fn follow(&mut self, order: Vec<u16>) {
        let mut places = vec![NOT_IN_TRACE; self.chunks.count()];
        (0..).zip(&order).for_each(|(place, &stretch)| places[usize::from(stretch)] = place);
        let places = places.into();
        let mut followed = TraceCursor {
            trace: order,
            positions: places,
            position: 0,
            prefetched: 0,
            window: 0,
            stray_count: 0,
        };
        let is_followed = self.recorded.iter().all(|&stretch| followed.advance(stretch));
        self.cursor = is_followed.then_some(followed);
    }

    /// Takes note of a read.
    pub fn record(&mut self, range: &Range<u64>) {
        self.read_bytes = self.read_bytes.saturating_add(range.end.saturating_sub(range.start));
        for stretch in self.chunks.overlapping(range) {
            if self.read_chunks.insert(stretch) {
                self.recorded.push(stretch as u16);
                self.cursor.take_if(|followed| !followed.advance(stretch as u16));
            }
        }
    }

    /// What to fetch ahead now, earliest first. `widest` are the bytes that may be fetched ahead at once.
    pub fn next_ranges(&mut self, widest: u64) -> Vec<Range<u64>> {
        let Some(followed) = &mut self.cursor else { return Vec::new() };
        let next = followed.next_positions(widest, self.chunks.chunk_bytes);
        let next = followed.trace[next].iter().map(|&stretch| usize::from(stretch));
        self.chunks.merged_ranges(next.filter(|&stretch| !self.read_chunks.contains(stretch)))
    }

    /// What is to be fetched of a range that a stream would read next, whose reader asked for something that begins
    /// there. While an order is followed that is what the load before did not read, or this one passed by: the rest is
    /// fetched in its turn. For a reader who is far ahead of the order its turn may never come.
    pub fn outside_trace(&self, range: Range<u64>, asked: u64) -> Vec<Range<u64>> {
        let length = self.chunks.chunk_bytes;
        let asked = (asked / length) as usize;
        let under_way =
            |followed: &&TraceCursor| followed.is_active(length) && !followed.is_far_ahead(asked);
        let Some(followed) = self.cursor.as_ref().filter(under_way) else { return vec![range] };
        let is_left = |stretch| !followed.is_upcoming(stretch);
        self.chunks.matching_ranges(&range, is_left)
    }

    /// The order so far, if that was a load.
    pub fn completed_load(&self) -> Option<&[u16]> {
        let bytes = self.recorded.len() as u64 * self.chunks.chunk_bytes;
        // Who reads a little here and there comes by many, and there is nothing to be fetched for them.
        let is_read = self.read_bytes >= bytes / 2;
        let is_load =
            is_read && bytes >= MIN_LOAD_BYTES && self.recorded.len() * 2 >= self.chunks.count();
        is_load.then_some(&*self.recorded)
    }
}

impl TraceCursor {
    /// Whether reads are where it is, it goes on, and there is room to fetch what comes next.
    fn is_active(&self, length: u64) -> bool {
        (1..self.trace.len()).contains(&self.position) && self.window >= length
    }

    fn is_upcoming(&self, stretch: usize) -> bool {
        let place = self.positions[stretch];
        place != NOT_IN_TRACE && place as usize >= self.position
    }

    /// Whether it comes to a stretch only when much else was read.
    fn is_far_ahead(&self, stretch: usize) -> bool {
        let place = self.positions.get(stretch).copied().unwrap_or(NOT_IN_TRACE);
        place != NOT_IN_TRACE && place as usize >= self.position + MAX_LOOKAHEAD_CHUNKS
    }

    /// Whether it is still followed after this stretch. One that is not in the order, or comes later than
    /// it did, says nothing.
    fn advance(&mut self, stretch: u16) -> bool {
        let place = self.positions[usize::from(stretch)];
        if place == NOT_IN_TRACE || (place as usize) < self.position {
            return true;
        }
        if place as usize - self.position < MAX_LOOKAHEAD_CHUNKS {
            self.position = place as usize + 1;
            self.stray_count = 0;
        } else {
            self.stray_count += 1;
        }
        self.stray_count < MAX_STRAY_CHUNKS
    }

    /// Which places of it to fetch now: none until a read was where it starts, or before half of what was
    /// fetched is used up.
    fn next_positions(&mut self, widest: u64, length: u64) -> Range<usize> {
        self.prefetched = self.prefetched.max(self.position);
        let left = (self.prefetched - self.position) as u64 * length;
        if self.position == 0 || left > self.window / 2 {
            return 0..0;
        }
        self.window = (self.window * 2).max(FIRST_WINDOW_BYTES).min(widest);
        let end = (self.position + (self.window / length) as usize).min(self.trace.len());
        let next = self.prefetched..end.max(self.prefetched);
        self.prefetched = next.end;
        next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const WIDEST: u64 = 32 * MIB;

    fn mib(n: u64) -> Range<u64> {
        n * MIB..(n + 1) * MIB
    }

    /// The stretches of tensors of 10 MiB each, in this order of tensors.
    fn tensors(order: impl Iterator<Item = u64>) -> Vec<u16> {
        order.flat_map(|tensor| (0..10).map(move |n| (tensor * 10 + n) as u16)).collect()
    }

    fn shuffled() -> Vec<u16> {
        tensors((0..40).map(|n| n * 7 % 40))
    }

    /// Reads stretches; which were fetched, each before which read.
    fn load(order: &mut AccessTrace, stretches: &[u16]) -> Vec<Option<usize>> {
        let mut fetched = vec![None; order.chunks().count()];
        for (read, &stretch) in stretches.iter().enumerate() {
            order.record(&mib(stretch.into()));
            for range in order.next_ranges(WIDEST) {
                for at in range.start / MIB..range.end / MIB {
                    assert_eq!(fetched[at as usize].replace(read), None, "fetched once");
                }
            }
        }
        fetched
    }

    #[test]
    fn a_load_like_the_one_before_is_fetched_ahead_of_from_its_second_stretch_on() {
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        assert!(load(&mut order, &shuffled()).iter().all(Option::is_none));
        let remembered = order.completed_load().unwrap().to_vec();
        assert_eq!(remembered, shuffled());
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        order.follow(remembered);
        let fetched = load(&mut order, &shuffled());
        for (read, &stretch) in shuffled().iter().enumerate().skip(1) {
            let ahead = read - fetched[usize::from(stretch)].expect("fetched");
            assert!((1..=32).contains(&ahead), "{stretch}: {ahead}");
            assert!(read < 60 || ahead >= 16, "{stretch}: {ahead}");
        }
    }

    #[test]
    fn an_order_that_comes_late_is_followed_from_where_reads_are() {
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        load(&mut order, &shuffled()[..100]);
        order.follow(shuffled());
        order.record(&mib(shuffled()[100].into()));
        let next = shuffled()[101];
        assert_eq!(order.next_ranges(WIDEST)[0].start, u64::from(next) * MIB);
    }

    #[test]
    fn threads_that_take_turns_in_another_way_still_follow() {
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        order.follow(shuffled());
        let mut other = shuffled();
        other.chunks_mut(40).for_each(|some| some.rotate_left(20));
        let fetched = load(&mut order, &other);
        assert!(fetched.iter().flatten().count() > 300, "{fetched:?}");
    }

    #[test]
    fn another_order_is_given_up_and_never_followed_again() {
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        order.follow(shuffled());
        let other: Vec<u16> =
            (0..=MAX_STRAY_CHUNKS as u16).map(|n| shuffled()[100 + usize::from(n)]).collect();
        assert!(load(&mut order, &other).iter().all(Option::is_none));
        assert!(load(&mut order, &shuffled()).iter().all(Option::is_none));
    }

    #[test]
    fn what_was_not_read_then_neither_follows_nor_strays() {
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        order.follow(shuffled()[..200].to_vec());
        assert!(load(&mut order, &shuffled()[200..]).iter().all(Option::is_none));
        let fetched = load(&mut order, &shuffled()[..200]);
        assert_eq!(fetched.iter().flatten().count(), 199);
    }

    #[test]
    fn less_than_half_is_no_load_and_a_small_virtual_file_none_at_all() {
        assert!(AccessTrace::new(MIN_LOAD_BYTES - 1).is_none());
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        load(&mut order, &shuffled()[..199]);
        assert_eq!(order.completed_load(), None);
        order.record(&mib(shuffled()[199].into()));
        assert!(order.completed_load().is_some());
        let mut order = AccessTrace::new(100 * MIB).unwrap();
        order.record(&(0..63 * MIB));
        assert_eq!(order.completed_load(), None);
        order.record(&mib(63));
        assert_eq!(order.completed_load().unwrap().len(), 64);
    }

    #[test]
    fn a_little_here_and_there_is_no_load() {
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        (0..400).for_each(|n| order.record(&(n * MIB..n * MIB + 4096)));
        assert_eq!(order.completed_load(), None);
        (0..400).for_each(|n| order.record(&(n * MIB + 4096..(n + 1) * MIB)));
        assert_eq!(order.completed_load().unwrap().len(), 400);
    }

    #[test]
    fn stretches_of_large_virtual_files_are_longer_and_never_more() {
        for (size, count) in
            [(64 << 30, 1 << 16), ((64 << 30) + 1, (1 << 15) + 1), (1 << 40, 1 << 16)]
        {
            let mut order = AccessTrace::new(size).unwrap();
            assert_eq!(order.chunks().count(), count);
            order.record(&(0..size));
            assert_eq!(order.completed_load().unwrap().len(), count);
        }
    }

    #[test]
    fn streams_fetch_what_the_order_does_not_come_to() {
        let mut order = AccessTrace::new(400 * MIB).unwrap();
        let all = || 5 * MIB + 7..75 * MIB - 7;
        assert_eq!(order.outside_trace(all(), 10 * MIB), [all()]);
        // Of the first hundred, thirty to forty were not read then.
        order.follow((0..30).chain(40..100).collect());
        assert_eq!(
            order.outside_trace(all(), 10 * MIB),
            [all()],
            "nothing says yet that it is followed"
        );
        order.record(&(10 * MIB..11 * MIB));
        order.next_ranges(MIB - 1);
        assert_eq!(
            order.outside_trace(all(), 10 * MIB),
            [all()],
            "there is no room to follow it with"
        );
        order.next_ranges(WIDEST);
        // Also what was read before: who reads it again has to be read ahead of again.
        let passed_by = 5 * MIB + 7..11 * MIB;
        assert_eq!(order.outside_trace(all(), 10 * MIB), [passed_by, 30 * MIB..40 * MIB]);
        assert_eq!(order.outside_trace(all(), 90 * MIB), [all()], "its turn comes much later");
        order.record(&(0..100 * MIB));
        assert_eq!(order.outside_trace(all(), 10 * MIB), [all()], "it is over");
    }

    proptest! {
        #[test]
        fn whatever_is_read_what_is_fetched_is_in_the_virtual_file_unread_and_bounded(
            remembered in Just((0..300u16).collect::<Vec<_>>()).prop_shuffle(),
            known in 0..300usize,
            reads in prop::collection::vec((0u64..600, 0u64..4), 1..400),
            follows in 0..400usize, widest in 0..WIDEST, ragged in 0..MIB,
        ) {
            let size = 299 * MIB + 1 + ragged;
            let mut order = AccessTrace::new(size).unwrap();
            order.follow(remembered[..known].to_vec());
            let (mut asked, mut fetched) = (ChunkSet::new(order.chunks()), ChunkSet::new(order.chunks()));
            for (n, (at, len)) in reads.into_iter().enumerate() {
                // Some reads go where the order does, the others anywhere, past the end too.
                let at = if n < follows { remembered.get(n).map_or(at, |&s| s.into()) } else { at };
                let range = at * MIB..(at + len).max(at) * MIB;
                order.record(&range);
                for stretch in at..(at + len).min(300) {
                    asked.insert(stretch as usize);
                }
                let ahead = order.next_ranges(widest);
                let bytes: u64 = ahead.iter().map(|range| range.end - range.start).sum();
                prop_assert!(bytes <= widest, "{bytes}");
                for range in ahead {
                    prop_assert!(range.start < range.end && range.end <= size, "{range:?}");
                    for stretch in range.start / MIB..range.end.div_ceil(MIB) {
                        prop_assert!(!asked.contains(stretch as usize) && fetched.insert(stretch as usize));
                    }
                }
                prop_assert!(order.recorded.len() <= 300);
            }
        }
    }
}
