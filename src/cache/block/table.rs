//! The blocks: which are there, which are being filled, who waits for them, and which goes next.
//!
//! In: pieces that are wanted. Out: the blocks that have them if they are there, or a place in the queue of
//! those who wait; a block is filled once however many wait. The lock is held to look and to note, never while
//! bytes are read or copied.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use lru::LruCache;

use crate::threads::lock;

use crate::cache::block::extents::{BlockParts, ExtentIndex, SourceRange};
use crate::cache::block::fill::FillPriority;
use crate::cache::block::pool::{BlockPool, Buffer, BufferSize, SlabId};
use crate::cache::counters::AtomicCounters;
use crate::cache::io::reply::{BlockPart, Waiter};

/// The name of a block: of which open virtual file, of what, and which bytes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId {
    pub file_id: u64,
    pub source: BlockSource,
    pub start: u64,
    pub end: u64,
}

/// What blocks are counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockSource {
    /// A source file, by its origin.
    File(u32),
    /// A tensor that has to be gathered or turned round, by its place in the virtual file.
    Tensor(u32),
}

/// Bytes that were read, and do not change any more.
#[derive(Debug)]
pub struct Block {
    buffer: Buffer,
    /// Where in it they are.
    bytes: Range<usize>,
}

impl Block {
    pub fn new(buffer: Buffer, bytes: Range<usize>) -> Block {
        Block { buffer, bytes }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.bytes.clone()]
    }
}

/// A block is used up once all but a sixteenth of it was asked for: what lies between tensors
/// never is.
const UNUSED_SHARE_DIVISOR: u64 = 16;

/// Blocks that one read is put together from. A read of more small pieces than this, far apart, is
/// made piece by piece: whole blocks would read many times what is wanted.
pub const MAX_BLOCKS_PER_READ: usize = 8;

/// Blocks looked at for one that can go. Those that cannot are being copied to a reader just now,
/// and there are not more of them than threads that do so.
const MAX_EVICTION_CANDIDATES: usize = 64;

#[derive(Debug)]
struct ReadyBlock {
    block: Arc<Block>,
    /// Bytes that were asked for.
    requested_bytes: u64,
    /// Read ahead of time, and not asked for yet.
    is_unused_prefetch: bool,
}

impl ReadyBlock {
    fn is_used_up(&self) -> bool {
        let len = self.block.bytes.len() as u64;
        self.requested_bytes >= len - len / UNUSED_SHARE_DIVISOR
    }

    /// Nobody else has it. Only the store hands blocks out, under its lock.
    fn is_free(&self) -> bool {
        Arc::strong_count(&self.block) == 1
    }
}

#[derive(Default)]
struct PendingBlock {
    waiters: Vec<Waiter>,
    /// Somebody asked for it.
    is_requested: bool,
    /// Somebody waits for it.
    is_blocking: bool,
    is_claimed: bool,
}

pub struct BlockTable {
    pub pool: Arc<BlockPool>,
    counters: Arc<AtomicCounters>,
    state: Mutex<TableState>,
}

struct TableState {
    /// Those of `ready` and `filling`.
    extents: ExtentIndex,
    ready: LruCache<BlockId, ReadyBlock>,
    pending: HashMap<BlockId, PendingBlock>,
}

/// A block that is there, and what of it is wanted.
pub struct BlockHit {
    pub id: BlockId,
    pub block: Arc<Block>,
    pub parts: Vec<BlockPart>,
}

/// What became of a read's wish for blocks.
#[derive(Default)]
pub struct JoinResult {
    /// These are there, for those who want them.
    pub ready: Vec<(BlockId, Arc<Block>, Waiter)>,
    /// These are to be filled.
    pub to_fill: Vec<BlockId>,
}

impl BlockTable {
    pub fn new(memory: u64, counting: Arc<AtomicCounters>) -> BlockTable {
        let (cover, filling) = Default::default();
        let blocks = TableState { extents: cover, ready: LruCache::unbounded(), pending: filling };
        BlockTable { pool: BlockPool::new(memory), counters: counting, state: Mutex::new(blocks) }
    }

