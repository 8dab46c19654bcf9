//! Memory in which answers are put together.
//!
//! In: how much. Out: as much, of any content, for as long as the work with it takes. It is used over and over, and kept
//! for all threads together: of those there may be hundreds, few of which are at work at once.

use std::sync::Mutex;

use memmap2::MmapMut;

use crate::threads::lock;

/// As much as the kernel asks for at once. What was larger is not kept.
const LENGTH: usize = 1 << 20;

/// Pieces that are kept at the most. They are beside the budget.
const KEPT: usize = 16;

/// Mapped, and not of the heap, which keeps for each of many threads some of what they gave back.
static KEPT_PIECES: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

pub fn with_scratch<T>(len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    // Taken, not borrowed: what is called with it may read in its turn.
    let kept = if len <= LENGTH { lock(&KEPT_PIECES).pop() } else { None };
    let Some(mut piece) = kept.or_else(|| MmapMut::map_anon(len.max(LENGTH)).ok()) else {
        return work(&mut vec![0; len]);
    };
    let result = work(&mut piece[..len]);
    let mut kept = lock(&KEPT_PIECES);
    if piece.len() == LENGTH && kept.len() < KEPT {
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
                with_scratch(LENGTH + depth % 2, |scratch| {
                    assert_eq!(scratch.len(), LENGTH + depth % 2);
                    nested(depth - 1);
                });
            }
        }
        nested(100);
        let kept = lock(&KEPT_PIECES);
        assert!(kept.len() <= KEPT && kept.iter().all(|piece| piece.len() == LENGTH));
    }
}
