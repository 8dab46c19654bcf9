//! Memory that tensors are read into, and buffers that reads past the page cache need.
//!
//! Fresh memory is what an owned load spends most of its time on: the system clears each page when it
//! is first written. So large pieces are asked for in huge pages, and what is only passed through is
//! kept and used again. A disk reads into huge pages faster, too: one request to it names a few hundred
//! places at the most, which of ordinary pages are no megabyte.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

use memmap2::MmapMut;

use crate::huge_pages;
use crate::threads::lock;

/// From here on memory comes from the system by itself and goes back to it when it is dropped;
/// below, the program's own allocator is faster.
const MIN_MAPPED_BYTES: usize = 256 << 10;

/// What memory is aligned to: the widest that a processor works with.
const ALIGNMENT_BYTES: usize = 64;

/// Zeroed memory of its own, aligned for the widest that a processor works with (64 bytes).
pub struct TensorBuffer {
    allocation: Allocation,
    len: usize,
}

enum Allocation {
    /// Where it begins, so that it is aligned.
    Small(Vec<u8>, usize),
    Large(MmapMut),
}

impl TensorBuffer {
    /// So many bytes; nothing if the system has not as many.
    pub fn new(len: usize) -> Option<TensorBuffer> {
        let held = if len < MIN_MAPPED_BYTES {
            let mut vec = Vec::new();
            vec.try_reserve_exact(len + ALIGNMENT_BYTES).ok()?;
            vec.resize(len + ALIGNMENT_BYTES, 0);
            let start = vec.as_ptr().align_offset(ALIGNMENT_BYTES).min(ALIGNMENT_BYTES);
            Allocation::Small(vec, start)
        } else {
            Allocation::Large(huge_pages::allocate_zeroed(len).ok()?)
        };
        Some(TensorBuffer { allocation: held, len })
    }
}

impl Deref for TensorBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.allocation {
            Allocation::Small(vec, start) => &vec[*start..*start + self.len],
            Allocation::Large(map) => map,
        }
    }
}

impl DerefMut for TensorBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.allocation {
            Allocation::Small(vec, start) => &mut vec[*start..*start + self.len],
            Allocation::Large(map) => map,
        }
    }
}

impl fmt::Debug for TensorBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Page-aligned buffers of one size, each used again by who comes next.
#[derive(Debug)]
pub struct BufferPool {
    buffer_bytes: usize,
    free: Mutex<Vec<MmapMut>>,
}

impl BufferPool {
    /// Buffers of so many bytes.
    pub fn new(size: usize) -> BufferPool {
        BufferPool { buffer_bytes: size, free: Mutex::default() }
    }

    /// Works with one.
    pub fn with_buffer<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> std::io::Result<T> {
        let kept = lock(&self.free).pop();
        let mut buffer = match kept {
            Some(buffer) => buffer,
            None => huge_pages::allocate_zeroed(self.buffer_bytes)?,
        };
        let done = work(&mut buffer);
        lock(&self.free).push(buffer);
        Ok(done)
    }

    /// Gives all of them back to the system.
    pub fn trim(&self) {
        let gone = std::mem::take(&mut *lock(&self.free));
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_as_long_as_was_asked() {
        for len in [
            0,
            1,
            63,
            64,
            65,
            4097,
            MIN_MAPPED_BYTES - 1,
            MIN_MAPPED_BYTES,
            MIN_MAPPED_BYTES + 1,
            5 << 20,
        ] {
            let mut memory = TensorBuffer::new(len).unwrap();
            assert_eq!((memory.len(), memory.as_ptr().align_offset(ALIGNMENT_BYTES)), (len, 0));
            memory.fill(7);
            assert!(memory.iter().all(|&byte| byte == 7));
        }
        assert!(TensorBuffer::new(1 << 60).is_none());
    }
}
