//! The memo of a pickle: values by slot.
//!
//! Picklers count slots from 0 or 1, so slots lie in a list. A pickle may still use any slot number.

use std::collections::HashMap;

use super::arena::{NO_NODE, NodeId};

/// Maximum number of consecutive unused slots in the list.
const MAX_GAP_SLOTS: usize = 1 << 10;

/// Bytes of a slot outside the list: its entry in a hash table, which doubles when it is full.
const SPARSE_SLOT_BYTES: usize = 24;

#[derive(Debug, Default)]
pub struct PickleMemo {
    /// Values by slot; `NO_NODE` where there is none.
    dense: Vec<NodeId>,
    sparse: HashMap<u32, NodeId>,
    len: usize,
}

impl PickleMemo {
    /// The number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory that it takes.
    pub fn used_bytes(&self) -> usize {
        self.dense.len() * size_of::<NodeId>() + self.sparse.len() * SPARSE_SLOT_BYTES
    }

    pub fn get(&self, slot: u32) -> Option<NodeId> {
        match self.dense.get(slot as usize) {
            Some(&id) if id != NO_NODE => Some(id),
            _ => self.sparse.get(&slot).copied(),
        }
    }

    pub fn insert(&mut self, slot: u32, id: NodeId) {
        let index = slot as usize;
        let is_new = if index < self.dense.len() + MAX_GAP_SLOTS {
            if index >= self.dense.len() {
                self.dense.resize(index + 1, NO_NODE);
            }
            let before = std::mem::replace(&mut self.dense[index], id);
            // The list may have grown up to a slot that is in the table.
            let was_sparse = !self.sparse.is_empty() && self.sparse.remove(&slot).is_some();
            before == NO_NODE && !was_sparse
        } else {
            self.sparse.insert(slot, id).is_none()
        };
        self.len += usize::from(is_new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_in_any_order_behave_as_in_a_hash_table() {
        let slots =
            [1, 2, 3, 5_000, 5_000, 4_000_000_000, 900, 1_800, 2_700, 3_600, 4_500, 5_000, 0];
        let (mut memo, mut table) = (PickleMemo::default(), HashMap::new());
        for (n, slot) in (0..).zip(slots) {
            memo.insert(slot, NodeId(n));
            table.insert(slot, NodeId(n));
            assert_eq!(memo.len(), table.len());
            for slot in slots.into_iter().chain([4, 1_000, 5_001]) {
                assert_eq!(memo.get(slot), table.get(&slot).copied(), "{slot}");
            }
        }
    }
}
