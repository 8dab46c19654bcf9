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

use super::counters::Counting;
use super::extent_index::{Cover, Parts, Piece};
use super::fill::Why;
use super::pool::{Buffer, Pool, Size, SlabId};
use super::reply::{Part, Waiter};

/// The name of a block: of which open image, of what, and which bytes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId {
    pub served: u64,
    pub of: Of,
    pub start: u64,
    pub end: u64,
}

/// What blocks are counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
const SPARE: u64 = 16;

/// Blocks that one read is put together from. A read of more small pieces than this, far apart, is
/// made piece by piece: whole blocks would read many times what is wanted.
pub const MOST_BLOCKS: usize = 8;

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
        let len = self.block.bytes.len() as u64;
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
    /// Somebody asked for it.
    wanted: bool,
    /// Somebody waits for it.
    now: bool,
    begun: bool,
}

pub struct Store {
    pub pool: Arc<Pool>,
    counting: Arc<Counting>,
    blocks: Mutex<Blocks>,
}

struct Blocks {
    /// Those of `ready` and `filling`.
    cover: Cover,
    ready: LruCache<BlockId, Ready>,
    filling: HashMap<BlockId, Filling>,
}

/// A block that is there, and what of it is wanted.
pub struct Found {
    pub id: BlockId,
    pub block: Arc<Block>,
    pub parts: Vec<Part>,
}

/// What became of a read's wish for blocks.
#[derive(Default)]
pub struct Joined {
    /// These are there, for those who want them.
    pub ready: Vec<(BlockId, Arc<Block>, Waiter)>,
    /// These are to be filled.
    pub to_fill: Vec<BlockId>,
}

impl Store {
    pub fn new(memory: u64, counting: Arc<Counting>) -> Store {
        let (cover, filling) = Default::default();
        let blocks = Blocks { cover, ready: LruCache::unbounded(), filling };
        Store { pool: Pool::new(memory), counting, blocks: Mutex::new(blocks) }
    }

    /// The blocks that have some pieces, if all are there.
    pub fn get_all(&self, served: u64, pieces: &[Piece]) -> Option<Vec<Found>> {
        let mut blocks = self.lock();
        let parts = blocks.cover.covered(served, pieces, usize::MAX)?;
        if !parts.iter().all(|(id, _)| blocks.ready.contains(id)) {
            return None;
        }
        let found = parts.into_iter().map(|(id, parts)| {
            let bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
            let block = blocks.get(id, bytes, &self.counting)?;
            Some(Found { id, block, parts })
        });
        found.collect()
    }

    /// Hands out the blocks that are there, and has their readers wait for the others. `waiters` are told which
    /// blocks have the pieces, and give one waiter for each; or none, and then nothing has happened. Nor if the
    /// blocks are too many for one read.
    pub fn join(
        &self,
        served: u64,
        pieces: &[Piece],
        why: Why,
        waiters: impl FnOnce(Parts) -> Option<Vec<(BlockId, Waiter)>>,
    ) -> Option<Joined> {
        let mut joined = Joined::default();
        let mut blocks = self.lock();
        let new = blocks.cover.cover(served, pieces);
        let parts = blocks.cover.covered(served, pieces, MOST_BLOCKS);
        let Some(waiters) = parts.and_then(waiters) else {
            new.into_iter().for_each(|id| blocks.cover.remove(id));
            return None;
        };
        for (id, waiter) in waiters {
            if let Some(block) = blocks.get(id, waiter.wanted(), &self.counting) {
                joined.ready.push((id, block, waiter));
                continue;
            }
            let filling = blocks.filling.entry(id).or_default();
            filling.waiters.push(waiter);
            // Once more if that is to be sooner: whoever is first fills it.
            let is_sooner = !filling.wanted || why == Why::Now && !filling.now;
            if is_sooner && !filling.begun {
                joined.to_fill.push(id);
            }
            filling.wanted = true;
            filling.now |= why == Why::Now;
        }
        Some(joined)
    }

    /// Blocks for what no other has of some pieces, nor is about to: from now on these are about to.
    pub fn announce(&self, served: u64, pieces: &[Piece]) -> Vec<BlockId> {
        let mut blocks = self.lock();
        let new = blocks.cover.cover(served, pieces);
        blocks.filling.extend(new.iter().map(|id| (*id, Filling::default())));
        new
    }

