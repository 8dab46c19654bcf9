//! The blocks: which are ready, which are being filled for which waiters, and which is evicted next.
//!
//! In: the ranges of a read. Out: the blocks that hold them, or a place among the waiters of a block. A block is filled
//! once, for all its waiters. The lock is held to look up and to update, never while bytes are read or copied.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};

use lru::LruCache;

use crate::cache::block::id::{
    BlockId, BlockPart, BlockParts, BlockSource, FillPriority, MAX_BLOCKS_PER_READ, SourceRange,
};
use crate::cache::block::pool::{Block, BlockPool, Buffer, BufferSize, SlabId};
use crate::cache::block::reply::Waiter;
use crate::cache::counters::AtomicCounters;
use crate::threads::lock;

/// A block of a file is used up once all but a sixteenth of it was requested: what lies between tensors never is.
const UNUSED_SHARE_DIVISOR: u64 = 16;

/// Blocks looked at for one to evict. Those that cannot be are being copied to a reader, by at most as many threads.
const MAX_EVICTION_CANDIDATES: usize = 64;

#[derive(Debug)]
struct ReadyBlock {
    block: Arc<Block>,
    requested_bytes: u64,
    /// It was prefetched, and not requested yet.
    is_unused_prefetch: bool,
}

impl ReadyBlock {
    fn is_used_up(&self, source: BlockSource) -> bool {
        let len = self.block.bytes().len() as u64;
        let max_unused = match source {
            BlockSource::File(_) => len / UNUSED_SHARE_DIVISOR,
            // A tensor has no gaps. To gather the last rows again may fetch all of its source.
            BlockSource::Tensor(_) => 0,
        };
        self.requested_bytes >= len - max_unused
    }

    /// Whether no reader has it. Only the table hands out blocks, under its lock.
    fn is_free(&self) -> bool {
        Arc::strong_count(&self.block) == 1
    }
}

#[derive(Default)]
struct PendingBlock {
    waiters: Vec<Waiter>,
    /// A read requested it; otherwise it is a prefetch.
    is_requested: bool,
    /// A reader waits for it.
    is_blocking: bool,
    /// A fill job reads it.
    is_claimed: bool,
}

/// The blocks of all open virtual files, and the buffers that they lie in.
pub struct BlockTable {
    pool: Arc<BlockPool>,
    counters: Arc<AtomicCounters>,
    state: Mutex<TableState>,
}

struct TableState {
    /// Those of `ready` and `pending`.
    extents: ExtentIndex,
    ready: LruCache<BlockId, ReadyBlock>,
    pending: HashMap<BlockId, PendingBlock>,
}

/// A block that is ready, and the parts of it that a read needs.
pub struct BlockHit {
    pub id: BlockId,
    pub block: Arc<Block>,
    pub parts: Vec<BlockPart>,
}

/// What the waiters of a read have to do.
#[derive(Default)]
pub struct JoinResult {
    /// These blocks are ready, for these waiters.
    pub ready: Vec<(BlockId, Arc<Block>, Waiter)>,
    /// These have to be filled.
    pub to_fill: Vec<BlockId>,
}

impl BlockTable {
    pub fn new(memory_limit: u64, counters: Arc<AtomicCounters>) -> BlockTable {
        let (extents, pending) = Default::default();
        let state = TableState { extents, ready: LruCache::unbounded(), pending };
        BlockTable { pool: BlockPool::new(memory_limit), counters, state: Mutex::new(state) }
    }

    /// Finds the blocks that hold some ranges, if all are ready.
    pub fn lookup(&self, file_id: u64, ranges: &[SourceRange]) -> Option<Vec<BlockHit>> {
        let mut state = self.lock();
        let parts = state.extents.lookup(file_id, ranges, usize::MAX)?;
        if !parts.iter().all(|(id, _)| state.ready.contains(id)) {
            return None;
        }
        let hits = parts.into_iter().map(|(id, parts)| {
            let bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
            let block = state.take_ready(id, bytes, &self.counters)?;
            Some(BlockHit { id, block, parts })
        });
        hits.collect()
    }

