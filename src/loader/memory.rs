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
const LARGE: usize = 256 << 10;

/// What memory is aligned to: the widest that a processor works with.
const ALIGNMENT: usize = 64;

/// Zeroed memory of its own, aligned for the widest that a processor works with (64 bytes).
pub struct Memory {
    held: Held,
    len: usize,
}

enum Held {
    /// Where it begins, so that it is aligned.
    Small(Vec<u8>, usize),
    Large(MmapMut),
}

impl Memory {
    /// So many bytes; nothing if the system has not as many.
    pub fn new(len: usize) -> Option<Memory> {
        let held = if len < LARGE {
            let mut vec = Vec::new();
            vec.try_reserve_exact(len + ALIGNMENT).ok()?;
            vec.resize(len + ALIGNMENT, 0);
            let start = vec.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
            Held::Small(vec, start)
        } else {
            Held::Large(huge_pages::zeroed(len).ok()?)
        };
        Some(Memory { held, len })
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.held {
            Held::Small(vec, start) => &vec[*start..*start + self.len],
            Held::Large(map) => map,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.held {
            Held::Small(vec, start) => &mut vec[*start..*start + self.len],
            Held::Large(map) => map,
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Page-aligned buffers of one size, each used again by who comes next.
#[derive(Debug)]
pub struct Buffers {
    size: usize,
    kept: Mutex<Vec<MmapMut>>,
}

impl Buffers {
    /// Buffers of so many bytes.
    pub fn new(size: usize) -> Buffers {
        Buffers { size, kept: Mutex::default() }
    }

    /// Works with one.
    pub fn with<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> std::io::Result<T> {
        let kept = lock(&self.kept).pop();
        let mut buffer = match kept {
            Some(buffer) => buffer,
            None => huge_pages::zeroed(self.size)?,
        };
        let done = work(&mut buffer);
        lock(&self.kept).push(buffer);
        Ok(done)
    }

    /// Gives all of them back to the system.
    pub fn trim(&self) {
        let gone = std::mem::take(&mut *lock(&self.kept));
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_as_long_as_was_asked() {
        for len in [0, 1, 63, 64, 65, 4097, LARGE - 1, LARGE, LARGE + 1, 5 << 20] {
            let mut memory = Memory::new(len).unwrap();
            assert_eq!((memory.len(), memory.as_ptr().align_offset(ALIGNMENT)), (len, 0));
            memory.fill(7);
            assert!(memory.iter().all(|&byte| byte == 7));
        }
        assert!(Memory::new(1 << 60).is_none());
    }
}
