//! Plans reads: which ranges of which sources a range of a virtual file is made of, and which blocks may hold them.
//!
//! Pure functions: a virtual file and a range in, a plan out. Blocks of at least 256 KiB begin where requests do, so
//! that a request is one block and is answered from it uncopied. Smaller ones begin at multiples of the block size from the
//! start of a used range: small tensors share a block.

use std::ops::Range;
use std::sync::OnceLock;

use crate::checkpoint::{Origin, Tensor};
use crate::source::REMOTE_GAP_BYTES;
use crate::virtual_file::{Segment, SegmentSource, VirtualFile, interleaved_tensors, window_bytes};

use super::block::id::{BlockSource, MAX_BLOCKS_PER_READ, SourceRange};
use super::block::pool::BufferSize;
use super::used_ranges::{MAX_LOCAL_GAP_BYTES, UsedRanges};

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

/// Block boundaries and buffer sizes for all sources of a virtual file.
pub struct BlockLayout {
    /// Buffer size for blocks of strided tensors.
    pub strided_size: BufferSize,
    /// The window of each strided tensor, once it is known. Empty for sources on this machine.
    windows: Box<[OnceLock<u64>]>,
    max_window_bytes: u64,
    used_ranges: UsedRanges,
}

impl BlockLayout {
    /// `max_window_bytes` is there for stores alone: their strided tensors may need windows of several blocks.
    pub fn new(
        strided_size: BufferSize,
        file: &VirtualFile,
        max_window_bytes: Option<u64>,
    ) -> Self {
        let count = max_window_bytes.map_or(0, |_| file.tensors().len());
        let windows = (0..count).map(|_| OnceLock::new()).collect();
        let is_remote = max_window_bytes.is_some();
        let max_gap_bytes = if is_remote { REMOTE_GAP_BYTES } else { MAX_LOCAL_GAP_BYTES };
        BlockLayout {
            strided_size,
            windows,
            max_window_bytes: max_window_bytes.unwrap_or(0),
            used_ranges: UsedRanges::new(file, max_gap_bytes),
        }
    }

    /// The bytes of a tensor whose blocks are to be filled together. `None` if a block alone fetches no more from a store
    /// than its share.
    pub fn window(&self, file: &VirtualFile, tensor: u32) -> Option<u64> {
        let tensor = tensor as usize;
        let block_bytes = self.strided_size.bytes() as u64;
        let plan = || window_bytes(&file.tensors()[tensor], block_bytes, self.max_window_bytes);
        let window = *self.windows.get(tensor)?.get_or_init(plan);
        (window > block_bytes).then_some(window)
    }

    /// The tensors to fill together because their bytes alternate in a source, if there is room for their blocks.
    fn interleaved(&self, file: &VirtualFile, tensor: u32) -> Range<usize> {
        let tensor = tensor as usize;
        let alone = tensor..tensor + 1;
        if self.windows.is_empty() {
            return alone;
        }
        let all = interleaved_tensors(file.tensors(), tensor);
        let block_bytes = self.strided_size.bytes() as u64;
        let buffer_bytes = |tensor: &Tensor| tensor.bytes.len().next_multiple_of(block_bytes);
        let needed: u64 = file.tensors()[all.clone()].iter().map(buffer_bytes).sum();
        if needed <= self.max_window_bytes { all } else { alone }
    }
}

