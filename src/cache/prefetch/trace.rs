//! The order in which a virtual file is read, and following the order of an earlier load.
//!
//! In: each read of one virtual file, and perhaps the trace of an earlier load. Out: the trace so far, and the ranges
//! to fetch ahead because that load went on there. A pure state machine: it reads nothing, knows no clock and cannot
//! fail.
//!
//! Programs take the tensors of a model in an order of their own, and in the same one each time. Streams cannot
//! predict where the next tensor lies; the trace of the earlier load tells. A wrong guess costs little. Nothing is
//! fetched before reads are where that load was. The window starts small, and doubles while reads go on so. A trace
//! that reads do not follow is dropped.

use std::ops::Range;

/// Chunks are at least as long as small blocks.
const MIN_CHUNK_BYTES: u64 = 1 << 20;

/// The most chunks of a file, so that the number of one takes two bytes. Chunks of a file of more than 64 GiB are
/// longer than 1 MiB.
const MAX_CHUNK_COUNT: u64 = 1 << 16;

/// Less than this, or than half of the file, is no load.
const MIN_LOAD_BYTES: u64 = 64 << 20;

/// The first window.
const FIRST_WINDOW_BYTES: u64 = 4 << 20;

/// How far ahead of the cursor a read may be: threads never take turns in the same way twice.
const MAX_LOOKAHEAD_CHUNKS: usize = 64;

/// Chunks in a row that are in the trace, but further ahead, after which the trace is dropped.
const MAX_STRAY_CHUNKS: u32 = 8;

/// A virtual file divided into chunks of one length, but for the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkMap {
    pub file_bytes: u64,
    chunk_bytes: u64,
}

impl ChunkMap {
    pub fn new(file_bytes: u64) -> ChunkMap {
        let chunk_bytes = file_bytes.div_ceil(MAX_CHUNK_COUNT).next_power_of_two();
        ChunkMap { file_bytes, chunk_bytes: chunk_bytes.max(MIN_CHUNK_BYTES) }
    }

    pub fn count(self) -> usize {
        self.file_bytes.div_ceil(self.chunk_bytes) as usize
    }

    fn overlapping(self, range: &Range<u64>) -> Range<usize> {
        let end = range.end.min(self.file_bytes);
        (range.start / self.chunk_bytes) as usize..end.div_ceil(self.chunk_bytes) as usize
    }

    /// The bytes of some chunks, in their order; those that follow one another are one range.
    fn merged_ranges(self, chunks: impl Iterator<Item = usize>) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for start in chunks.map(|chunk| chunk as u64 * self.chunk_bytes) {
            let end = (start + self.chunk_bytes).min(self.file_bytes);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }

    /// The parts of a range that lie in certain chunks.
    fn matching_ranges(
        self,
        range: &Range<u64>,
        is_match: impl Fn(usize) -> bool,
    ) -> Vec<Range<u64>> {
        let matching = self.overlapping(range).filter(|&chunk| is_match(chunk));
        let parts = self.merged_ranges(matching).into_iter();
        parts.map(|part| part.start.max(range.start)..part.end.min(range.end)).collect()
    }
}

/// A set of chunks.
#[derive(Clone, Debug)]
pub struct ChunkSet(Box<[u64]>);

impl ChunkSet {
    pub fn new(chunks: ChunkMap) -> ChunkSet {
        ChunkSet(vec![0; chunks.count().div_ceil(64)].into())
    }

