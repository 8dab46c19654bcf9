//! Memory that tensors are read into.
//!
//! Fresh memory is what an owned load spends most of its time on: the system clears each page when it is first
//! written. So large buffers are of huge pages.

use std::fmt;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use crate::huge_pages;

/// From this size on memory is mapped, and unmapped when it is dropped. Below, the program's own allocator is
/// faster.
const MIN_MAPPED_BYTES: usize = 256 << 10;

/// The widest vector that a processor works with.
const ALIGNMENT_BYTES: usize = 64;

/// Zeroed memory of its own, aligned for the widest vectors of processors (64 bytes).
pub struct TensorBuffer {
    allocation: Allocation,
    len: usize,
}

enum Allocation {
    /// The second value is the aligned start.
    Heap(Vec<u8>, usize),
    Mapped(MmapMut),
}

impl TensorBuffer {
    /// Allocates so many bytes; `None` if the system has not as many.
    pub fn new(len: usize) -> Option<TensorBuffer> {
        let allocation = if len < MIN_MAPPED_BYTES {
            let mut vec = Vec::new();
            vec.try_reserve_exact(len + ALIGNMENT_BYTES).ok()?;
            vec.resize(len + ALIGNMENT_BYTES, 0);
            let start = vec.as_ptr().align_offset(ALIGNMENT_BYTES).min(ALIGNMENT_BYTES);
            Allocation::Heap(vec, start)
        } else {
            Allocation::Mapped(huge_pages::allocate_zeroed(len).ok()?)
        };
        Some(TensorBuffer { allocation, len })
    }
}

impl Deref for TensorBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.allocation {
            Allocation::Heap(vec, start) => &vec[*start..*start + self.len],
            Allocation::Mapped(map) => map,
        }
    }
}

impl DerefMut for TensorBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.allocation {
            Allocation::Heap(vec, start) => &mut vec[*start..*start + self.len],
            Allocation::Mapped(map) => map,
        }
    }
}

impl fmt::Debug for TensorBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_as_long_as_was_asked() {
        let mapped = MIN_MAPPED_BYTES;
        for len in [0, 1, 63, 64, 65, 4097, mapped - 1, mapped, mapped + 1, 5 << 20] {
            let mut memory = TensorBuffer::new(len).unwrap();
            let misalignment = memory.as_ptr().align_offset(ALIGNMENT_BYTES);
            assert_eq!((memory.len(), misalignment), (len, 0));
            memory.fill(7);
            assert!(memory.iter().all(|&byte| byte == 7));
        }
        assert!(TensorBuffer::new(1 << 60).is_none());
    }
}
