//! Which bytes of which files and tensors a read wants.
//!
//! In: a range of a virtual file. Out: the pieces of source files, or of tensors that have to be gathered, where each
//! belongs in the answer, and how much is read with it where no block has it yet.

use std::ops::Range;

use crate::checkpoint::TensorBytes;
use crate::virtual_file::{Segment, SegmentSource};

use crate::cache::block::extents::SourceRange;
use crate::cache::block::pool::BufferSize;
use crate::cache::block::table::{BlockId, BlockSource, MAX_BLOCKS_PER_READ};
use crate::cache::file::CachedFile;
use crate::cache::io::source::SourceHandle;

/// From so many bytes of a file on exactly those are read that are wanted: the kernel reads on from there, and
/// asks for no byte twice. Of less, what lies around it is read too: small tensors share a block.
const EXACT_BLOCK_MIN_BYTES: u64 = 256 << 10;

/// Blocks that are fetched of one range ahead of time. Of one that has more the rest is read when it is asked for: it is
/// tiny tensors that each have to be gathered.
const MAX_PREFETCH_PIECES: usize = 128;

/// What a read is made of.
#[derive(Default)]
pub(super) struct ReadPlan {
    pub pieces: Vec<SourceRange>,
    /// Parts that are in memory: where in the answer, and which part of the virtual file.
    pub in_memory: Vec<(usize, Range<u64>)>,
}

/// Requests that follow one another.
#[derive(Clone, Copy)]
struct RequestGrid {
    /// Of each: no more than a block has.
    length: u64,
    /// How far before a range one of them begins.
    phase: u64,
}

impl RequestGrid {
    /// The range is the request.
    const SINGLE: RequestGrid = RequestGrid { length: 1, phase: 0 };

    /// Those before and after one, of a range that begins there.
    fn aligned_with(asked: &Range<u64>, start: u64) -> RequestGrid {
        let length = (asked.end - asked.start).clamp(1, BufferSize::Small.bytes() as u64);
        let over = if start < asked.start {
            length - 1 - (asked.start - start - 1) % length
        } else {
            (start - asked.start) % length
        };
        RequestGrid { length, phase: over }
    }

    /// These bytes in blocks of at most this size, of whole requests but for the first and the last.
    fn split(self, bytes: Range<u64>, size: u64) -> impl Iterator<Item = Range<u64>> {
        grid_cells(bytes, size - size % self.length, self.phase)
    }
}

impl CachedFile {
    /// What a read wants; `None` if that lies in more blocks than one read is made of.
    pub(super) fn plan_read(&self, range: &Range<u64>) -> Option<ReadPlan> {
        let (mut wanted, mut blocks) = (ReadPlan::default(), Vec::new());
        for segment in self.virtual_file().segments(range.clone()) {
            let at = (segment.range.start - range.start) as usize;
            let Some((of, bytes)) = self.locate(&segment) else {
                wanted.in_memory.push((at, segment.range));
                continue;
            };
            for piece in self.split_pieces(of, bytes, RequestGrid::SINGLE, at) {
                let block = (of, piece.block_bounds.start);
                if !blocks.contains(&block) {
                    if blocks.len() == MAX_BLOCKS_PER_READ {
                        return None;
                    }
                    blocks.push(block);
                }
                wanted.pieces.push(piece);
            }
        }
        Some(wanted)
    }

    /// What to fetch of a range ahead of time: its pieces, those that lie in one block as one. Who asked for a range and
    /// reads on asks for as much each time: each request is to lie in one block, to be answered from it as it is.
    pub(super) fn plan_prefetch(&self, range: Range<u64>, asked: &Range<u64>) -> Vec<SourceRange> {
        let mut fetch: Vec<SourceRange> = Vec::new();
        for segment in self.virtual_file().segments(range) {
            let Some((of, bytes)) = self.locate(&segment) else { continue };
            let requests = RequestGrid::aligned_with(asked, segment.range.start);
            for piece in self.split_pieces(of, bytes, requests, 0) {
                if let Some(last) = fetch.last_mut()
                    && (last.source, &last.block_bounds) == (of, &piece.block_bounds)
                {
                    let (start, end) = (piece.bytes.start, piece.bytes.end);
                    last.bytes = last.bytes.start.min(start)..last.bytes.end.max(end);
                } else if fetch.len() < MAX_PREFETCH_PIECES {
                    fetch.push(piece);
                } else {
                    return fetch;
                }
            }
        }
        fetch
    }