    /// Adds a chunk; whether it is new.
    pub fn insert(&mut self, chunk: usize) -> bool {
        let (word, bit) = (&mut self.0[chunk / 64], 1 << (chunk % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    fn contains(&self, chunk: usize) -> bool {
        self.0.get(chunk / 64).is_some_and(|word| word >> (chunk % 64) & 1 == 1)
    }
}

/// The order in which one open file is read. It takes 520 KiB at most, with a trace to follow.
#[derive(Debug)]
pub struct AccessTrace {
    chunks: ChunkMap,
    read_chunks: ChunkSet,
    /// The chunks in the order in which they were first read.
    recorded: Vec<u16>,
    read_bytes: u64,
    cursor: Option<TraceCursor>,
}

/// Where in the trace of an earlier load this load is.
#[derive(Debug)]
struct TraceCursor {
    trace: Vec<u16>,
    /// Where in the trace each chunk is, or [`NOT_IN_TRACE`].
    positions: Box<[u32]>,
    /// Behind the furthest chunk that was read.
    position: usize,
    /// Behind the last chunk that was fetched.
    prefetched: usize,
    window: u64,
    /// Chunks in a row that were read too far ahead.
    stray_count: u32,
}

const NOT_IN_TRACE: u32 = u32::MAX;

impl AccessTrace {
    /// Starts the trace of a file; `None` if the file is too small for one.
    pub fn new(file_bytes: u64) -> Option<AccessTrace> {
        let chunks = ChunkMap::new(file_bytes);
        let (read_chunks, recorded) = (ChunkSet::new(chunks), Vec::new());
        let trace = AccessTrace { chunks, read_chunks, recorded, read_bytes: 0, cursor: None };
        (file_bytes >= MIN_LOAD_BYTES).then_some(trace)
    }

    pub fn chunks(&self) -> ChunkMap {
        self.chunks
    }

    /// Follows an earlier trace, which has each chunk at most once, from where reads are by now.
    pub fn follow(&mut self, trace: Vec<u16>) {
        let mut positions = vec![NOT_IN_TRACE; self.chunks.count()];
        (0..).zip(&trace).for_each(|(position, &chunk)| positions[usize::from(chunk)] = position);
        let positions = positions.into();
        let (position, prefetched, window, stray_count) = Default::default();
        let mut cursor =
            TraceCursor { trace, positions, position, prefetched, window, stray_count };
        let is_followed = self.recorded.iter().all(|&chunk| cursor.advance(chunk));
        self.cursor = is_followed.then_some(cursor);
    }

    /// Records a read.
    pub fn record(&mut self, range: &Range<u64>) {
        self.read_bytes = self.read_bytes.saturating_add(range.end.saturating_sub(range.start));
        for chunk in self.chunks.overlapping(range) {
            if self.read_chunks.insert(chunk) {
                self.recorded.push(chunk as u16);
                self.cursor.take_if(|cursor| !cursor.advance(chunk as u16));
            }
        }
    }

    /// What to fetch ahead now, the next first. `max_window` bounds the bytes fetched ahead at once.
    pub fn next_ranges(&mut self, max_window: u64) -> Vec<Range<u64>> {
        let Some(cursor) = &mut self.cursor else { return Vec::new() };
        let next = cursor.next_positions(max_window, self.chunks.chunk_bytes);
        let next = cursor.trace[next].iter().map(|&chunk| usize::from(chunk));
        self.chunks.merged_ranges(next.filter(|&chunk| !self.read_chunks.contains(chunk)))
    }

    /// The parts of a range that the trace does not come to, for the stream of a reader that requests bytes from
    /// `request_start` on.
    ///
    /// While a trace is followed, these are bytes that the earlier load did not read, or that this load has passed. The
    /// trace has the rest fetched in its turn. It is the whole range for a reader far ahead of the cursor, since its
    /// turn may never come.
    pub fn outside_trace(&self, range: Range<u64>, request_start: u64) -> Vec<Range<u64>> {
        let chunk_bytes = self.chunks.chunk_bytes;
        let request = (request_start / chunk_bytes) as usize;
        let applies =
            |cursor: &&TraceCursor| cursor.is_active(chunk_bytes) && !cursor.is_far_ahead(request);
        let Some(cursor) = self.cursor.as_ref().filter(applies) else { return vec![range] };
        self.chunks.matching_ranges(&range, |chunk| !cursor.is_upcoming(chunk))
    }

    /// The trace so far, if what was read is a load.
    pub fn completed_load(&self) -> Option<&[u16]> {
        let bytes = self.recorded.len() as u64 * self.chunks.chunk_bytes;
        // A reader of small scattered ranges touches many chunks, of which nothing is to be fetched.
        let is_dense = self.read_bytes >= bytes / 2;
        let is_half = self.recorded.len() * 2 >= self.chunks.count();
        (is_dense && bytes >= MIN_LOAD_BYTES && is_half).then_some(&*self.recorded)
    }
}

impl TraceCursor {
    /// Whether reads are in the trace, which goes on, and the window has room for the next chunk.
    fn is_active(&self, chunk_bytes: u64) -> bool {
        (1..self.trace.len()).contains(&self.position) && self.window >= chunk_bytes
    }

    fn is_upcoming(&self, chunk: usize) -> bool {
        let position = self.positions[chunk];
        position != NOT_IN_TRACE && position as usize >= self.position
    }

    /// Whether much else comes before a chunk.
    fn is_far_ahead(&self, chunk: usize) -> bool {
        let position = self.positions.get(chunk).copied().unwrap_or(NOT_IN_TRACE);
        position != NOT_IN_TRACE && position as usize >= self.position + MAX_LOOKAHEAD_CHUNKS
    }

    /// Moves on to a chunk; whether the trace is still followed. A chunk that is not in the trace, or earlier in it,
    /// changes nothing.
    fn advance(&mut self, chunk: u16) -> bool {
        let position = self.positions[usize::from(chunk)];
        if position == NOT_IN_TRACE || (position as usize) < self.position {
            return true;
        }
        if position as usize - self.position < MAX_LOOKAHEAD_CHUNKS {
            self.position = position as usize + 1;
            self.stray_count = 0;
        } else {
            self.stray_count += 1;
        }
        self.stray_count < MAX_STRAY_CHUNKS
    }

    /// The positions to fetch now. None until a read was near the start of the trace, or while more than half of what
    /// was fetched is unread.
    fn next_positions(&mut self, max_window: u64, chunk_bytes: u64) -> Range<usize> {
        self.prefetched = self.prefetched.max(self.position);
        let unread_bytes = (self.prefetched - self.position) as u64 * chunk_bytes;
        if self.position == 0 || unread_bytes > self.window / 2 {
            return 0..0;
        }
        self.window = (self.window * 2).max(FIRST_WINDOW_BYTES).min(max_window);
        let end = (self.position + (self.window / chunk_bytes) as usize).min(self.trace.len());
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
    const MAX_WINDOW_BYTES: u64 = 32 * MIB;

    fn mib(n: u64) -> Range<u64> {
        n * MIB..(n + 1) * MIB
    }

    /// The chunks of tensors of 10 MiB each, in this order of tensors.
    fn tensors(trace: impl Iterator<Item = u64>) -> Vec<u16> {
        trace.flat_map(|tensor| (0..10).map(move |n| (tensor * 10 + n) as u16)).collect()
    }

    fn shuffled() -> Vec<u16> {
        tensors((0..40).map(|n| n * 7 % 40))
    }

    /// Reads chunks. Returns before which read each was fetched.
    fn load(trace: &mut AccessTrace, chunks: &[u16]) -> Vec<Option<usize>> {
        let mut fetched = vec![None; trace.chunks().count()];
        for (read, &chunk) in chunks.iter().enumerate() {
            trace.record(&mib(chunk.into()));
            for range in trace.next_ranges(MAX_WINDOW_BYTES) {
                for at in range.start / MIB..range.end / MIB {
                    assert_eq!(fetched[at as usize].replace(read), None, "fetched once");
                }
            }
        }
        fetched
    }

    #[test]
    fn a_repeated_load_is_prefetched_from_its_second_chunk_on() {
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        assert!(load(&mut trace, &shuffled()).iter().all(Option::is_none));
        let earlier = trace.completed_load().unwrap().to_vec();
        assert_eq!(earlier, shuffled());
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        trace.follow(earlier);
        let fetched = load(&mut trace, &shuffled());
        for (read, &chunk) in shuffled().iter().enumerate().skip(1) {
            let ahead = read - fetched[usize::from(chunk)].expect("fetched");
            assert!((1..=32).contains(&ahead), "{chunk}: {ahead}");
            assert!(read < 60 || ahead >= 16, "{chunk}: {ahead}");
        }
    }

    #[test]
    fn a_late_trace_is_followed_from_where_reads_are() {
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        load(&mut trace, &shuffled()[..100]);
        trace.follow(shuffled());
        trace.record(&mib(shuffled()[100].into()));
        let next = shuffled()[101];
        assert_eq!(trace.next_ranges(MAX_WINDOW_BYTES)[0].start, u64::from(next) * MIB);
    }

    #[test]
    fn threads_in_another_interleaving_still_follow() {
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        trace.follow(shuffled());
        let mut other = shuffled();
        other.chunks_mut(40).for_each(|some| some.rotate_left(20));
        let fetched = load(&mut trace, &other);
        assert!(fetched.iter().flatten().count() > 300, "{fetched:?}");
    }

    #[test]
    fn another_order_drops_the_trace_for_good() {
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        trace.follow(shuffled());
        let other: Vec<u16> =
            (0..=MAX_STRAY_CHUNKS as u16).map(|n| shuffled()[100 + usize::from(n)]).collect();
        assert!(load(&mut trace, &other).iter().all(Option::is_none));
        assert!(load(&mut trace, &shuffled()).iter().all(Option::is_none));
    }

    #[test]
    fn chunks_outside_the_trace_neither_follow_nor_stray() {
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        trace.follow(shuffled()[..200].to_vec());
        assert!(load(&mut trace, &shuffled()[200..]).iter().all(Option::is_none));
        let fetched = load(&mut trace, &shuffled()[..200]);
        assert_eq!(fetched.iter().flatten().count(), 199);
    }

    #[test]
    fn less_than_half_is_no_load_and_a_small_file_has_none() {
        assert!(AccessTrace::new(MIN_LOAD_BYTES - 1).is_none());
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        load(&mut trace, &shuffled()[..199]);
        assert_eq!(trace.completed_load(), None);
        trace.record(&mib(shuffled()[199].into()));
        assert!(trace.completed_load().is_some());
        let mut trace = AccessTrace::new(100 * MIB).unwrap();
        trace.record(&(0..63 * MIB));
        assert_eq!(trace.completed_load(), None);
        trace.record(&mib(63));
        assert_eq!(trace.completed_load().unwrap().len(), 64);
    }

    #[test]
    fn small_scattered_reads_are_no_load() {
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        (0..400).for_each(|n| trace.record(&(n * MIB..n * MIB + 4096)));
        assert_eq!(trace.completed_load(), None);
        (0..400).for_each(|n| trace.record(&(n * MIB + 4096..(n + 1) * MIB)));
        assert_eq!(trace.completed_load().unwrap().len(), 400);
    }

    #[test]
    fn chunks_of_large_files_are_longer_and_never_more() {
        for (size, count) in
            [(64 << 30, 1 << 16), ((64 << 30) + 1, (1 << 15) + 1), (1 << 40, 1 << 16)]
        {
            let mut trace = AccessTrace::new(size).unwrap();
            assert_eq!(trace.chunks().count(), count);
            trace.record(&(0..size));
            assert_eq!(trace.completed_load().unwrap().len(), count);
        }
    }

    #[test]
    fn streams_fetch_what_the_trace_does_not_come_to() {
        let mut trace = AccessTrace::new(400 * MIB).unwrap();
        let all = || 5 * MIB + 7..75 * MIB - 7;
        assert_eq!(trace.outside_trace(all(), 10 * MIB), [all()]);
        // Of the first hundred, the earlier load did not read thirty to forty.
        trace.follow((0..30).chain(40..100).collect());
        assert_eq!(
            trace.outside_trace(all(), 10 * MIB),
            [all()],
            "no read has followed the trace yet"
        );
        trace.record(&(10 * MIB..11 * MIB));
        trace.next_ranges(MIB - 1);
        assert_eq!(
            trace.outside_trace(all(), 10 * MIB),
            [all()],
            "the window has no room for a chunk"
        );
        trace.next_ranges(MAX_WINDOW_BYTES);
        // Chunks that were read before are included: a reader of them again needs readahead again.
        let read_before = 5 * MIB + 7..11 * MIB;
        assert_eq!(trace.outside_trace(all(), 10 * MIB), [read_before, 30 * MIB..40 * MIB]);
        assert_eq!(trace.outside_trace(all(), 90 * MIB), [all()], "its turn comes much later");
        trace.record(&(0..100 * MIB));
        assert_eq!(trace.outside_trace(all(), 10 * MIB), [all()], "it is over");
    }

    proptest! {
        #[test]
        fn prefetches_are_in_the_file_unread_and_bounded(
            earlier in Just((0..300u16).collect::<Vec<_>>()).prop_shuffle(),
            known in 0..300usize,
            reads in prop::collection::vec((0u64..600, 0u64..4), 1..400),
            follows in 0..400usize, max_window in 0..MAX_WINDOW_BYTES, ragged in 0..MIB,
        ) {
            let size = 299 * MIB + 1 + ragged;
            let mut trace = AccessTrace::new(size).unwrap();
            trace.follow(earlier[..known].to_vec());
            let (mut read_chunks, mut fetched) = (ChunkSet::new(trace.chunks()), ChunkSet::new(trace.chunks()));
            for (n, (at, len)) in reads.into_iter().enumerate() {
                // Some reads follow the trace, the others are anywhere, past the end too.
                let at = if n < follows { earlier.get(n).map_or(at, |&s| s.into()) } else { at };
                let range = at * MIB..(at + len).max(at) * MIB;
                trace.record(&range);
                for chunk in at..(at + len).min(300) {
                    read_chunks.insert(chunk as usize);
                }
                let ahead = trace.next_ranges(max_window);
                let bytes: u64 = ahead.iter().map(|range| range.end - range.start).sum();
                prop_assert!(bytes <= max_window, "{bytes}");
                for range in ahead {
                    prop_assert!(range.start < range.end && range.end <= size, "{range:?}");
                    for chunk in range.start / MIB..range.end.div_ceil(MIB) {
                        prop_assert!(!read_chunks.contains(chunk as usize) && fetched.insert(chunk as usize));
                    }
                }
                prop_assert!(trace.recorded.len() <= 300);
            }
        }
    }
}
