//! Buffers, kept and used again.
//!
//! In: a limit in bytes. Out: page-aligned buffers, never more memory for them than the limit, that at rest
//! included. Memory fresh from the system costs more than reading a disk into it, so a buffer that comes back is
//! the first to go out. It is taken in huge pages, several at once for many buffers: of ordinary ones a disk needs
//! several requests for a mebibyte, and reads at half the speed or less.

use std::collections::{HashMap, HashSet};
use std::ops::{Deref, DerefMut};
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
    /// 1 MiB, for what lies in a file as it is shown: with 2 MiB a jump costs so much that a
    /// loader which touches every tensor first takes half as long again.
    Small,
    /// 8 MiB, for tensors that have to be gathered: the more of a transposed matrix is gathered
    /// at once, the less often its source is read.
    Large,
}

impl BufferSize {
    /// The smallest that has so many bytes.
    pub fn fitting(bytes: usize) -> Option<BufferSize> {
        [BufferSize::Small, BufferSize::Large].into_iter().find(|size| bytes <= size.bytes())
    }

    pub const fn bytes(self) -> usize {
        match self {
            BufferSize::Small => 1 << 20,
            BufferSize::Large => 8 << 20,
        }
    }

    /// What a buffer has: as many bytes, and those around them that are read past the page cache with them.
    const fn capacity(self) -> usize {
        match self {
            BufferSize::Small => self.bytes() + DIRECT_ALIGNMENT_BYTES,
            BufferSize::Large => self.bytes(),
        }
    }

    /// What is taken from the system, and given back to it, at once. Where there is little, no more than a buffer.
    const fn slab_bytes(self, limit: u64) -> usize {
        match self {
            BufferSize::Small if limit >= SLAB_MIN_LIMIT_BYTES => SLAB_BYTES,
            _ => self.capacity(),
        }
    }
}

/// Has 15 small buffers, and little is left over.
const SLAB_BYTES: usize = 8 * huge_pages::HUGE_PAGE_BYTES;

/// The limit from which on so much is taken at once: an eighth of it at most.
const SLAB_MIN_LIMIT_BYTES: u64 = 8 * SLAB_BYTES as u64;

/// The memory of one buffer.
#[derive(Debug)]
struct SlabPart {
    start: NonNull<u8>,
    len: usize,
    /// What it is a part of. Held by its parts alone.
    slab: Arc<MmapMut>,
}

// SAFETY: parts of a slab do not overlap, and each has one owner, which alone reaches what is in it.
#[allow(unsafe_code)]
unsafe impl Send for SlabPart {}
// SAFETY: the same; by a shared one it is only read.
#[allow(unsafe_code)]
unsafe impl Sync for SlabPart {}

impl SlabPart {
    fn slab_id(&self) -> SlabId {
        SlabId(Arc::as_ptr(&self.slab))
    }