    /// The blocks that have some pieces, if all are there.
    pub fn lookup(&self, served: u64, pieces: &[SourceRange]) -> Option<Vec<BlockHit>> {
        let mut blocks = self.lock();
        let parts = blocks.extents.lookup(served, pieces, usize::MAX)?;
        if !parts.iter().all(|(id, _)| blocks.ready.contains(id)) {
            return None;
        }
        let found = parts.into_iter().map(|(id, parts)| {
            let bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
            let block = blocks.get(id, bytes, &self.counters)?;
            Some(BlockHit { id, block, parts })
        });
        found.collect()
    }

    /// Hands out the blocks that are there, and has their readers wait for the others. `waiters` are told which
    /// blocks have the pieces, and give one waiter for each; or none, and then nothing has happened. Nor if the
    /// blocks are too many for one read.
    pub fn join(
        &self,
        served: u64,
        pieces: &[SourceRange],
        why: FillPriority,
        waiters: impl FnOnce(BlockParts) -> Option<Vec<(BlockId, Waiter)>>,
    ) -> Option<JoinResult> {
        let mut joined = JoinResult::default();
        let mut blocks = self.lock();
        let new = blocks.extents.insert_missing(served, pieces);
        let parts = blocks.extents.lookup(served, pieces, MAX_BLOCKS_PER_READ);
        let Some(waiters) = parts.and_then(waiters) else {
            new.into_iter().for_each(|id| blocks.extents.remove(id));
            return None;
        };
        for (id, waiter) in waiters {
            if let Some(block) = blocks.get(id, waiter.byte_count(), &self.counters) {
                joined.ready.push((id, block, waiter));
                continue;
            }
            let filling = blocks.pending.entry(id).or_default();
            filling.waiters.push(waiter);
            // Once more if that is to be sooner: whoever is first fills it.
            let is_sooner =
                !filling.is_requested || why == FillPriority::Blocking && !filling.is_blocking;
            if is_sooner && !filling.is_claimed {
                joined.to_fill.push(id);
            }
            filling.is_requested = true;
            filling.is_blocking |= why == FillPriority::Blocking;
        }
        Some(joined)
    }

    /// Blocks for what no other has of some pieces, nor is about to: from now on these are about to.
    pub fn reserve(&self, served: u64, pieces: &[SourceRange]) -> Vec<BlockId> {
        let mut blocks = self.lock();
        let new = blocks.extents.insert_missing(served, pieces);
        blocks.pending.extend(new.iter().map(|id| (*id, PendingBlock::default())));
        new
    }

    /// Whether any block that has something of these pieces is being filled, or about to be.
    pub fn is_any_pending(&self, served: u64, pieces: &[SourceRange]) -> bool {
        let blocks = self.lock();
        let mut touching =
            pieces.iter().flat_map(|piece| blocks.extents.overlapping(served, piece));
        touching.any(|id| blocks.pending.contains_key(&id))
    }

    /// Whether a block still waits to be filled and nobody does it; from now on somebody does.
    pub fn claim(&self, id: BlockId) -> bool {
        match self.lock().pending.get_mut(&id) {
            Some(filling) if !filling.is_claimed => {
                filling.is_claimed = true;
                true
            }
            _ => false,
        }
    }

    /// Whether somebody waits for a block that is not there.
    pub fn is_requested(&self, id: BlockId) -> bool {
        self.lock().pending.get(&id).is_some_and(|filling| filling.is_requested)
    }

    /// A block that was begun is filled, or cannot be: those who waited for it.
    pub fn complete(&self, id: BlockId, block: Option<&Arc<Block>>) -> Vec<Waiter> {
        let mut blocks = self.lock();
        let Some(filling) = blocks.pending.remove(&id) else { return Vec::new() };
        let Some(block) = block else {
            blocks.extents.remove(id);
            return filling.waiters;
        };
        let used = filling.waiters.iter().map(Waiter::byte_count).sum();
        let ready = ReadyBlock {
            block: Arc::clone(block),
            requested_bytes: used,
            is_unused_prefetch: !filling.is_requested,
        };
        if ready.is_unused_prefetch {
            self.counters.prefetched.increment();
        }
        let used_up = ready.is_used_up();
        blocks.ready.put(id, ready);
        if used_up {
            blocks.ready.demote(&id);
        }
        filling.waiters
    }

