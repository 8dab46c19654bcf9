//! Buffers for blocks, and scratch memory for replies, both used again and again.
//!
//! In: a limit in bytes. Out: page-aligned buffers, which with the idle ones never take more memory than the limit.
//! Fresh memory from the system costs more than reading a disk into it. So the buffer that came back last is the next
//! to be used. Buffers come from slabs of huge pages. With ordinary pages a disk needs several requests for 1 MiB, and
//! reads at half the speed or less.

use std::collections::{HashMap, HashSet};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard};

use memmap2::MmapMut;

use crate::huge_pages;
use crate::source::DIRECT_ALIGNMENT_BYTES;
use crate::threads::lock;

/// How large a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferSize {
    /// 1 MiB, for runs of a file. With 2 MiB a random read costs so much that a loader which touches every tensor
    /// first takes half as long again.
    Small,
    /// 8 MiB, for strided tensors. The more of a transposed matrix is gathered at once, the fewer times its source is
    /// read.
    Large,
}

impl BufferSize {
    /// The smallest size that holds so many bytes.
    pub fn fitting(bytes: usize) -> Option<BufferSize> {
        [BufferSize::Small, BufferSize::Large].into_iter().find(|size| bytes <= size.bytes())
    }

    pub const fn bytes(self) -> usize {
        match self {
            BufferSize::Small => 1 << 20,
            BufferSize::Large => 8 << 20,
        }
    }

    /// The length of a buffer: its bytes, and what direct reads of them take with them for alignment.
    const fn capacity(self) -> usize {
        match self {
            BufferSize::Small => self.bytes() + DIRECT_ALIGNMENT_BYTES,
            BufferSize::Large => self.bytes(),
        }
    }

    /// The length of a slab, which is taken from the system and returned to it whole. Under a small limit it is one
    /// buffer.
    const fn slab_bytes(self, limit: u64) -> usize {
        match self {
            BufferSize::Small if limit >= SLAB_MIN_LIMIT_BYTES => SLAB_BYTES,
            _ => self.capacity(),
        }
    }
}

/// Holds 15 small buffers, with little left over.
const SLAB_BYTES: usize = 8 * huge_pages::HUGE_PAGE_BYTES;

/// The limit from which on slabs hold several buffers: one is an eighth of it at most.
const SLAB_MIN_LIMIT_BYTES: u64 = 8 * SLAB_BYTES as u64;

/// The memory of one buffer.
#[derive(Debug)]
struct SlabPart {
    start: NonNull<u8>,
    len: usize,
    /// Held by the parts of the slab alone.
    slab: Arc<MmapMut>,
}

// SAFETY: parts of a slab do not overlap, and each has one owner, which alone accesses its memory.
#[allow(unsafe_code)]
unsafe impl Send for SlabPart {}
// SAFETY: the same; through a shared reference it is only read.
#[allow(unsafe_code)]
unsafe impl Sync for SlabPart {}

impl SlabPart {
    fn slab_id(&self) -> SlabId {
        SlabId(Arc::as_ptr(&self.slab))
    }

    /// Maps a slab, and divides it into parts of one size.
    fn allocate(size: BufferSize, slab_bytes: usize) -> Option<impl Iterator<Item = SlabPart>> {
        let mut map = huge_pages::allocate_zeroed(slab_bytes).ok()?;
        let starts: Vec<_> = map.chunks_exact_mut(size.capacity()).map(NonNull::from).collect();
        let slab = Arc::new(map);
        let part = move |bytes: NonNull<[u8]>| SlabPart {
            start: bytes.cast(),
            len: bytes.len(),
            slab: Arc::clone(&slab),
        };
        Some(starts.into_iter().map(part))
    }
}

/// The buffers of all blocks, in use or idle.
#[derive(Debug)]
pub struct BlockPool {
    state: Mutex<PoolState>,
}

#[derive(Debug)]
struct PoolState {
    limit: u64,
    /// Bytes of all slabs, in use or idle.
    held: u64,
    idle_small: Vec<SlabPart>,
    idle_large: Vec<SlabPart>,
}

impl PoolState {
    fn idle(&mut self, size: BufferSize) -> &mut Vec<SlabPart> {
        match size {
            BufferSize::Small => &mut self.idle_small,
            BufferSize::Large => &mut self.idle_large,
        }
    }

    /// Returns idle slabs to the system until this many more bytes are within the limit; whether they are.
    fn make_room(&mut self, bytes: u64) -> bool {
        for size in [BufferSize::Small, BufferSize::Large] {
            self.release(size, (self.held + bytes).saturating_sub(self.limit));
        }
        self.held + bytes <= self.limit
    }

