//! Plans reads: which ranges of which sources a range of a virtual file is made of, and which blocks may hold them.
//!
//! Pure functions: a virtual file and a range in, a plan out. Blocks of at least 256 KiB begin where requests do, so
//! that a request is one block and is answered from it uncopied. Smaller ones begin at multiples of their size: small
//! tensors share a block.

use std::ops::Range;

use crate::checkpoint::Origin;
use crate::virtual_file::{Segment, SegmentSource, VirtualFile};

use super::block::id::{BlockSource, MAX_BLOCKS_PER_READ, SourceRange};
use super::block::pool::BufferSize;

/// Longer ranges of a file are read exactly as requested: the kernel reads on from there, and requests no byte twice.
/// Shorter ones are read with what surrounds them, since small tensors share a block.
const EXACT_BLOCK_MIN_BYTES: u64 = 256 << 10;

/// Ranges prefetched at once. A longer list is of tiny tensors that must each be gathered: the rest waits for its
/// reader.
const MAX_PREFETCH_RANGES: usize = 128;

/// A random read of at most this much reads exactly that. Random reads of 4 KiB took six times as long where each
/// read a block. Larger ones are what the kernel requests for streams.
const MAX_UNCACHED_BYTES: u64 = 256 << 10;

/// What one read needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReadPlan {
    /// The ranges of source files, and of tensors that must be gathered.
    pub ranges: Vec<SourceRange>,
    /// Parts that the virtual file holds in memory: where in the reply, and which range of the file.
    pub in_memory: Vec<(usize, Range<u64>)>,
}

impl ReadPlan {
    /// The range of one source file that a small read consists of, if it is one run.
    pub fn small_run(&self) -> Option<(BlockSource, Range<u64>)> {
        let (first, last) = (self.ranges.first()?, self.ranges.last()?);
        let is_run = self
            .ranges
            .windows(2)
            .all(|two| two[0].source == two[1].source && two[0].bytes.end == two[1].bytes.start);
        let run = first.bytes.start..last.bytes.end;
        let is_small_file_run = matches!(first.source, BlockSource::File(_))
            && self.in_memory.is_empty()
            && is_run
            && run.end - run.start <= MAX_UNCACHED_BYTES;
        is_small_file_run.then_some((first.source, run))
    }
}

/// Plans a read; `None` if it lies in more blocks than one read may use.
pub fn plan_read(
    file: &VirtualFile,
    range: &Range<u64>,
    strided_size: BufferSize,
) -> Option<ReadPlan> {
    let (mut plan, mut blocks) = (ReadPlan::default(), Vec::new());
    for segment in file.segments(range.clone()) {
        let reply_offset = (segment.range.start - range.start) as usize;
        let Some((sizes, bytes)) = locate(file, &segment, strided_size) else {
            plan.in_memory.push((reply_offset, segment.range));
            continue;
        };
        for part in sizes.split(bytes, RequestGrid::SINGLE, reply_offset) {
            let block = (part.source, part.block_bounds.start);
            if !blocks.contains(&block) {
                if blocks.len() == MAX_BLOCKS_PER_READ {
                    return None;
                }
                blocks.push(block);
            }
            plan.ranges.push(part);
        }
    }
    Some(plan)
}

/// Plans the prefetch of a range; ranges in one block are merged.
///
/// The reader of `request` is expected to make requests of that length on and on. Each of these is to lie in one
/// block.
pub fn plan_prefetch(
    file: &VirtualFile,
    range: Range<u64>,
    request: &Range<u64>,
    strided_size: BufferSize,
) -> Vec<SourceRange> {
    let mut ranges: Vec<SourceRange> = Vec::new();
    for segment in file.segments(range) {
        let Some((sizes, bytes)) = locate(file, &segment, strided_size) else { continue };
        let grid = RequestGrid::aligned_with(request, segment.range.start);
        for part in sizes.split(bytes, grid, 0) {
            if let Some(last) = ranges.last_mut()
                && (last.source, &last.block_bounds) == (part.source, &part.block_bounds)
            {
                let (start, end) = (part.bytes.start, part.bytes.end);
                last.bytes = last.bytes.start.min(start)..last.bytes.end.max(end);
            } else if ranges.len() < MAX_PREFETCH_RANGES {
                ranges.push(part);
            } else {
                return ranges;
            }
        }
    }
    ranges
}

/// The size of the buffers that hold blocks of a source.
pub fn buffer_size(
    file: &VirtualFile,
    source: BlockSource,
    strided_size: BufferSize,
) -> BufferSize {
    match source {
        BlockSource::Tensor(index) if file.tensors()[index as usize].bytes.is_strided() => {
            strided_size
        }
        _ => BufferSize::Small,
    }
}

