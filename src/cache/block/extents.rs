//! Which bytes the blocks of open virtual files have, those that are about to be filled among them. No two overlap.
//!
//! In: pieces that are wanted. Out: which blocks have them, and names for new ones that are to have the rest.
//! A pure structure.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::cache::block::table::{BlockId, BlockSource};
use crate::cache::io::reply::BlockPart;

/// Bytes of one file or tensor that are wanted.
#[derive(Clone, Debug)]
pub struct SourceRange {
    pub source: BlockSource,
    pub bytes: Range<u64>,
    /// From which byte of the answer.
    pub reply_offset: usize,
    /// What is read with them where no block has them: no more than fits into a buffer.
    pub block_bounds: Range<u64>,
}

/// Blocks, and which parts of each are wanted.
pub type BlockParts = Vec<(BlockId, Vec<BlockPart>)>;

#[derive(Debug, Default)]
pub struct ExtentIndex(BTreeSet<BlockId>);

impl ExtentIndex {
    /// The blocks that have all of the pieces; `None` if there is a byte that none has, or if they are more than
    /// so many.
    pub fn lookup(&self, served: u64, pieces: &[SourceRange], most: usize) -> Option<BlockParts> {
        let mut parts = Vec::new();
        for piece in pieces {
            let mut at = piece.bytes.start;
            while at < piece.bytes.end && parts.len() <= most {
                at = push_part(&mut parts, piece, at, self.block_at(served, piece, at).ok()?);
            }
        }
        (parts.len() <= most).then_some(parts)
    }

    /// Adds blocks for what none has of the pieces: these alone.
    pub fn insert_missing(&mut self, served: u64, pieces: &[SourceRange]) -> Vec<BlockId> {
        let mut new = Vec::new();
        for piece in pieces {
            let mut at = piece.bytes.start;
            while at < piece.bytes.end {
                let block = self.block_at(served, piece, at).unwrap_or_else(|block| {
                    self.0.insert(block);
                    new.push(block);
                    block
                });
                at = block.end;
            }
        }
        new
    }

    /// The blocks that have something of a piece.
    pub fn overlapping(&self, served: u64, piece: &SourceRange) -> impl Iterator<Item = BlockId> {
        self.blocks_in(served, piece.source, piece.bytes.clone())
    }

    /// It is there no more.
    pub fn remove(&mut self, block: BlockId) {
        self.0.remove(&block);
    }

    /// The block that has this byte of a piece, or one that is to have it.
    fn block_at(&self, served: u64, piece: &SourceRange, at: u64) -> Result<BlockId, BlockId> {
        let SourceRange { source: of, block_bounds: within, .. } = piece;
        let next = self.blocks_in(served, *of, at..within.end).next();
        if let Some(next) = next.filter(|next| next.start <= at) {
            return Ok(next);
        }
        let end = next.map_or(within.end, |next| next.start);
        let before = self.blocks_in(served, *of, within.start..at).last();
        let start = before.map_or(within.start, |before| before.end.max(within.start));
        Err(BlockId { file_id: served, source: *of, start, end })
    }

    fn blocks_in(
        &self,
        served: u64,
        of: BlockSource,
        range: Range<u64>,
    ) -> impl Iterator<Item = BlockId> {
        let at = |start| BlockId { file_id: served, source: of, start, end: 0 };
        let before = self.0.range(..at(range.start)).next_back();
        let before = before.filter(move |block| {
            (block.file_id, block.source) == (served, of) && block.end > range.start
        });
        before.into_iter().chain(self.0.range(at(range.start)..at(range.end))).copied()
    }
}

/// Adds what a block has of a piece from this byte on; which byte comes then.
fn push_part(parts: &mut BlockParts, piece: &SourceRange, at: u64, block: BlockId) -> u64 {
    let end = block.end.min(piece.bytes.end);
    let bytes = (at - block.start) as usize..(end - block.start) as usize;
    let part =
        BlockPart { reply_offset: piece.reply_offset + (at - piece.bytes.start) as usize, bytes };
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

    fn piece(file: u32, bytes: Range<u64>, within: Range<u64>) -> SourceRange {
        SourceRange {
            source: BlockSource::File(file),
            bytes,
            reply_offset: 0,
            block_bounds: within,
        }
    }

    #[test]
    fn what_is_there_is_used_and_the_rest_is_new() {
        let mut cover = ExtentIndex::default();
        let ranges = |blocks: &[BlockId]| -> Vec<_> {
            blocks.iter().map(|block| block.start..block.end).collect()
        };
        let new = cover.insert_missing(1, &[piece(0, 10..20, 10..20)]);
        let first = 10..20;
        assert_eq!(ranges(&new), [first]);
        // As much as may be, and no byte twice.
        let wanted = [piece(0, 5..25, 0..40)];
        let new = cover.insert_missing(1, &wanted);
        assert_eq!(ranges(&new), [0..10, 20..40]);
        assert!(cover.lookup(1, &wanted, 2).is_none());
        let parts = cover.lookup(1, &wanted, 3).unwrap();
        let wanted: Vec<_> = parts
            .iter()
            .flat_map(|(_, parts)| parts)
            .map(|p| (p.reply_offset, p.bytes.clone()))
            .collect();
        assert_eq!(wanted, [(0, 5..10), (5, 0..10), (15, 0..5)]);
        // Of another virtual file, or another file, nothing is there.
        assert!(cover.lookup(1, &[piece(0, 0..40, 0..40)], 9).is_some());
        assert!(cover.lookup(2, &[piece(0, 0..40, 0..40)], 9).is_none());
        assert!(cover.lookup(1, &[piece(1, 0..1, 0..1)], 9).is_none());
        cover.remove(new[0]);
        assert_eq!(cover.overlapping(1, &piece(0, 0..21, 0..21)).count(), 2);
        assert!(cover.lookup(1, &[piece(0, 9..11, 0..40)], 9).is_none());
    }

    proptest! {
        #[test]
        fn each_byte_that_is_wanted_has_one_place_in_one_block(
            reads in prop::collection::vec((0u64..1000, 1u64..100, 0u64..50, 0u64..50, 0usize..3), 1..60),
        ) {
            let mut cover = ExtentIndex::default();
            let mut all: Vec<BlockId> = Vec::new();
            for (start, len, before, after, gone) in reads {
                let bytes = start..start + len;
                let within = start.saturating_sub(before)..start + len + after;
                let wanted = piece(0, bytes.clone(), within.clone());
                let wanted = [wanted];
                let new = cover.insert_missing(7, &wanted);
                let parts = cover.lookup(7, &wanted, 1000).unwrap();
                prop_assert!(new.iter().all(|n| n.start >= within.start && n.end <= within.end));
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
                prop_assert_eq!(cover.insert_missing(7, &wanted), []);
                for _ in 0..gone.min(all.len()) {
                    cover.remove(all.remove(all.len() / 2));
                }
            }
        }
    }
}