    /// Hands out the blocks of some ranges that are ready, and queues waiters for the others.
    ///
    /// `waiters` gets the blocks that hold the ranges, and returns one waiter for each. If it returns none, or if the
    /// blocks are too many for one read, nothing has happened.
    pub fn join(
        &self,
        file_id: u64,
        ranges: &[SourceRange],
        priority: FillPriority,
        waiters: impl FnOnce(BlockParts) -> Option<Vec<(BlockId, Waiter)>>,
    ) -> Option<JoinResult> {
        let mut joined = JoinResult::default();
        let mut state = self.lock();
        let new = state.extents.insert_missing(file_id, ranges);
        let parts = state.extents.lookup(file_id, ranges, MAX_BLOCKS_PER_READ);
        let Some(waiters) = parts.and_then(waiters) else {
            new.into_iter().for_each(|id| state.extents.remove(id));
            return None;
        };
        let is_blocking = priority == FillPriority::Blocking;
        for (id, waiter) in waiters {
            if let Some(block) = state.take_ready(id, waiter.byte_count(), &self.counters) {
                joined.ready.push((id, block, waiter));
                continue;
            }
            let pending = state.pending.entry(id).or_default();
            pending.waiters.push(waiter);
            // A second job, if it is to be sooner: the first of them to run fills the block.
            let is_sooner = !pending.is_requested || is_blocking && !pending.is_blocking;
            if is_sooner && !pending.is_claimed {
                joined.to_fill.push(id);
            }
            pending.is_requested = true;
            pending.is_blocking |= is_blocking;
        }
        Some(joined)
    }

    /// Makes pending blocks for the bytes that no block holds, and returns these: the caller has them filled.
    pub fn reserve(&self, file_id: u64, ranges: &[SourceRange]) -> Vec<BlockId> {
        let mut state = self.lock();
        let new = state.extents.insert_missing(file_id, ranges);
        state.pending.extend(new.iter().map(|id| (*id, PendingBlock::default())));
        new
    }

    /// The blocks of some ranges that are not ready and that no job fills. Makes those that are missing.
    pub fn reserve_unclaimed(&self, file_id: u64, ranges: &[SourceRange]) -> Vec<BlockId> {
        let mut state = self.lock();
        let new = state.extents.insert_missing(file_id, ranges);
        state.pending.extend(new.into_iter().map(|id| (id, PendingBlock::default())));
        let blocks = ranges.iter().flat_map(|range| state.extents.overlapping(file_id, range));
        blocks.filter(|&id| state.is_unclaimed(id)).collect()
    }

    /// Whether any block that holds bytes of these ranges is pending.
    pub fn is_any_pending(&self, file_id: u64, ranges: &[SourceRange]) -> bool {
        let state = self.lock();
        let mut blocks = ranges.iter().flat_map(|range| state.extents.overlapping(file_id, range));
        blocks.any(|id| state.pending.contains_key(&id))
    }

    /// Whether a block is pending, and no job has claimed it.
    pub fn is_unclaimed(&self, id: BlockId) -> bool {
        self.lock().is_unclaimed(id)
    }

    /// Claims a pending block for one fill job; `false` if another has claimed or filled it.
    pub fn claim(&self, id: BlockId) -> bool {
        match self.lock().pending.get_mut(&id) {
            Some(pending) if !pending.is_claimed => {
                pending.is_claimed = true;
                true
            }
            _ => false,
        }
    }

    /// Whether a read has requested a block that is pending.
    pub fn is_requested(&self, id: BlockId) -> bool {
        self.lock().pending.get(&id).is_some_and(|pending| pending.is_requested)
    }