/// How the source of a segment is divided, and the segment's range there; `None` if the bytes are in memory.
fn locate(
    file: &VirtualFile,
    segment: &Segment,
    strided_size: BufferSize,
) -> Option<(BlockSizes, Range<u64>)> {
    let (source, source_bytes, offset) = match segment.bytes {
        SegmentSource::Header(_) => return None,
        SegmentSource::Run { origin, offset } => match &file.origins()[origin.0 as usize] {
            Origin::File(file) => (BlockSource::File(origin.0), file.identity().size, offset),
            Origin::Patched(patched) => (BlockSource::File(origin.0), patched.len(), offset),
            Origin::Memory(_) => return None,
        },
        SegmentSource::Tensor { index, offset } => {
            let source_bytes = file.tensors()[index].bytes.len();
            (BlockSource::Tensor(index as u32), source_bytes, offset)
        }
    };
    let max_block_bytes = buffer_size(file, source, strided_size).bytes() as u64;
    let len = segment.range.end - segment.range.start;
    Some((BlockSizes { source, source_bytes, max_block_bytes }, offset..offset + len))
}

/// How a source is divided into blocks.
struct BlockSizes {
    source: BlockSource,
    source_bytes: u64,
    max_block_bytes: u64,
}

impl BlockSizes {
    /// Splits a range so that each part lies in one block. Exact blocks hold as many whole requests as fit; others
    /// begin at multiples of their size.
    fn split(
        &self,
        bytes: Range<u64>,
        grid: RequestGrid,
        reply_offset: usize,
    ) -> impl Iterator<Item = SourceRange> {
        let source = self.source;
        let is_exact = matches!(source, BlockSource::File(_))
            && bytes.end - bytes.start >= EXACT_BLOCK_MIN_BYTES;
        let (grid, bounds) = if is_exact {
            (grid, bytes.clone())
        } else {
            (RequestGrid { length: 1, phase: bytes.start }, 0..self.source_bytes)
        };
        grid.blocks(bytes.clone(), self.max_block_bytes).map(move |block| {
            let block_bounds = intersection(&block, &bounds);
            let part = intersection(&bytes, &block_bounds);
            let reply_offset = reply_offset + (part.start - bytes.start) as usize;
            SourceRange { source, bytes: part, reply_offset, block_bounds }
        })
    }
}

/// Requests of one length that follow one another.
#[derive(Clone, Copy)]
struct RequestGrid {
    /// The length of each: no more than a block holds.
    length: u64,
    /// How far before a range the request begins that its first byte lies in.
    phase: u64,
}

impl RequestGrid {
    /// The range is the request.
    const SINGLE: RequestGrid = RequestGrid { length: 1, phase: 0 };

    /// Those before and after a request, for a range with this start.
    fn aligned_with(request: &Range<u64>, start: u64) -> RequestGrid {
        let length = (request.end - request.start).clamp(1, BufferSize::Small.bytes() as u64);
        let phase = if start < request.start {
            length - 1 - (request.start - start - 1) % length
        } else {
            (start - request.start) % length
        };
        RequestGrid { length, phase }
    }

    /// The blocks that cover a range: of whole requests, but for the first and the last.
    fn blocks(self, bytes: Range<u64>, max_bytes: u64) -> impl Iterator<Item = Range<u64>> {
        grid_cells(bytes, max_bytes - max_bytes % self.length, self.phase)
    }
}

fn intersection(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// The cells of one size that a range lies in, if one begins `phase` bytes before it.
fn grid_cells(bytes: Range<u64>, size: u64, phase: u64) -> impl Iterator<Item = Range<u64>> {
    let first = bytes.start + size - phase % size;
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
    fn consecutive_requests_of_any_length_lie_in_one_block_each() {
        let size = BufferSize::Small.bytes() as u64;
        for length in [1, 512, 4096, 100_000, 384 << 10, 700_001, size, 3 * size] {
            for start in [4 * size, 5 * size + 77, 9 * size - 1] {
                let request = 5 * size + 77..5 * size + 77 + length;
                let end = start + 10 * size;
                let blocks: Vec<_> =
                    RequestGrid::aligned_with(&request, start).blocks(start..end, size).collect();
                assert!(blocks.iter().all(|block| block.end - block.start <= size));
                assert!(blocks[0].start <= start && blocks[blocks.len() - 1].end >= end);
                assert!(blocks.windows(2).all(|pair| pair[0].end == pair[1].start));
                let length = length.min(size);
                let phase = |block: u64| (block + 100 * size * length - request.start) % length;
                assert!(
                    blocks.iter().skip(1).all(|block| phase(block.start) == 0),
                    "{length} {start}"
                );
            }
        }
    }

    #[test]
    fn cells_begin_at_multiples_of_their_size_from_the_phase() {
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
