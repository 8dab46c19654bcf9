//! A virtual file cut into stretches of one length, and sets of them.
//!
//! In: the size of a virtual file, and ranges of it. Out: which stretches they touch, and the bytes of some.

use std::ops::Range;

/// The stretches of a virtual file: all are of one length, but for the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkMap {
    /// The virtual file's size.
    pub size: u64,
    pub chunk_bytes: u64,
}

impl ChunkMap {
    /// At least so long, a power of two, and at most so many.
    pub fn new(size: u64, least: u64, most: u64) -> ChunkMap {
        ChunkMap { size, chunk_bytes: size.div_ceil(most).next_power_of_two().max(least) }
    }

    pub fn count(self) -> usize {
        self.size.div_ceil(self.chunk_bytes) as usize
    }

    /// Those that a range touches.
    pub fn overlapping(self, range: &Range<u64>) -> Range<usize> {
        let end = range.end.min(self.size);
        (range.start / self.chunk_bytes) as usize..end.div_ceil(self.chunk_bytes) as usize
    }

    /// The bytes of some, in their order; those that follow one another are one range.
    pub fn merged_ranges(self, of: impl Iterator<Item = usize>) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for stretch in of.map(|stretch| stretch as u64 * self.chunk_bytes) {
            let end = (stretch + self.chunk_bytes).min(self.size);
            match ranges.last_mut() {
                Some(last) if last.end == stretch => last.end = end,
                _ => ranges.push(stretch..end),
            }
        }
        ranges
    }

    /// What of a range lies in stretches that are left.
    pub fn matching_ranges(
        self,
        range: &Range<u64>,
        is_left: impl Fn(usize) -> bool,
    ) -> Vec<Range<u64>> {
        let left = self.merged_ranges(self.overlapping(range).filter(|&stretch| is_left(stretch)));
        left.into_iter().map(|left| left.start.max(range.start)..left.end.min(range.end)).collect()
    }
}

/// A set of stretches.
#[derive(Clone, Debug)]
pub struct ChunkSet(Box<[u64]>);

impl ChunkSet {
    pub fn new(stretches: ChunkMap) -> ChunkSet {
        ChunkSet(vec![0; stretches.count().div_ceil(64)].into())
    }

    /// Whether it was not in it; from now on it is.
    pub fn insert(&mut self, stretch: usize) -> bool {
        let (word, bit) = (&mut self.0[stretch / 64], 1 << (stretch % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    pub fn contains(&self, stretch: usize) -> bool {
        self.0.get(stretch / 64).is_some_and(|word| word >> (stretch % 64) & 1 == 1)
    }
}