    /// Whether any block that has something of these pieces is being filled, or about to be.
    pub fn is_coming(&self, served: u64, pieces: &[Piece]) -> bool {
        let blocks = self.lock();
        let mut touching = pieces.iter().flat_map(|piece| blocks.cover.touching(served, piece));
        touching.any(|id| blocks.filling.contains_key(&id))
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

    /// Whether somebody waits for a block that is not there.
    pub fn is_wanted(&self, id: BlockId) -> bool {
        self.lock().filling.get(&id).is_some_and(|filling| filling.wanted)
    }

    /// A block that was begun is filled, or cannot be: those who waited for it.
    pub fn finish(&self, id: BlockId, block: Option<&Arc<Block>>) -> Vec<Waiter> {
        let mut blocks = self.lock();
        let Some(filling) = blocks.filling.remove(&id) else { return Vec::new() };
        let Some(block) = block else {
            blocks.cover.remove(id);
            return filling.waiters;
        };
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
        filling.waiters
    }

    /// A block will not be filled by whoever was to: those who wait in vain. `ahead` if it was to
    /// be filled ahead of time, and so is left to others if somebody came to want it.
    pub fn abandon(&self, id: BlockId, ahead: bool) -> Vec<Waiter> {
        let mut blocks = self.lock();
        match blocks.filling.get(&id) {
            Some(filling) if !(filling.begun || ahead && filling.wanted) => {
                blocks.cover.remove(id);
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
        let evict = || match size {
            Size::Small => self.lock().evict(false, &self.counting),
            Size::Large => self.evict_slab(),
        };
        while evict() {
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
        while over() && self.evict_slab() {}
    }

    /// Lets go of all blocks of a slab, which then can be given back to the system: of the slab that has the block
    /// longest unused, of those of which nothing else is in use. If there is none, of the block longest unused.
    fn evict_slab(&self) -> bool {
        let mut blocks = self.lock();
        let mut free = self.pool.resting();
        let ready = blocks.ready.iter().rev().filter(|(_, ready)| ready.is_free());
        let of = |(id, ready): (&BlockId, &Ready)| {
            let (slab, buffers) = ready.block.buffer.slab()?;
            Some((*id, slab, buffers))
        };
        let all: Vec<(BlockId, SlabId, usize)> = ready.filter_map(of).collect();
        all.iter().for_each(|(_, slab, _)| *free.entry(*slab).or_default() += 1);
        let whole = all.iter().find(|(_, slab, buffers)| free[slab] == *buffers);
        let Some(&(_, whole, _)) = whole else {
            return blocks.evict(false, &self.counting);
        };
        let gone = all.iter().filter(|(_, slab, _)| *slab == whole);
        let gone: Vec<Ready> = gone.filter_map(|(id, ..)| blocks.remove(id)).collect();
        drop(blocks);
        self.counting.prefetch_wasted.add(gone.iter().filter(|ready| ready.unasked).count() as u64);
        true
    }

    /// Lets go of all blocks of an image that is closed, and of all memory with the last of them.
    pub fn forget(&self, served: u64) {
        let mut blocks = self.lock();
        let gone: Vec<BlockId> =
            blocks.ready.iter().filter(|(id, _)| id.served == served).map(|(id, _)| *id).collect();
        let gone: Vec<Ready> = gone.iter().filter_map(|id| blocks.remove(id)).collect();
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

    fn remove(&mut self, id: &BlockId) -> Option<Ready> {
        self.cover.remove(*id);
        self.ready.pop(id)
    }

    /// Lets go of the block that is next to go, or only of one that is used up.
    fn evict(&mut self, used_up: bool, counting: &Counting) -> bool {
        let next = self.ready.iter().rev().take(LOOK_AT);
        let mut free =
            next.filter(|(_, ready)| ready.is_free() && (!used_up || ready.is_used_up()));
        let Some(id) = free.next().map(|(id, _)| *id) else { return false };
        if self.remove(&id).is_some_and(|ready| ready.unasked) {
            counting.prefetch_wasted.one();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::reply::Answer;
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn room_that_is_needed_costs_the_blocks_of_one_slab_and_no_more() {
        let store = Store::new(160 * MIB, Arc::default());
        let mut buffers: Vec<Buffer> =
            (0..150).map(|_| store.buffer(Size::Small).unwrap()).collect();
        for n in 0..150 {
            // Blocks come in an order that is none of their slabs'.
            let buffer = buffers.swap_remove(n * 37 % buffers.len());
            let bytes = n as u64 * MIB..(n as u64 + 1) * MIB;
            let piece = Piece { of: Of::File(0), bytes: bytes.clone(), at: 0, within: bytes };
            let [id] = *store.announce(1, &[piece]) else { panic!() };
            assert!(store.begin(id));
            store.finish(id, Some(&Arc::new(Block::new(buffer, 0..MIB as usize))));
        }
        let ready = || store.lock().ready.len();
        assert_eq!(ready(), 150);
        store.set_memory(160 * MIB - 1);
        assert_eq!(ready(), 135);
        let large = [(); 2].map(|()| store.buffer(Size::Large).unwrap());
        assert_eq!(ready(), 120);
        assert!(store.pool.held_and_limit().0 < 160 * MIB);
        drop(large);
        store.forget(1);
        assert_eq!(store.pool.held_and_limit().0, 0);
        assert_eq!(store.announce(1, &[]), []);
    }

    #[test]
    fn a_block_that_is_wanted_soon_and_then_now_is_filled_for_both_by_whoever_is_first() {
        let store = Store::new(16 * MIB, Arc::default());
        let piece = Piece { of: Of::File(0), bytes: 0..MIB, at: 0, within: 0..MIB };
        let (say, said) = std::sync::mpsc::channel();
        let join = |why| {
            let say = say.clone();
            let done = Box::new(move |answer: Result<&[u8], &super::super::Error>| {
                say.send(answer.is_ok()).unwrap();
            });
            let answer = Answer::new(done, Arc::default());
            let waiter = |parts: Parts| Some(vec![(parts[0].0, Waiter::Whole(0..1, answer))]);
            let joined = store.join(1, std::slice::from_ref(&piece), why, waiter).unwrap();
            assert!(joined.ready.is_empty());
            joined.to_fill
        };
        let [id] = *join(Why::Soon) else { panic!() };
        assert_eq!(join(Why::Soon), []);
        assert_eq!(join(Why::Now), [id]);
        assert_eq!(join(Why::Now), []);
        assert!(store.begin(id) && !store.begin(id));
        assert_eq!(join(Why::Now), []);
        let block = Arc::new(Block::new(store.buffer(Size::Small).unwrap(), 0..MIB as usize));
        let waiters = store.finish(id, Some(&block));
        waiters.into_iter().for_each(|waiter| waiter.answer(Ok(block.bytes())));
        drop(say);
        assert_eq!(said.iter().collect::<Vec<_>>(), [true; 5]);
    }
}
