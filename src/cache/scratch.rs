//! Memory in which answers are put together.
//!
//! In: how much. Out: as much, of any content, for as long as the work with it takes. It is used over and over, and kept
//! for all threads together: of those there may be hundreds, few of which are at work at once.

use std::sync::Mutex;

use memmap2::MmapMut;

use crate::threads::lock;

/// As much as the kernel asks for at once. What was larger is not kept.
const SCRATCH_BYTES: usize = 1 << 20;

/// Pieces that are kept at the most. They are beside the budget.
const MAX_IDLE_BUFFERS: usize = 16;

/// Mapped, and not of the heap, which keeps for each of many threads some of what they gave back.
static IDLE_BUFFERS: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

pub fn with_scratch<T>(len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    // Taken, not borrowed: what is called with it may read in its turn.
    let kept = if len <= SCRATCH_BYTES { lock(&IDLE_BUFFERS).pop() } else { None };
    let Some(mut piece) = kept.or_else(|| MmapMut::map_anon(len.max(SCRATCH_BYTES)).ok()) else {
        return work(&mut vec![0; len]);
    };
    let result = work(&mut piece[..len]);
    let mut kept = lock(&IDLE_BUFFERS);
    if piece.len() == SCRATCH_BYTES && kept.len() < MAX_IDLE_BUFFERS {
        kept.push(piece);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_kept_than_may_be_however_many_work_at_once() {
        fn nested(depth: usize) {
            if depth > 0 {
                with_scratch(SCRATCH_BYTES + depth % 2, |scratch| {
                    assert_eq!(scratch.len(), SCRATCH_BYTES + depth % 2);
                    nested(depth - 1);
                });
            }
        }
        nested(100);
        let kept = lock(&IDLE_BUFFERS);
        assert!(
            kept.len() <= MAX_IDLE_BUFFERS && kept.iter().all(|piece| piece.len() == SCRATCH_BYTES)
        );
    }
}