/// Plans a read; `None` if it lies in more blocks than one read may use.
pub fn plan_read(file: &VirtualFile, range: &Range<u64>, layout: &BlockLayout) -> Option<ReadPlan> {
    let (mut plan, mut blocks) = (ReadPlan::default(), Vec::new());
    for segment in file.segments(range.clone()) {
        let reply_offset = (segment.range.start - range.start) as usize;
        let Some((sizes, bytes)) = locate(file, &segment, layout) else {
            plan.in_memory.push((reply_offset, segment.range));
            continue;
        };
        for part in sizes.split(bytes, reply_offset) {
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
pub fn plan_prefetch(
    file: &VirtualFile,
    range: Range<u64>,
    layout: &BlockLayout,
) -> Vec<SourceRange> {
    let mut ranges: Vec<SourceRange> = Vec::new();
    for segment in file.segments(range) {
        let Some((sizes, bytes)) = locate(file, &segment, layout) else { continue };
        for part in sizes.split(bytes, 0) {
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

/// Plans which blocks to fill together with the one that has a byte of a strided tensor. They are those of its window, or of
/// all tensors whose bytes alternate in a source.
pub fn plan_window(
    file: &VirtualFile,
    tensor: u32,
    at: u64,
    layout: &BlockLayout,
) -> Option<Vec<SourceRange>> {
    let all = layout.interleaved(file, tensor);
    if all.len() > 1 {
        let blocks = |tensor: usize| {
            let sizes = BlockSizes::of_tensor(file, tensor as u32, layout);
            sizes.split(sizes.used.clone(), 0).collect::<Vec<_>>()
        };
        return Some(all.flat_map(blocks).collect());
    }
    let window_bytes = layout.window(file, tensor)?;
    let sizes = BlockSizes::of_tensor(file, tensor, layout);
    let start = at / window_bytes * window_bytes;
    let window = start..start.saturating_add(window_bytes).min(sizes.used.end);
    Some(sizes.split(window, 0).collect())
}

/// The size of the buffers that hold blocks of a source.
pub fn buffer_size(file: &VirtualFile, source: BlockSource, layout: &BlockLayout) -> BufferSize {
    if is_strided(file, source) { layout.strided_size } else { BufferSize::Small }
}

/// Whether a source is a strided tensor.
pub fn is_strided(file: &VirtualFile, source: BlockSource) -> bool {
    match source {
        BlockSource::Tensor(index) => file.tensors()[index as usize].bytes.is_strided(),
        BlockSource::File(_) => false,
    }
}

/// How the source of a segment is divided, and the segment's range there; `None` if the bytes are in memory.
fn locate(
    file: &VirtualFile,
    segment: &Segment,
    layout: &BlockLayout,
) -> Option<(BlockSizes, Range<u64>)> {
    let len = segment.range.end - segment.range.start;
    match segment.bytes {
        SegmentSource::Header(_) => None,
        SegmentSource::Run { origin, offset } => match &file.origins()[origin.0 as usize] {
            Origin::File(_) | Origin::Patched(_) => {
                let bytes = offset..offset + len;
                let used = layout.used_ranges.containing(origin.0, &bytes);
                Some((BlockSizes::of_file(origin.0, used), bytes))
            }
            Origin::Memory(_) => None,
        },
        SegmentSource::Tensor { index, offset } => {
            Some((BlockSizes::of_tensor(file, index as u32, layout), offset..offset + len))
        }
    }
}

/// Block boundaries of one source.
struct BlockSizes {
    source: BlockSource,
    /// The range that blocks may cover. In a file, it may include small gaps.
    used: Range<u64>,
    max_block_bytes: u64,
    /// No block leads out of a window of this length.
    window_bytes: u64,
}

impl BlockSizes {
    fn of_file(origin: u32, used: Range<u64>) -> BlockSizes {
        BlockSizes {
            source: BlockSource::File(origin),
            used,
            max_block_bytes: BufferSize::Small.bytes() as u64,
            window_bytes: u64::MAX,
        }
    }

    fn of_tensor(file: &VirtualFile, tensor: u32, layout: &BlockLayout) -> BlockSizes {
        let source = BlockSource::Tensor(tensor);
        BlockSizes {
            source,
            used: 0..file.tensors()[tensor as usize].bytes.len(),
            max_block_bytes: buffer_size(file, source, layout).bytes() as u64,
            window_bytes: layout.window(file, tensor).unwrap_or(u64::MAX),
        }
    }

    /// Splits a range into parts of one block each. Exact blocks begin at the start of the range, others at multiples of the
    /// block size from the start of the used range.
    fn split(&self, bytes: Range<u64>, reply_offset: usize) -> impl Iterator<Item = SourceRange> {
        let BlockSizes { source, ref used, max_block_bytes, window_bytes } = *self;
        let is_exact = matches!(source, BlockSource::File(_))
            && bytes.end - bytes.start >= EXACT_BLOCK_MIN_BYTES;
        let bounds = if is_exact { bytes.clone() } else { used.clone() };
        let windows = bytes.start / window_bytes..=bytes.end.saturating_sub(1) / window_bytes;
        windows.flat_map(move |window| {
            let start = window * window_bytes;
            let bounds = intersection(&(start..start.saturating_add(window_bytes)), &bounds);
            let offset = bytes.start;
            let bytes = intersection(&bytes, &bounds);
            let phase = bytes.start.saturating_sub(bounds.start);
            split_at_phase(bytes.clone(), max_block_bytes, phase).map(move |block| {
                let block_bounds = intersection(&block, &bounds);
                let part = intersection(&bytes, &block_bounds);
                let reply_offset = reply_offset + (part.start - offset) as usize;
                SourceRange { source, bytes: part, reply_offset, block_bounds }
            })
        })
    }
}

fn intersection(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// The blocks of one size that a range lies in, if one begins `phase` bytes before it.
fn split_at_phase(bytes: Range<u64>, size: u64, phase: u64) -> impl Iterator<Item = Range<u64>> {
    let first = bytes.start + size - phase % size;
    let ends = (first..bytes.end.saturating_add(size)).step_by(size as usize);
    ends.map(move |end| end.saturating_sub(size)..end)
}

#[cfg(test)]
mod tests {
    use super::split_at_phase;

    fn all(start: u64, end: u64, before: u64) -> Vec<(u64, u64)> {
        split_at_phase(start..end, 10, before).map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn blocks_begin_at_multiples_of_their_size_from_the_phase() {
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