    /// Returns slabs of at least so many bytes, if there are any of which nothing is in use, the longest idle first.
    fn release(&mut self, size: BufferSize, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let idle_by_slab = self.idle_by_slab();
        let parts = self.idle(size);
        let (mut released, mut released_bytes) = (HashSet::new(), 0);
        for part in parts.iter() {
            let is_whole = idle_by_slab[&part.slab_id()] == part.slab.len() / size.capacity();
            if released_bytes < bytes && is_whole && released.insert(part.slab_id()) {
                released_bytes += part.slab.len() as u64;
            }
        }
        parts.retain(|part| !released.contains(&part.slab_id()));
        self.held -= released_bytes;
    }

    /// The number of idle parts of each slab.
    fn idle_by_slab(&self) -> HashMap<SlabId, usize> {
        let mut idle_by_slab = HashMap::new();
        for part in self.idle_small.iter().chain(&self.idle_large) {
            *idle_by_slab.entry(part.slab_id()).or_default() += 1;
        }
        idle_by_slab
    }
}

impl BlockPool {
    pub fn new(limit: u64) -> Arc<BlockPool> {
        let (idle_small, idle_large) = Default::default();
        let state = PoolState { limit, held: 0, idle_small, idle_large };
        Arc::new(BlockPool { state: Mutex::new(state) })
    }

    /// Takes an idle buffer. Its content is arbitrary.
    pub fn reuse(self: &Arc<Self>, size: BufferSize) -> Option<Buffer> {
        let part = self.lock().idle(size).pop()?;
        Some(Buffer { part: Some(part), size, pool: Arc::clone(self) })
    }

    /// Takes a buffer from a new slab, if the limit allows one.
    pub fn allocate(self: &Arc<Self>, size: BufferSize) -> Option<Buffer> {
        let mut state = self.lock();
        let slab_bytes = size.slab_bytes(state.limit);
        if !state.make_room(slab_bytes as u64) {
            return None;
        }
        let mut parts = SlabPart::allocate(size, slab_bytes)?;
        let part = parts.next();
        state.idle(size).extend(parts);
        state.held += slab_bytes as u64;
        Some(Buffer { part, size, pool: Arc::clone(self) })
    }

    /// Sets the limit. Slabs in use above it are returned to the system when they are idle.
    pub fn set_limit(&self, limit: u64) {
        let mut state = self.lock();
        state.limit = limit;
        state.make_room(0);
    }

    /// The number of idle buffers of each slab.
    pub fn idle_by_slab(&self) -> HashMap<SlabId, usize> {
        self.lock().idle_by_slab()
    }

    /// The bytes of all slabs, and their limit.
    pub fn held_and_limit(&self) -> (u64, u64) {
        let state = self.lock();
        (state.held, state.limit)
    }

    /// Returns all idle slabs to the system.
    pub fn release_idle(&self) {
        let mut state = self.lock();
        for size in [BufferSize::Small, BufferSize::Large] {
            state.release(size, u64::MAX);
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.state)
    }
}

/// The identity of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlabId(*const MmapMut);

/// Page-aligned memory that returns to its pool when it is dropped.
#[derive(Debug)]
pub struct Buffer {
    part: Option<SlabPart>,
    size: BufferSize,
    pool: Arc<BlockPool>,
}

impl Deref for Buffer {
    type Target = [u8];

    #[allow(unsafe_code)]
    fn deref(&self) -> &[u8] {
        let Some(part) = &self.part else { return &[] };
        // SAFETY: initialized memory of a slab that the part keeps mapped, and that has no other owner.
        unsafe { slice::from_raw_parts(part.start.as_ptr(), part.len) }
    }
}

impl DerefMut for Buffer {
    #[allow(unsafe_code)]
    fn deref_mut(&mut self) -> &mut [u8] {
        let Some(part) = &mut self.part else { return &mut [] };
        // SAFETY: the same, and this buffer is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(part.start.as_ptr(), part.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(part) = self.part.take() else { return };
        let mut state = self.pool.lock();
        state.idle(self.size).push(part);
        state.make_room(0);
    }
}

/// Bytes of a source, which do not change any more.
#[derive(Debug)]
pub struct Block {
    buffer: Buffer,
    /// The range of the buffer that holds them.
    bytes: Range<usize>,
}

impl Block {
    pub fn new(buffer: Buffer, bytes: Range<usize>) -> Block {
        Block { buffer, bytes }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.bytes.clone()]
    }

    /// The slab that it lies in, and the number of buffers in that.
    pub fn slab(&self) -> Option<(SlabId, usize)> {
        let part = self.buffer.part.as_ref()?;
        Some((part.slab_id(), part.slab.len() / self.buffer.size.capacity()))
    }
}

