//! Buffers, kept and used again.
//!
//! In: a limit in bytes. Out: page-aligned buffers, never more of them than the limit, those at
//! rest included. Memory fresh from the kernel costs more than reading a disk into it (a page at a
//! time, 2.6 GB/s where the disk gives 3.8), so a buffer that comes back is the first to go out.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard};

use memmap2::MmapMut;

use crate::threads::lock;

/// How large a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 1 MiB, for what lies in a file as it is shown: with 2 MiB a jump costs so much that a
    /// loader which touches every tensor first takes half as long again.
    Small,
    /// 8 MiB, for tensors that have to be gathered: the more of a transposed matrix is gathered
    /// at once, the less often its source is read.
    Large,
}

impl Size {
    /// The smallest that has so many bytes.
    pub fn of(bytes: usize) -> Option<Size> {
        [Size::Small, Size::Large].into_iter().find(|size| bytes <= size.bytes())
    }

    pub const fn bytes(self) -> usize {
        match self {
            Size::Small => 1 << 20,
            Size::Large => 8 << 20,
        }
    }
}

#[derive(Debug)]
pub struct Pool {
    at_rest: Mutex<AtRest>,
}

#[derive(Debug)]
struct AtRest {
    limit: u64,
    /// Bytes of all buffers, in use or at rest.
    held: u64,
    small: Vec<MmapMut>,
    large: Vec<MmapMut>,
}

impl AtRest {
    fn of(&mut self, size: Size) -> &mut Vec<MmapMut> {
        match size {
            Size::Small => &mut self.small,
            Size::Large => &mut self.large,
        }
    }

    /// Gives buffers at rest back to the system until this many more bytes fit.
    fn make_room(&mut self, bytes: u64) -> bool {
        for size in [Size::Small, Size::Large] {
            while self.held + bytes > self.limit && self.of(size).pop().is_some() {
                self.held -= size.bytes() as u64;
            }
        }
        self.held + bytes <= self.limit
    }
}

impl Pool {
    pub fn new(limit: u64) -> Arc<Pool> {
        let at_rest = AtRest { limit, held: 0, small: Vec::new(), large: Vec::new() };
        Arc::new(Pool { at_rest: Mutex::new(at_rest) })
    }

    /// A buffer that was used before. What is in it is of no worth.
    pub fn used(self: &Arc<Self>, size: Size) -> Option<Buffer> {
        let map = self.lock().of(size).pop()?;
        Some(Buffer { map: Some(map), size, pool: Arc::clone(self) })
    }

    /// A buffer fresh from the system, if the limit allows one more.
    pub fn fresh(self: &Arc<Self>, size: Size) -> Option<Buffer> {
        let bytes = size.bytes() as u64;
        let mut at_rest = self.lock();
        if !at_rest.make_room(bytes) {
            return None;
        }
        let map = MmapMut::map_anon(size.bytes()).ok()?;
        at_rest.held += bytes;
        Some(Buffer { map: Some(map), size, pool: Arc::clone(self) })
    }

    /// Another limit. What is in use above it goes when it comes back.
    pub fn set_limit(&self, limit: u64) {
        let mut at_rest = self.lock();
        at_rest.limit = limit;
        at_rest.make_room(0);
    }

    /// Bytes held, and the limit.
    pub fn held_and_limit(&self) -> (u64, u64) {
        let at_rest = self.lock();
        (at_rest.held, at_rest.limit)
    }

    /// Gives everything at rest back to the system.
    pub fn trim(&self) {
        let mut at_rest = self.lock();
        let (small, large) = (at_rest.small.len(), at_rest.large.len());
        at_rest.held -= (small * Size::Small.bytes() + large * Size::Large.bytes()) as u64;
        at_rest.small = Vec::new();
        at_rest.large = Vec::new();
    }

    fn lock(&self) -> MutexGuard<'_, AtRest> {
        lock(&self.at_rest)
    }
}

/// Page-aligned memory that goes back to its pool.
#[derive(Debug)]
pub struct Buffer {
    map: Option<MmapMut>,
    size: Size,
    pool: Arc<Pool>,
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(map) = self.map.take() else { return };
        let mut at_rest = self.pool.lock();
        at_rest.of(self.size).push(map);
        at_rest.make_room(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_held_than_the_limit_says() {
        let pool = Pool::new(10 << 20);
        let large = pool.fresh(Size::Large).unwrap();
        let small: Vec<Buffer> = std::iter::from_fn(|| pool.fresh(Size::Small)).collect();
        assert_eq!((small.len(), pool.held_and_limit()), (2, (10 << 20, 10 << 20)));
        drop(large);
        assert!(pool.used(Size::Small).is_none());
        // What rests in the other size makes room.
        let more: Vec<Buffer> = std::iter::from_fn(|| pool.fresh(Size::Small)).collect();
        assert_eq!((more.len(), pool.held_and_limit().0), (8, 10 << 20));
        pool.set_limit(3 << 20);
        assert!(pool.fresh(Size::Small).is_none());
        drop((small, more));
        assert_eq!(pool.held_and_limit(), (3 << 20, 3 << 20));
        assert!(pool.used(Size::Small).is_some());
        pool.trim();
        assert_eq!(pool.held_and_limit().0, 0);
    }
}