    /// Memory fresh from the system, in parts of this size.
    fn allocate(size: BufferSize, bytes: usize) -> Option<impl Iterator<Item = SlabPart>> {
        let mut map = huge_pages::allocate_zeroed(bytes).ok()?;
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

#[derive(Debug)]
pub struct BlockPool {
    state: Mutex<PoolState>,
}

#[derive(Debug)]
struct PoolState {
    limit: u64,
    /// Bytes of all slabs, in use or at rest.
    held: u64,
    small: Vec<SlabPart>,
    large: Vec<SlabPart>,
}

impl PoolState {
    fn idle(&mut self, size: BufferSize) -> &mut Vec<SlabPart> {
        match size {
            BufferSize::Small => &mut self.small,
            BufferSize::Large => &mut self.large,
        }
    }

    /// Gives slabs at rest back to the system until this many more bytes fit.
    fn make_room(&mut self, bytes: u64) -> bool {
        for size in [BufferSize::Small, BufferSize::Large] {
            self.release(size, (self.held + bytes).saturating_sub(self.limit));
        }
        self.held + bytes <= self.limit
    }

    /// Gives slabs of so many bytes back, if there are: those that are longest at rest, of those of which nothing is
    /// in use.
    fn release(&mut self, size: BufferSize, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let resting = self.idle_by_slab();
        let parts = self.idle(size);
        let (mut gone, mut freed) = (HashSet::new(), 0);
        for part in parts.iter() {
            let is_whole = resting[&part.slab_id()] == part.slab.len() / size.capacity();
            if freed < bytes && is_whole && gone.insert(part.slab_id()) {
                freed += part.slab.len() as u64;
            }
        }
        parts.retain(|part| !gone.contains(&part.slab_id()));
        self.held -= freed;
    }

    /// How many parts of each slab are here.
    fn idle_by_slab(&self) -> HashMap<SlabId, usize> {
        let mut resting = HashMap::new();
        for part in self.small.iter().chain(&self.large) {
            *resting.entry(part.slab_id()).or_default() += 1;
        }
        resting
    }
}

impl BlockPool {
    pub fn new(limit: u64) -> Arc<BlockPool> {
        let at_rest = PoolState { limit, held: 0, small: Vec::new(), large: Vec::new() };
        Arc::new(BlockPool { state: Mutex::new(at_rest) })
    }

    /// A buffer that was used before. What is in it is of no worth.
    pub fn reuse(self: &Arc<Self>, size: BufferSize) -> Option<Buffer> {
        let part = self.lock().idle(size).pop()?;
        Some(Buffer { part: Some(part), size, pool: Arc::clone(self) })
    }

    /// A buffer fresh from the system, if the limit allows one more.
    pub fn allocate(self: &Arc<Self>, size: BufferSize) -> Option<Buffer> {
        let mut at_rest = self.lock();
        let slab = size.slab_bytes(at_rest.limit);
        let bytes = slab as u64;
        if !at_rest.make_room(bytes) {
            return None;
        }
        let mut parts = SlabPart::allocate(size, slab)?;
        let part = parts.next();
        at_rest.idle(size).extend(parts);
        at_rest.held += bytes;
        Some(Buffer { part, size, pool: Arc::clone(self) })
    }

    /// Another limit. What is in use above it goes as its slab comes to rest.
    pub fn set_limit(&self, limit: u64) {
        let mut at_rest = self.lock();
        at_rest.limit = limit;
        at_rest.make_room(0);
    }

    /// How many buffers of each slab are at rest.
    pub fn idle_by_slab(&self) -> HashMap<SlabId, usize> {
        self.lock().idle_by_slab()
    }

    /// Bytes held, and the limit.
    pub fn held_and_limit(&self) -> (u64, u64) {
        let at_rest = self.lock();
        (at_rest.held, at_rest.limit)
    }

    /// Gives everything at rest back to the system.
    pub fn release_idle(&self) {
        let mut at_rest = self.lock();
        for size in [BufferSize::Small, BufferSize::Large] {
            at_rest.release(size, u64::MAX);
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.state)
    }
}

/// The name of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlabId(*const MmapMut);

impl Buffer {
    /// The slab that it is a part of, and how many buffers that has.
    pub fn slab(&self) -> Option<(SlabId, usize)> {
        let part = self.part.as_ref()?;
        Some((part.slab_id(), part.slab.len() / self.size.capacity()))
    }
}

/// Page-aligned memory that goes back to its pool.
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
        // SAFETY: initialized memory of a slab that the part keeps, and that nobody else has.
        unsafe { slice::from_raw_parts(part.start.as_ptr(), part.len) }
    }
}

impl DerefMut for Buffer {
    #[allow(unsafe_code)]
    fn deref_mut(&mut self) -> &mut [u8] {
        let Some(part) = &mut self.part else { return &mut [] };
        // SAFETY: the same, and this buffer is borrowed for it alone.
        unsafe { slice::from_raw_parts_mut(part.start.as_ptr(), part.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(part) = self.part.take() else { return };
        let mut at_rest = self.pool.lock();
        at_rest.idle(self.size).push(part);
        at_rest.make_room(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(pool: &Arc<BlockPool>) -> Option<Buffer> {
        pool.reuse(BufferSize::Small).or_else(|| pool.allocate(BufferSize::Small))
    }

    #[test]
    fn no_more_is_held_than_the_limit_says() {
        const ROOM: u64 = BufferSize::Small.capacity() as u64;
        let limit = (8 << 20) + 2 * ROOM;
        let pool = BlockPool::new(limit);
        let large = pool.allocate(BufferSize::Large).unwrap();
        let small: Vec<Buffer> = std::iter::from_fn(|| next(&pool)).collect();
        assert_eq!((small.len(), pool.held_and_limit()), (2, (limit, limit)));
        drop(large);
        assert!(pool.reuse(BufferSize::Small).is_none());
        // What rests in the other size makes room.
        let more: Vec<Buffer> = std::iter::from_fn(|| next(&pool)).collect();
        assert_eq!((more.len(), pool.held_and_limit().0), (7, 9 * ROOM));
        pool.set_limit(5 << 20);
        assert!(pool.allocate(BufferSize::Small).is_none());
        drop((small, more));
        assert_eq!(pool.held_and_limit(), (4 * ROOM, 5 << 20));
        assert!(pool.reuse(BufferSize::Small).is_some());
        pool.release_idle();
        assert_eq!(pool.held_and_limit().0, 0);
    }

    #[test]
    fn what_was_taken_at_once_is_given_back_at_once() {
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
}
