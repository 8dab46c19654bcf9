//! Which bytes the blocks of open virtual files hold, blocks that are about to be filled among them. No two overlap.
//!
//! In: the ranges of a read. Out: the blocks that hold them, and new blocks for the rest. A pure structure.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::cache::block::id::{BlockId, BlockPart, BlockParts, BlockSource, SourceRange};

#[derive(Debug, Default)]
pub struct ExtentIndex(BTreeSet<BlockId>);

impl ExtentIndex {
    /// Finds the blocks that hold all bytes of some ranges. `None` if no block holds one of the bytes, or if there are
    /// more blocks than `max_blocks`.
    pub fn lookup(
        &self,
        file_id: u64,
        ranges: &[SourceRange],
        max_blocks: usize,
    ) -> Option<BlockParts> {
        let mut parts = Vec::new();
        for range in ranges {
            let mut at = range.bytes.start;
            while at < range.bytes.end && parts.len() <= max_blocks {
                at = push_part(&mut parts, range, at, self.block_at(file_id, range, at).ok()?);
            }
        }
        (parts.len() <= max_blocks).then_some(parts)
    }

    /// Adds blocks for the bytes that no block holds, and returns these alone.
    pub fn insert_missing(&mut self, file_id: u64, ranges: &[SourceRange]) -> Vec<BlockId> {
        let mut new = Vec::new();
        for range in ranges {
            let mut at = range.bytes.start;
            while at < range.bytes.end {
                let block = self.block_at(file_id, range, at).unwrap_or_else(|block| {
                    self.0.insert(block);
                    new.push(block);
                    block
                });
                at = block.end;
            }
        }
        new
    }

    /// The blocks that hold any byte of a range.
    pub fn overlapping(&self, file_id: u64, range: &SourceRange) -> impl Iterator<Item = BlockId> {
        self.blocks_in(file_id, range.source, range.bytes.clone())
    }

    pub fn remove(&mut self, block: BlockId) {
        self.0.remove(&block);
    }

    /// The block that holds this byte of a range, or as an error the one that is missing for it.
    fn block_at(&self, file_id: u64, range: &SourceRange, at: u64) -> Result<BlockId, BlockId> {
        let SourceRange { source, block_bounds: bounds, .. } = range;
        let next = self.blocks_in(file_id, *source, at..bounds.end).next();
        if let Some(next) = next.filter(|next| next.start <= at) {
            return Ok(next);
        }
        let end = next.map_or(bounds.end, |next| next.start);
        let before = self.blocks_in(file_id, *source, bounds.start..at).last();
        let start = before.map_or(bounds.start, |before| before.end.max(bounds.start));
        Err(BlockId { file_id, source: *source, start, end })
    }

    fn blocks_in(
        &self,
        file_id: u64,
        source: BlockSource,
        range: Range<u64>,
    ) -> impl Iterator<Item = BlockId> {
        let from = |start| BlockId { file_id, source, start, end: 0 };
        let before = self.0.range(..from(range.start)).next_back();
        let before = before.filter(move |block| {
            (block.file_id, block.source) == (file_id, source) && block.end > range.start
        });
        before.into_iter().chain(self.0.range(from(range.start)..from(range.end))).copied()
    }
}

/// Adds the part of a range that a block holds from this byte on, and returns the byte behind it.
fn push_part(parts: &mut BlockParts, range: &SourceRange, at: u64, block: BlockId) -> u64 {
    let end = block.end.min(range.bytes.end);
    let bytes = (at - block.start) as usize..(end - block.start) as usize;
    let reply_offset = range.reply_offset + (at - range.bytes.start) as usize;
    let part = BlockPart { reply_offset, bytes };
    match parts.iter_mut().rev().find(|(known, _)| *known == block) {
        Some((_, known)) => known.push(part),
        None => parts.push((block, vec![part])),
    }
    end
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(file: u32, bytes: Range<u64>, block_bounds: Range<u64>) -> SourceRange {
        SourceRange { source: BlockSource::File(file), bytes, reply_offset: 0, block_bounds }
    }

    #[test]
    fn held_bytes_are_reused_and_the_rest_gets_new_blocks() {
        let mut index = ExtentIndex::default();
        let spans = |blocks: &[BlockId]| -> Vec<_> {
            blocks.iter().map(|block| block.start..block.end).collect()
        };
        let new = index.insert_missing(1, &[range(0, 10..20, 10..20)]);
        let first = 10..20;
        assert_eq!(spans(&new), [first]);
        // Up to the bounds, and no byte twice.
        let read = [range(0, 5..25, 0..40)];
        let new = index.insert_missing(1, &read);
        assert_eq!(spans(&new), [0..10, 20..40]);
        assert!(index.lookup(1, &read, 2).is_none());
        let parts = index.lookup(1, &read, 3).unwrap();
        let parts: Vec<_> = parts
            .iter()
            .flat_map(|(_, parts)| parts)
            .map(|part| (part.reply_offset, part.bytes.clone()))
            .collect();
        assert_eq!(parts, [(0, 5..10), (5, 0..10), (15, 0..5)]);
        // Nothing of another virtual file, or of another source.
        assert!(index.lookup(1, &[range(0, 0..40, 0..40)], 9).is_some());
        assert!(index.lookup(2, &[range(0, 0..40, 0..40)], 9).is_none());
        assert!(index.lookup(1, &[range(1, 0..1, 0..1)], 9).is_none());
        index.remove(new[0]);
        assert_eq!(index.overlapping(1, &range(0, 0..21, 0..21)).count(), 2);
        assert!(index.lookup(1, &[range(0, 9..11, 0..40)], 9).is_none());
    }

    proptest! {
        #[test]
        fn each_requested_byte_lies_in_one_block(
            reads in prop::collection::vec((0u64..1000, 1u64..100, 0u64..50, 0u64..50, 0usize..3), 1..60),
        ) {
            let mut index = ExtentIndex::default();
            let mut all: Vec<BlockId> = Vec::new();
            for (start, len, before, after, removed) in reads {
                let bytes = start..start + len;
                let bounds = start.saturating_sub(before)..start + len + after;
                let read = [range(0, bytes.clone(), bounds.clone())];
                let new = index.insert_missing(7, &read);
                let parts = index.lookup(7, &read, 1000).unwrap();
                prop_assert!(new.iter().all(|n| n.start >= bounds.start && n.end <= bounds.end));
                all.extend(&new);
                all.sort();
                prop_assert!(all.windows(2).all(|two| two[0].end <= two[1].start), "{all:?}");
                let mut at = 0;
                for (block, parts) in &parts {
                    prop_assert!(all.contains(block));
                    for part in parts {
                        prop_assert_eq!(part.reply_offset, at);
                        prop_assert_eq!(block.start + part.bytes.start as u64, start + at as u64);
                        prop_assert!(block.start + part.bytes.end as u64 <= block.end);
                        at += part.bytes.len();
                    }
                }
                prop_assert_eq!(at as u64, len);
                prop_assert_eq!(index.insert_missing(7, &read), []);
                for _ in 0..removed.min(all.len()) {
                    index.remove(all.remove(all.len() / 2));
                }
            }
        }
    }
}