    /// A block will not be filled by whoever was to: those who wait in vain. `ahead` if it was to
    /// be filled ahead of time, and so is left to others if somebody came to want it.
    pub fn cancel(&self, id: BlockId, ahead: bool) -> Vec<Waiter> {
        let mut blocks = self.lock();
        match blocks.pending.get(&id) {
            Some(filling) if !(filling.is_claimed || ahead && filling.is_requested) => {
                blocks.extents.remove(id);
                blocks.pending.remove(&id).map(|filling| filling.waiters).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// A buffer to fill: one that was used up if there is one, for it is still in the processor's
    /// cache; otherwise fresh while the limit allows; otherwise that of the block longest unused.
    pub fn take_buffer(&self, size: BufferSize) -> Option<Buffer> {
        if let Some(buffer) = self.pool.reuse(size) {
            return Some(buffer);
        }
        self.lock().evict(true, &self.counters);
        if let Some(buffer) = self.pool.reuse(size).or_else(|| self.pool.allocate(size)) {
            return Some(buffer);
        }
        let evict = || match size {
            BufferSize::Small => self.lock().evict(false, &self.counters),
            BufferSize::Large => self.evict_slab(),
        };
        while evict() {
            if let Some(buffer) = self.pool.reuse(size).or_else(|| self.pool.allocate(size)) {
                return Some(buffer);
            }
        }
        None
    }

    /// Another limit, which holds at once but for what is being read or copied.
    pub fn set_memory_limit(&self, bytes: u64) {
        self.pool.set_limit(bytes);
        self.shrink_to_limit();
    }

    /// Lets go of blocks until what is held is within the limit, if one was set below it.
    pub fn shrink_to_limit(&self) {
        let over = || {
            let (held, limit) = self.pool.held_and_limit();
            held > limit
        };
        while over() && self.evict_slab() {}
    }

    /// Lets go of all blocks of a slab, which then can be given back to the system: of the slab that has the block
    /// longest unused, of those of which nothing else is in use. If there is none, of the block longest unused.
    fn evict_slab(&self) -> bool {
        let mut blocks = self.lock();
        let mut free = self.pool.idle_by_slab();
        let ready = blocks.ready.iter().rev().filter(|(_, ready)| ready.is_free());
        let of = |(id, ready): (&BlockId, &ReadyBlock)| {
            let (slab, buffers) = ready.block.buffer.slab()?;
            Some((*id, slab, buffers))
        };
        let all: Vec<(BlockId, SlabId, usize)> = ready.filter_map(of).collect();
        all.iter().for_each(|(_, slab, _)| *free.entry(*slab).or_default() += 1);
        let whole = all.iter().find(|(_, slab, buffers)| free[slab] == *buffers);
        let Some(&(_, whole, _)) = whole else {
            return blocks.evict(false, &self.counters);
        };
        let gone = all.iter().filter(|(_, slab, _)| *slab == whole);
        let gone: Vec<ReadyBlock> = gone.filter_map(|(id, ..)| blocks.remove(id)).collect();
        drop(blocks);
        self.counters
            .prefetch_wasted
            .add(gone.iter().filter(|ready| ready.is_unused_prefetch).count() as u64);
        true
    }

    /// Lets go of all blocks of a virtual file that is closed, and of all memory with the last of them.
    pub fn remove_file(&self, served: u64) {
        let mut blocks = self.lock();
        let gone: Vec<BlockId> =
            blocks.ready.iter().filter(|(id, _)| id.file_id == served).map(|(id, _)| *id).collect();
        let gone: Vec<ReadyBlock> = gone.iter().filter_map(|id| blocks.remove(id)).collect();
        let none_left = blocks.ready.is_empty();
        drop(blocks);
        self.counters
            .prefetch_wasted
            .add(gone.iter().filter(|ready| ready.is_unused_prefetch).count() as u64);
        drop(gone);
        if none_left {
            self.pool.release_idle();
        }
    }

    fn lock(&self) -> MutexGuard<'_, TableState> {
        lock(&self.state)
    }
}

impl TableState {
    fn get(&mut self, id: BlockId, bytes: u64, counting: &AtomicCounters) -> Option<Arc<Block>> {
        let ready = self.ready.get_mut(&id)?;
        ready.requested_bytes += bytes;
        if std::mem::take(&mut ready.is_unused_prefetch) {
            counting.prefetch_used.increment();
        }
        let block = Arc::clone(&ready.block);
        // What was read through is the next to go, so that reading a file from end to end takes
        // no more than a few buffers and pushes nothing else out.
        if ready.is_used_up() {
            self.ready.demote(&id);
        }
        Some(block)
    }

    fn remove(&mut self, id: &BlockId) -> Option<ReadyBlock> {
        self.extents.remove(*id);
        self.ready.pop(id)
    }

    /// Lets go of the block that is next to go, or only of one that is used up.
    fn evict(&mut self, used_up: bool, counting: &AtomicCounters) -> bool {
        let next = self.ready.iter().rev().take(MAX_EVICTION_CANDIDATES);
        let mut free =
            next.filter(|(_, ready)| ready.is_free() && (!used_up || ready.is_used_up()));
        let Some(id) = free.next().map(|(id, _)| *id) else { return false };
        if self.remove(&id).is_some_and(|ready| ready.is_unused_prefetch) {
            counting.prefetch_wasted.increment();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::io::reply::PendingReply;

    const MIB: u64 = 1 << 20;

    #[test]
    fn room_that_is_needed_costs_the_blocks_of_one_slab_and_no_more() {
        let store = BlockTable::new(160 * MIB, Arc::default());
        let mut buffers: Vec<Buffer> =
            (0..150).map(|_| store.take_buffer(BufferSize::Small).unwrap()).collect();
        for n in 0..150 {
            // Blocks come in an order that is none of their slabs'.
            let buffer = buffers.swap_remove(n * 37 % buffers.len());
            let bytes = n as u64 * MIB..(n as u64 + 1) * MIB;
            let piece = SourceRange {
                source: BlockSource::File(0),
                bytes: bytes.clone(),
                reply_offset: 0,
                block_bounds: bytes,
            };
            let [id] = *store.reserve(1, &[piece]) else { panic!() };
            assert!(store.claim(id));
            store.complete(id, Some(&Arc::new(Block::new(buffer, 0..MIB as usize))));
        }
        let ready = || store.lock().ready.len();
        assert_eq!(ready(), 150);
        store.set_memory_limit(160 * MIB - 1);
        assert_eq!(ready(), 135);
        let large = [(); 2].map(|()| store.take_buffer(BufferSize::Large).unwrap());
        assert_eq!(ready(), 120);
        assert!(store.pool.held_and_limit().0 < 160 * MIB);
        drop(large);
        store.remove_file(1);
        assert_eq!(store.pool.held_and_limit().0, 0);
        assert_eq!(store.reserve(1, &[]), []);
    }

    #[test]
    fn a_block_that_is_wanted_soon_and_then_now_is_filled_for_both_by_whoever_is_first() {
        let store = BlockTable::new(16 * MIB, Arc::default());
        let piece = SourceRange {
            source: BlockSource::File(0),
            bytes: 0..MIB,
            reply_offset: 0,
            block_bounds: 0..MIB,
        };
        let (say, said) = std::sync::mpsc::channel();
        let join = |why| {
            let say = say.clone();
            let done = Box::new(move |answer: Result<&[u8], &crate::cache::CacheError>| {
                say.send(answer.is_ok()).unwrap();
            });
            let answer = PendingReply::new(done, Arc::default());
            let waiter = |parts: BlockParts| Some(vec![(parts[0].0, Waiter::Direct(0..1, answer))]);
            let joined = store.join(1, std::slice::from_ref(&piece), why, waiter).unwrap();
            assert!(joined.ready.is_empty());
            joined.to_fill
        };
        let [id] = *join(FillPriority::Deferred) else { panic!() };
        assert_eq!(join(FillPriority::Deferred), []);
        assert_eq!(join(FillPriority::Blocking), [id]);
        assert_eq!(join(FillPriority::Blocking), []);
        assert!(store.claim(id) && !store.claim(id));
        assert_eq!(join(FillPriority::Blocking), []);
        let block =
            Arc::new(Block::new(store.take_buffer(BufferSize::Small).unwrap(), 0..MIB as usize));
        let waiters = store.complete(id, Some(&block));
        waiters.into_iter().for_each(|waiter| waiter.complete(Ok(block.bytes())));
        drop(say);
        assert_eq!(said.iter().collect::<Vec<_>>(), [true; 5]);
    }
}
