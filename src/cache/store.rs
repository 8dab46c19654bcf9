//! The blocks: which are there, which are being filled, who waits for them, and which goes next.
//!
//! In: names of blocks. Out: their bytes if they are there, or a place in the queue of those who
//! wait; a block is filled once however many wait. The lock is held to look and to note, never
//! while bytes are read or copied.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use lru::LruCache;

use crate::threads::lock;

use super::counters::Counting;
use super::pool::{Buffer, Pool, Size};
use super::request::Waiter;

/// The name of a block: of which open image, of what, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId {
    pub served: u64,
    pub of: Of,
    pub number: u64,
}

/// What blocks are counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Of {
    /// A source file, by its origin.
    File(u32),
    /// A tensor that has to be gathered or turned round, by its place in the image.
    Tensor(u32),
}

/// Bytes that were read, and do not change any more.
#[derive(Debug)]
pub struct Block {
    buffer: Buffer,
    len: usize,
}

impl Block {
    pub fn new(buffer: Buffer, len: usize) -> Block {
        Block { buffer, len }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

/// A block is used up once all but a sixteenth of it was asked for: what lies between tensors
/// never is.
const SPARE: u64 = 16;

/// Blocks looked at for one that can go. Those that cannot are being copied to a reader just now,
/// and there are not more of them than threads that do so.
const LOOK_AT: usize = 64;

#[derive(Debug)]
struct Ready {
    block: Arc<Block>,
    /// Bytes that were asked for.
    used: u64,
    /// Read ahead of time, and not asked for yet.
    unasked: bool,
}

impl Ready {
    fn is_used_up(&self) -> bool {
        let len = self.block.len as u64;
        self.used >= len - len / SPARE
    }

    /// Nobody else has it. Only the store hands blocks out, under its lock.
    fn is_free(&self) -> bool {
        Arc::strong_count(&self.block) == 1
    }
}

#[derive(Default)]
struct Filling {
    waiters: Vec<Waiter>,
    /// Somebody wants it now.
    wanted: bool,
    begun: bool,
}

pub struct Store {
    pub pool: Arc<Pool>,
    counting: Arc<Counting>,
    blocks: Mutex<Blocks>,
}

struct Blocks {
    ready: LruCache<BlockId, Ready>,
    filling: HashMap<BlockId, Filling>,
}

/// What became of a read's wish for blocks.
#[derive(Default)]
pub struct Joined {
    /// These are there, for those who want them.
    pub ready: Vec<(BlockId, Arc<Block>, Waiter)>,
    /// These are to be filled now.
    pub to_fill: Vec<BlockId>,
}

impl Store {
    pub fn new(memory: u64, counting: Arc<Counting>) -> Store {
        let blocks = Blocks { ready: LruCache::unbounded(), filling: HashMap::new() };
        Store { pool: Pool::new(memory), counting, blocks: Mutex::new(blocks) }
    }

    /// The blocks, if all are there; of each so many bytes are about to be used.
    pub fn get_all(
        &self,
        wanted: impl Iterator<Item = (BlockId, u64)> + Clone,
    ) -> Option<Vec<Arc<Block>>> {
        let mut blocks = self.lock();
        if !wanted.clone().all(|(id, _)| blocks.ready.contains(&id)) {
            return None;
        }
        wanted.map(|(id, bytes)| blocks.get(id, bytes, &self.counting)).collect()
    }

    /// Hands out the blocks that are there, and has their readers wait for the others.
    pub fn join(&self, wanted: impl Iterator<Item = (BlockId, Waiter)>) -> Joined {
        let mut joined = Joined::default();
        let mut blocks = self.lock();
        for (id, waiter) in wanted {
            if let Some(block) = blocks.get(id, waiter.wanted(), &self.counting) {
                joined.ready.push((id, block, waiter));
                continue;
            }
            let filling = blocks.filling.entry(id).or_default();
            filling.waiters.push(waiter);
            if !filling.wanted && !filling.begun {
                joined.to_fill.push(id);
            }
            filling.wanted = true;
        }
        joined
    }

    /// Whether a block is neither there nor about to be; from now on it is about to be.
    pub fn announce(&self, id: BlockId) -> bool {
        let mut blocks = self.lock();
        if blocks.ready.contains(&id) || blocks.filling.contains_key(&id) {
            return false;
        }
        blocks.filling.insert(id, Filling::default());
        true
    }

    /// Whether a block still waits to be filled and nobody does it; from now on somebody does.
    pub fn begin(&self, id: BlockId) -> bool {
        match self.lock().filling.get_mut(&id) {
            Some(filling) if !filling.begun => {
                filling.begun = true;
                true
            }
            _ => false,
        }
    }

    /// Whether a block is being filled, or about to be.
    pub fn is_coming(&self, id: BlockId) -> bool {
        self.lock().filling.contains_key(&id)
    }

    /// Whether somebody waits for a block that is not there.
    pub fn is_wanted(&self, id: BlockId) -> bool {
        self.lock().filling.get(&id).is_some_and(|filling| filling.wanted)
    }

    /// A block that was begun is filled, or cannot be: those who waited for it.
    pub fn finish(&self, id: BlockId, block: Option<&Arc<Block>>) -> Vec<Waiter> {
        let mut blocks = self.lock();
        let Some(filling) = blocks.filling.remove(&id) else { return Vec::new() };
        if let Some(block) = block {
            let used = filling.waiters.iter().map(Waiter::wanted).sum();
            let ready = Ready { block: Arc::clone(block), used, unasked: !filling.wanted };
            if ready.unasked {
                self.counting.prefetched.one();
            }
            let used_up = ready.is_used_up();
            blocks.ready.put(id, ready);
            if used_up {
                blocks.ready.demote(&id);
            }
        }
        filling.waiters
    }

    /// A block will not be filled by whoever was to: those who wait in vain. `ahead` if it was to
    /// be filled ahead of time, and so is left to others if somebody came to want it.
    pub fn abandon(&self, id: BlockId, ahead: bool) -> Vec<Waiter> {
        let mut blocks = self.lock();
        match blocks.filling.get(&id) {
            Some(filling) if !(filling.begun || ahead && filling.wanted) => {
                blocks.filling.remove(&id).map(|filling| filling.waiters).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// A buffer to fill: one that was used up if there is one, for it is still in the processor's
    /// cache; otherwise fresh while the limit allows; otherwise that of the block longest unused.
    pub fn buffer(&self, size: Size) -> Option<Buffer> {
        if let Some(buffer) = self.pool.used(size) {
            return Some(buffer);
        }
        self.lock().evict(true, &self.counting);
        if let Some(buffer) = self.pool.used(size).or_else(|| self.pool.fresh(size)) {
            return Some(buffer);
        }
        while self.lock().evict(false, &self.counting) {
            if let Some(buffer) = self.pool.used(size).or_else(|| self.pool.fresh(size)) {
                return Some(buffer);
            }
        }
        None
    }

    /// Another limit, which holds at once but for what is being read or copied.
    pub fn set_memory(&self, bytes: u64) {
        self.pool.set_limit(bytes);
        self.shrink();
    }

    /// Lets go of blocks until what is held is within the limit, if one was set below it.
    pub fn shrink(&self) {
        let over = || {
            let (held, limit) = self.pool.held_and_limit();
            held > limit
        };
        while over() && self.lock().evict(false, &self.counting) {}
    }

    /// Lets go of all blocks of an image that is closed, and of all memory with the last of them.
    pub fn forget(&self, served: u64) {
        let mut blocks = self.lock();
        let gone: Vec<BlockId> =
            blocks.ready.iter().filter(|(id, _)| id.served == served).map(|(id, _)| *id).collect();
        let gone: Vec<Ready> = gone.iter().filter_map(|id| blocks.ready.pop(id)).collect();
        let none_left = blocks.ready.is_empty();
        drop(blocks);
        self.counting.prefetch_wasted.add(gone.iter().filter(|ready| ready.unasked).count() as u64);
        drop(gone);
        if none_left {
            self.pool.trim();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        lock(&self.blocks)
    }
}

impl Blocks {
    fn get(&mut self, id: BlockId, bytes: u64, counting: &Counting) -> Option<Arc<Block>> {
        let ready = self.ready.get_mut(&id)?;
        ready.used += bytes;
        if std::mem::take(&mut ready.unasked) {
            counting.prefetch_used.one();
        }
        let block = Arc::clone(&ready.block);
        // What was read through is the next to go, so that reading a file from end to end takes
        // no more than a few buffers and pushes nothing else out.
        if ready.is_used_up() {
            self.ready.demote(&id);
        }
        Some(block)
    }

    /// Lets go of the block that is next to go, or only of one that is used up.
    fn evict(&mut self, used_up: bool, counting: &Counting) -> bool {
        let next = self.ready.iter().rev().take(LOOK_AT);
        let mut free =
            next.filter(|(_, ready)| ready.is_free() && (!used_up || ready.is_used_up()));
        let Some(id) = free.next().map(|(id, _)| *id) else { return false };
        if self.ready.pop(&id).is_some_and(|ready| ready.unasked) {
            counting.prefetch_wasted.one();
        }
        true
    }
}