    /// Ends a claim: the block is ready, or `None` if it could not be filled. Returns its waiters.
    pub fn complete(&self, id: BlockId, block: Option<&Arc<Block>>) -> Vec<Waiter> {
        let mut state = self.lock();
        let Some(pending) = state.pending.remove(&id) else { return Vec::new() };
        let Some(block) = block else {
            state.extents.remove(id);
            return pending.waiters;
        };
        let ready = ReadyBlock {
            block: Arc::clone(block),
            requested_bytes: pending.waiters.iter().map(Waiter::byte_count).sum(),
            is_unused_prefetch: !pending.is_requested,
        };
        if ready.is_unused_prefetch {
            self.counters.prefetched.fetch_add(1, Relaxed);
        }
        let is_used_up = ready.is_used_up(id.source);
        state.ready.put(id, ready);
        if is_used_up {
            state.ready.demote(&id);
        }
        pending.waiters
    }

    /// Gives up a block that no job has claimed, and returns its waiters. A dropped prefetch leaves it to the jobs of
    /// the reads that have requested it since.
    pub fn cancel(&self, id: BlockId, is_prefetch: bool) -> Vec<Waiter> {
        let mut state = self.lock();
        match state.pending.get(&id) {
            Some(pending) if !(pending.is_claimed || is_prefetch && pending.is_requested) => {
                state.extents.remove(id);
                state.pending.remove(&id).map(|pending| pending.waiters).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// Takes a buffer to fill. The first choice is a used one, which is still in the processor's cache. Next is a new
    /// one, while the limit allows; then that of the block least recently used.
    pub fn take_buffer(&self, size: BufferSize) -> Option<Buffer> {
        if let Some(buffer) = self.pool.reuse(size) {
            return Some(buffer);
        }
        self.lock().evict(true, &self.counters);
        if let Some(buffer) = self.take_spare_buffer(size) {
            return Some(buffer);
        }
        let evict = || match size {
            BufferSize::Small => self.lock().evict(false, &self.counters),
            BufferSize::Large => self.evict_slab(),
        };
        while evict() {
            if let Some(buffer) = self.take_spare_buffer(size) {
                return Some(buffer);
            }
        }
        None
    }

    /// Takes a buffer that no other block needs: evicts none that is not used up.
    pub fn take_unneeded_buffer(&self, size: BufferSize) -> Option<Buffer> {
        loop {
            if let Some(buffer) = self.take_spare_buffer(size) {
                return Some(buffer);
            }
            if !self.lock().evict(true, &self.counters) {
                return None;
            }
        }
    }

    /// Takes a buffer if the limit has room for it beside all blocks.
    pub fn take_spare_buffer(&self, size: BufferSize) -> Option<Buffer> {
        self.pool.reuse(size).or_else(|| self.pool.allocate(size))
    }

    /// The bytes of all buffers, and their limit.
    pub fn held_and_limit(&self) -> (u64, u64) {
        self.pool.held_and_limit()
    }

    pub fn memory_limit(&self) -> u64 {
        self.held_and_limit().1
    }

    /// Sets the limit, which holds at once but for buffers in use.
    pub fn set_memory_limit(&self, bytes: u64) {
        self.pool.set_limit(bytes);
        self.shrink_to_limit();
    }

    /// Evicts blocks until the buffers are within the limit, if it was lowered.
    pub fn shrink_to_limit(&self) {
        let is_over = || {
            let (held, limit) = self.held_and_limit();
            held > limit
        };
        while is_over() && self.evict_slab() {}
    }

    /// Evicts all blocks of one slab, which can then be returned to the system. It is the slab of the block least
    /// recently used, of the slabs that are not in use otherwise. If there is none, evicts one block.
    fn evict_slab(&self) -> bool {
        let mut state = self.lock();
        let mut idle = self.pool.idle_by_slab();
        let evictable = state.ready.iter().rev().filter(|(_, ready)| ready.is_free());
        let with_slab = |(id, ready): (&BlockId, &ReadyBlock)| {
            let (slab, buffers) = ready.block.slab()?;
            Some((*id, slab, buffers))
        };
        let all: Vec<(BlockId, SlabId, usize)> = evictable.filter_map(with_slab).collect();
        all.iter().for_each(|(_, slab, _)| *idle.entry(*slab).or_default() += 1);
        let whole = all.iter().find(|(_, slab, buffers)| idle[slab] == *buffers);
        let Some(&(_, whole, _)) = whole else {
            return state.evict(false, &self.counters);
        };
        let ids = all.iter().filter(|(_, slab, _)| *slab == whole).map(|(id, ..)| *id);
        let evicted = state.remove_all(ids.collect());
        drop(state);
        self.count_wasted(&evicted);
        true
    }

    /// Removes all blocks of a closed file. With the last block all memory is returned to the system.
    pub fn remove_file(&self, file_id: u64) {
        let mut state = self.lock();
        let ids = state.ready.iter().map(|(id, _)| *id).filter(|id| id.file_id == file_id);
        let ids = ids.collect();
        let removed = state.remove_all(ids);
        let is_empty = state.ready.is_empty();
        drop(state);
        self.count_wasted(&removed);
        drop(removed);
        if is_empty {
            self.pool.release_idle();
        }
    }

    fn count_wasted(&self, evicted: &[ReadyBlock]) {
        let wasted = evicted.iter().filter(|ready| ready.is_unused_prefetch).count();
        self.counters.prefetch_wasted.fetch_add(wasted as u64, Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, TableState> {
        lock(&self.state)
    }
}

impl TableState {
    fn is_unclaimed(&self, id: BlockId) -> bool {
        self.pending.get(&id).is_some_and(|pending| !pending.is_claimed)
    }

    fn take_ready(
        &mut self,
        id: BlockId,
        bytes: u64,
        counters: &AtomicCounters,
    ) -> Option<Arc<Block>> {
        let ready = self.ready.get_mut(&id)?;
        ready.requested_bytes += bytes;
        if std::mem::take(&mut ready.is_unused_prefetch) {
            counters.prefetch_used.fetch_add(1, Relaxed);
        }
        let block = Arc::clone(&ready.block);
        // A block that was read through is evicted next. So reading a file from end to end takes no more than a few
        // buffers, and evicts nothing else.
        if ready.is_used_up(id.source) {
            self.ready.demote(&id);
        }
        Some(block)
    }

    fn remove_all(&mut self, ids: Vec<BlockId>) -> Vec<ReadyBlock> {
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    fn remove(&mut self, id: BlockId) -> Option<ReadyBlock> {
        self.extents.remove(id);
        self.ready.pop(&id)
    }

    /// Evicts the next block, or only one that is used up.
    fn evict(&mut self, only_used_up: bool, counters: &AtomicCounters) -> bool {
        let candidates = self.ready.iter().rev().take(MAX_EVICTION_CANDIDATES);
        let mut evictable = candidates.filter(|(id, ready)| {
            ready.is_free() && (!only_used_up || ready.is_used_up(id.source))
        });
        let Some(id) = evictable.next().map(|(id, _)| *id) else { return false };
        if self.remove(id).is_some_and(|ready| ready.is_unused_prefetch) {
            counters.prefetch_wasted.fetch_add(1, Relaxed);
        }
        true
    }
}

/// The ranges of the ready and the pending blocks, of which no two overlap. A pure structure.
#[derive(Debug, Default)]
struct ExtentIndex(BTreeSet<BlockId>);

impl ExtentIndex {
    /// Finds the blocks that hold all bytes of some ranges. `None` if no block holds one of the bytes, or if there are
    /// more blocks than `max_blocks`.
    fn lookup(
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
    fn insert_missing(&mut self, file_id: u64, ranges: &[SourceRange]) -> Vec<BlockId> {
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
    fn overlapping(&self, file_id: u64, range: &SourceRange) -> impl Iterator<Item = BlockId> {
        self.blocks_in(file_id, range.source, range.bytes.clone())
    }

    fn remove(&mut self, block: BlockId) {
        self.0.remove(&block);
    }

    /// The block that holds this byte of a range. The error is the block that is missing for it.
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

/// Adds the part of a range that a block holds from the byte `at` on, and returns the end of the part.
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
#[path = "table_tests.rs"]
mod tests;
