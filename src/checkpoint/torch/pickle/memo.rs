//! What a pickle remembers, by slot.
//!
//! Slots are counted from 0 or 1 by all that write pickles, so that they lie in a list; a pickle may name any all the
//! same.

use std::collections::HashMap;

use super::arena::{Id, NO_NODE};

/// Slots that may be left out in the list.
const MAX_GAP: usize = 1 << 10;

/// Bytes of a scattered slot: its entry in a table that is doubled when it is full.
const SCATTERED: usize = 24;

/// The remembered values.
#[derive(Debug, Default)]
pub struct Memo {
    /// By slot; those that are not there have no node.
    near: Vec<Id>,
    scattered: HashMap<u32, Id>,
    len: usize,
}

impl Memo {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes that it takes.
    pub fn held(&self) -> usize {
        self.near.len() * size_of::<Id>() + self.scattered.len() * SCATTERED
    }

    pub fn get(&self, slot: u32) -> Option<Id> {
        match self.near.get(slot as usize) {
            Some(&id) if id != NO_NODE => Some(id),
            _ => self.scattered.get(&slot).copied(),
        }
    }

    pub fn insert(&mut self, slot: u32, id: Id) {
        let place = slot as usize;
        let is_new = if place < self.near.len() + MAX_GAP {
            if place >= self.near.len() {
                self.near.resize(place + 1, NO_NODE);
            }
            let before = std::mem::replace(&mut self.near[place], id);
            // One that was far away until now is there twice else.
            let was_far = !self.scattered.is_empty() && self.scattered.remove(&slot).is_some();
            before == NO_NODE && !was_far
        } else {
            self.scattered.insert(slot, id).is_none()
        };
        self.len += usize::from(is_new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_slots_in_any_order_are_as_in_a_table() {
        let slots =
            [1, 2, 3, 5_000, 5_000, 4_000_000_000, 900, 1_800, 2_700, 3_600, 4_500, 5_000, 0];
        let (mut memo, mut table) = (Memo::default(), HashMap::new());
        for (n, slot) in (0..).zip(slots) {
            memo.insert(slot, Id(n));
            table.insert(slot, Id(n));
            assert_eq!(memo.len(), table.len());
            for slot in slots.into_iter().chain([4, 1_000, 5_001]) {
                assert_eq!(memo.get(slot), table.get(&slot).copied(), "{slot}");
            }
        }
    }
}