/// The kernel's largest request. Longer scratch memory is not kept.
const SCRATCH_BYTES: usize = 1 << 20;

/// Pieces of scratch memory that are kept, beside the limit. Of hundreds of threads few are at work at once.
const MAX_IDLE_SCRATCH: usize = 16;

/// Mapped, not of the heap: that keeps, for each of many threads, some of what they freed.
static IDLE_SCRATCH: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

/// Lends memory of arbitrary content, in which a reply is put together.
pub fn with_scratch<T>(len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    // Taken, not borrowed: `work` may need scratch memory in its turn.
    let idle = if len <= SCRATCH_BYTES { lock(&IDLE_SCRATCH).pop() } else { None };
    let Some(mut scratch) = idle.or_else(|| MmapMut::map_anon(len.max(SCRATCH_BYTES)).ok()) else {
        return work(&mut vec![0; len]);
    };
    let result = work(&mut scratch[..len]);
    let mut idle = lock(&IDLE_SCRATCH);
    if scratch.len() == SCRATCH_BYTES && idle.len() < MAX_IDLE_SCRATCH {
        idle.push(scratch);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(pool: &Arc<BlockPool>) -> Option<Buffer> {
        pool.reuse(BufferSize::Small).or_else(|| pool.allocate(BufferSize::Small))
    }

    #[test]
    fn held_bytes_stay_within_the_limit() {
        const CAPACITY_BYTES: u64 = BufferSize::Small.capacity() as u64;
        let limit = (8 << 20) + 2 * CAPACITY_BYTES;
        let pool = BlockPool::new(limit);
        let large = pool.allocate(BufferSize::Large).unwrap();
        let small: Vec<Buffer> = std::iter::from_fn(|| next(&pool)).collect();
        assert_eq!((small.len(), pool.held_and_limit()), (2, (limit, limit)));
        drop(large);
        assert!(pool.reuse(BufferSize::Small).is_none());
        // Idle buffers of the other size make room.
        let more: Vec<Buffer> = std::iter::from_fn(|| next(&pool)).collect();
        assert_eq!((more.len(), pool.held_and_limit().0), (7, 9 * CAPACITY_BYTES));
        pool.set_limit(5 << 20);
        assert!(pool.allocate(BufferSize::Small).is_none());
        drop((small, more));
        assert_eq!(pool.held_and_limit(), (4 * CAPACITY_BYTES, 5 << 20));
        assert!(pool.reuse(BufferSize::Small).is_some());
        pool.release_idle();
        assert_eq!(pool.held_and_limit().0, 0);
    }

    #[test]
    fn a_slab_is_released_whole() {
        let pool = BlockPool::new(SLAB_MIN_LIMIT_BYTES);
        let mut all: Vec<Buffer> = (0..15).map(|_| next(&pool).unwrap()).collect();
        assert_eq!(
            (pool.held_and_limit().0, pool.reuse(BufferSize::Small).is_none()),
            (SLAB_BYTES as u64, true)
        );
        let last = all.pop();
        pool.set_limit(0);
        drop(all);
        assert_eq!(pool.held_and_limit().0, SLAB_BYTES as u64);
        drop(last);
        assert_eq!(pool.held_and_limit().0, 0);
    }

    #[test]
    fn no_two_buffers_share_memory() {
        let pool = BlockPool::new(SLAB_MIN_LIMIT_BYTES);
        let filled = |n: u8| {
            let mut buffer = next(&pool).unwrap();
            buffer.fill(n);
            buffer
        };
        let all: Vec<Buffer> = (0..32).map(filled).collect();
        let is_whole = |(n, buffer): (u8, &Buffer)| {
            buffer.len() == BufferSize::Small.capacity() && buffer.iter().all(|&b| b == n)
        };
        assert!((0..).zip(&all).all(is_whole));
    }

    #[test]
    fn idle_scratch_is_bounded_however_many_threads_work() {
        fn nest(depth: usize) {
            if depth > 0 {
                with_scratch(SCRATCH_BYTES + depth % 2, |scratch| {
                    assert_eq!(scratch.len(), SCRATCH_BYTES + depth % 2);
                    nest(depth - 1);
                });
            }
        }
        nest(100);
        let idle = lock(&IDLE_SCRATCH);
        assert!(idle.len() <= MAX_IDLE_SCRATCH);
        assert!(idle.iter().all(|scratch| scratch.len() == SCRATCH_BYTES));
    }
}