    /// Cut so that each lies in one block. Blocks that have exactly what is asked for have as many whole requests as fit;
    /// others begin at multiples of their size.
    fn split_pieces(
        &self,
        of: BlockSource,
        bytes: Range<u64>,
        requests: RequestGrid,
        at: usize,
    ) -> impl Iterator<Item = SourceRange> {
        let is_exact =
            matches!(of, BlockSource::File(_)) && bytes.end - bytes.start >= EXACT_BLOCK_MIN_BYTES;
        let size = self.block_size(of).bytes() as u64;
        let (requests, all) = if is_exact {
            (requests, bytes.clone())
        } else {
            (RequestGrid { length: 1, phase: bytes.start }, 0..self.source_len(of))
        };
        requests.split(bytes.clone(), size).map(move |within| {
            let within = within.start.max(all.start)..within.end.min(all.end);
            let part = bytes.start.max(within.start)..bytes.end.min(within.end);
            SourceRange {
                source: of,
                reply_offset: at + (part.start - bytes.start) as usize,
                bytes: part,
                block_bounds: within,
            }
        })
    }

    /// What a segment's bytes are of, and which of it; `None` if they are in memory.
    fn locate(&self, segment: &Segment) -> Option<(BlockSource, Range<u64>)> {
        let (of, offset) = match segment.bytes {
            SegmentSource::Header(_) => return None,
            SegmentSource::Run { origin, offset } => {
                self.reader.file(origin)?;
                (BlockSource::File(origin.0), offset)
            }
            SegmentSource::Tensor { index: place, offset } => {
                (BlockSource::Tensor(place as u32), offset)
            }
        };
        Some((of, offset..offset + (segment.range.end - segment.range.start)))
    }

    /// How large blocks of it are at the most.
    pub(super) fn block_size(&self, of: BlockSource) -> BufferSize {
        fn strided(bytes: &TensorBytes) -> bool {
            match bytes {
                TensorBytes::Run(_) => false,
                TensorBytes::Grid(_) => true,
                TensorBytes::Swapped { inner: of, .. } => strided(of),
            }
        }
        match of {
            BlockSource::Tensor(place)
                if strided(&self.virtual_file().tensors()[place as usize].bytes) =>
            {
                self.strided_size
            }
            _ => BufferSize::Small,
        }
    }

    fn source_len(&self, of: BlockSource) -> u64 {
        match of {
            BlockSource::File(origin) => self.virtual_file().origins()[origin as usize].size(),
            BlockSource::Tensor(place) => self.virtual_file().tensors()[place as usize].bytes.len(),
        }
    }

    /// The origin that a block's bytes come from.
    pub(super) fn source_of(&self, id: BlockId) -> &SourceHandle {
        let origin = match id.source {
            BlockSource::File(origin) => origin,
            BlockSource::Tensor(place) => {
                self.virtual_file().tensors()[place as usize].bytes.extent().0.0
            }
        };
        &self.sources[origin as usize]
    }
}

/// The ranges of one size that these bytes lie in, if one begins so many bytes before them.
fn grid_cells(bytes: Range<u64>, size: u64, before: u64) -> impl Iterator<Item = Range<u64>> {
    let first = bytes.start + size - before % size;
    let ends = (first..bytes.end.saturating_add(size)).step_by(size as usize);
    ends.map(move |end| end.saturating_sub(size)..end)
}

#[cfg(test)]
mod tests {
    use super::{BufferSize, RequestGrid, grid_cells};

    fn all(start: u64, end: u64, before: u64) -> Vec<(u64, u64)> {
        grid_cells(start..end, 10, before).map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn requests_that_follow_one_another_lie_in_one_block_each_whatever_their_length() {
        let size = BufferSize::Small.bytes() as u64;
        for length in [1, 512, 4096, 100_000, 384 << 10, 700_001, size, 3 * size] {
            for start in [4 * size, 5 * size + 77, 9 * size - 1] {
                let asked = 5 * size + 77..5 * size + 77 + length;
                let end = start + 10 * size;
                let blocks: Vec<_> =
                    RequestGrid::aligned_with(&asked, start).split(start..end, size).collect();
                assert!(blocks.iter().all(|block| block.end - block.start <= size));
                assert!(blocks[0].start <= start && blocks[blocks.len() - 1].end >= end);
                assert!(blocks.windows(2).all(|pair| pair[0].end == pair[1].start));
                let length = length.min(size);
                let over = |block: u64| (block + 100 * size * length - asked.start) % length;
                assert!(
                    blocks.iter().skip(1).all(|block| over(block.start) == 0),
                    "{length} {start}"
                );
            }
        }
    }

    #[test]
    fn blocks_begin_where_whole_ones_would_before_them() {
        assert_eq!(all(40, 60, 0), [(40, 50), (50, 60)]);
        assert_eq!(all(43, 61, 20), [(43, 53), (53, 63)]);
        assert_eq!(all(43, 61, 43), [(40, 50), (50, 60), (60, 70)]);
        assert_eq!(all(43, 60, 43), [(40, 50), (50, 60)]);
        assert_eq!(all(43, 44, 47), [(36, 46)]);
        // Before the beginning of a file there is nothing.
        assert_eq!(all(3, 12, 4), [(0, 9), (9, 19)]);
        assert_eq!(all(7, 7, 0), []);
    }
}
