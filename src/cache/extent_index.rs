//! Which bytes the blocks of open images have, those that are about to be filled among them. No two overlap.
//!
//! In: pieces that are wanted. Out: which blocks have them, and names for new ones that are to have the rest.
//! A pure structure.

use std::collections::BTreeSet;
use std::ops::Range;

use super::block_table::{BlockId, Of};
use super::reply::Part;

/// Bytes of one file or tensor that are wanted.
#[derive(Clone, Debug)]
pub struct Piece {
    pub of: Of,
    pub bytes: Range<u64>,
    /// From which byte of the answer.
    pub at: usize,
    /// What is read with them where no block has them: no more than fits into a buffer.
    pub within: Range<u64>,
}

/// Blocks, and which parts of each are wanted.
pub type Parts = Vec<(BlockId, Vec<Part>)>;

#[derive(Debug, Default)]
pub struct Cover(BTreeSet<BlockId>);

impl Cover {
    /// The blocks that have all of the pieces; `None` if there is a byte that none has, or if they are more than
    /// so many.
    pub fn covered(&self, served: u64, pieces: &[Piece], most: usize) -> Option<Parts> {
        let mut parts = Vec::new();
        for piece in pieces {
            let mut at = piece.bytes.start;
            while at < piece.bytes.end && parts.len() <= most {
                at = add(&mut parts, piece, at, self.at(served, piece, at).ok()?);
            }
        }
        (parts.len() <= most).then_some(parts)
    }

    /// Adds blocks for what none has of the pieces: these alone.
    pub fn cover(&mut self, served: u64, pieces: &[Piece]) -> Vec<BlockId> {
        let mut new = Vec::new();
        for piece in pieces {
            let mut at = piece.bytes.start;
            while at < piece.bytes.end {
                let block = self.at(served, piece, at).unwrap_or_else(|block| {
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
    pub fn touching(&self, served: u64, piece: &Piece) -> impl Iterator<Item = BlockId> {
        self.between(served, piece.of, piece.bytes.clone())
    }

    /// It is there no more.
    pub fn remove(&mut self, block: BlockId) {
        self.0.remove(&block);
    }

    /// The block that has this byte of a piece, or one that is to have it.
    fn at(&self, served: u64, piece: &Piece, at: u64) -> Result<BlockId, BlockId> {
        let Piece { of, within, .. } = piece;
        let next = self.between(served, *of, at..within.end).next();
        if let Some(next) = next.filter(|next| next.start <= at) {
            return Ok(next);
        }
        let end = next.map_or(within.end, |next| next.start);
        let before = self.between(served, *of, within.start..at).last();
        let start = before.map_or(within.start, |before| before.end.max(within.start));
        Err(BlockId { served, of: *of, start, end })
    }

    fn between(&self, served: u64, of: Of, range: Range<u64>) -> impl Iterator<Item = BlockId> {
        let at = |start| BlockId { served, of, start, end: 0 };
        let before = self.0.range(..at(range.start)).next_back();
        let before = before.filter(move |block| {
            (block.served, block.of) == (served, of) && block.end > range.start
        });
        before.into_iter().chain(self.0.range(at(range.start)..at(range.end))).copied()
    }
}

/// Adds what a block has of a piece from this byte on; which byte comes then.
fn add(parts: &mut Parts, piece: &Piece, at: u64, block: BlockId) -> u64 {
    let end = block.end.min(piece.bytes.end);
    let bytes = (at - block.start) as usize..(end - block.start) as usize;
    let part = Part { at: piece.at + (at - piece.bytes.start) as usize, bytes };
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

    fn piece(file: u32, bytes: Range<u64>, within: Range<u64>) -> Piece {
        Piece { of: Of::File(file), bytes, at: 0, within }
    }

    #[test]
    fn what_is_there_is_used_and_the_rest_is_new() {
        let mut cover = Cover::default();
        let ranges = |blocks: &[BlockId]| -> Vec<_> {
            blocks.iter().map(|block| block.start..block.end).collect()
        };
        let new = cover.cover(1, &[piece(0, 10..20, 10..20)]);
        let first = 10..20;
        assert_eq!(ranges(&new), [first]);
        // As much as may be, and no byte twice.
        let wanted = [piece(0, 5..25, 0..40)];
        let new = cover.cover(1, &wanted);
        assert_eq!(ranges(&new), [0..10, 20..40]);
        assert!(cover.covered(1, &wanted, 2).is_none());
        let parts = cover.covered(1, &wanted, 3).unwrap();
        let wanted: Vec<_> =
            parts.iter().flat_map(|(_, parts)| parts).map(|p| (p.at, p.bytes.clone())).collect();
        assert_eq!(wanted, [(0, 5..10), (5, 0..10), (15, 0..5)]);
        // Of another image, or another file, nothing is there.
        assert!(cover.covered(1, &[piece(0, 0..40, 0..40)], 9).is_some());
        assert!(cover.covered(2, &[piece(0, 0..40, 0..40)], 9).is_none());
        assert!(cover.covered(1, &[piece(1, 0..1, 0..1)], 9).is_none());
        cover.remove(new[0]);
        assert_eq!(cover.touching(1, &piece(0, 0..21, 0..21)).count(), 2);
        assert!(cover.covered(1, &[piece(0, 9..11, 0..40)], 9).is_none());
    }

    proptest! {
        #[test]
        fn each_byte_that_is_wanted_has_one_place_in_one_block(
            reads in prop::collection::vec((0u64..1000, 1u64..100, 0u64..50, 0u64..50, 0usize..3), 1..60),
        ) {
            let mut cover = Cover::default();
            let mut all: Vec<BlockId> = Vec::new();
            for (start, len, before, after, gone) in reads {
                let bytes = start..start + len;
                let within = start.saturating_sub(before)..start + len + after;
                let wanted = piece(0, bytes.clone(), within.clone());
                let wanted = [wanted];
                let new = cover.cover(7, &wanted);
                let parts = cover.covered(7, &wanted, 1000).unwrap();
                prop_assert!(new.iter().all(|n| n.start >= within.start && n.end <= within.end));
                all.extend(&new);
                all.sort();
                prop_assert!(all.windows(2).all(|two| two[0].end <= two[1].start), "{all:?}");
                let mut at = 0;
                for (block, parts) in &parts {
                    prop_assert!(all.contains(block));
                    for part in parts {
                        prop_assert_eq!(part.at, at);
                        prop_assert_eq!(block.start + part.bytes.start as u64, start + at as u64);
                        prop_assert!(block.start + part.bytes.end as u64 <= block.end);
                        at += part.bytes.len();
                    }
                }
                prop_assert_eq!(at as u64, len);
                prop_assert_eq!(cover.cover(7, &wanted), []);
                for _ in 0..gone.min(all.len()) {
                    cover.remove(all.remove(all.len() / 2));
                }
            }
        }
    }
}
