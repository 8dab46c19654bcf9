//! What names a block, and a range of one: the types that planning, the blocks and their waiters share.

use std::ops::Range;

/// What the bytes of a block are counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockSource {
    /// A source file, by the number of its origin.
    File(u32),
    /// A strided or byte-swapped tensor, by its index in the virtual file.
    Tensor(u32),
}

/// The identity of a block: its virtual file, its source and its range there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId {
    pub file_id: u64,
    pub source: BlockSource,
    pub start: u64,
    pub end: u64,
}

impl BlockId {
    pub fn range(self) -> Range<u64> {
        self.start..self.end
    }
}

/// A range of one source that a read needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceRange {
    pub source: BlockSource,
    pub bytes: Range<u64>,
    /// Where in the reply these bytes begin.
    pub reply_offset: usize,
    /// What a new block for it may cover: the bytes, and no more than fits into a buffer.
    pub block_bounds: Range<u64>,
}

/// A range of one block that a read needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPart {
    /// Where in the reply these bytes begin.
    pub reply_offset: usize,
    /// Which bytes of the block.
    pub bytes: Range<usize>,
}

/// Maximum blocks of one read. A read of more small ranges, far apart, is made segment by segment: whole blocks would
/// read many times what it needs. A request of 1 MiB touches at most 9 ranges of at least 128 KiB.
pub const MAX_BLOCKS_PER_READ: usize = 9;

/// Blocks, and the parts of each that a read needs.
pub type BlockParts = Vec<(BlockId, Vec<BlockPart>)>;

/// Why a block is filled, which decides when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillPriority {
    /// A reader waits for it.
    Blocking,
    /// It was requested by a reader that waits for another block first.
    Deferred,
    /// Readahead or prediction expects a read of it.
    Prefetch,
    /// The access trace of an earlier load has it next.
    Replay,
}

impl FillPriority {
    /// Whether nothing has requested the block yet.
    pub fn is_prefetch(self) -> bool {
        matches!(self, FillPriority::Prefetch | FillPriority::Replay)
    }
}
