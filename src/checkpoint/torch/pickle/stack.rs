//! The stack of the pickle machine, with its marks.

use super::arena::NodeId;

/// Values, and the height of the stack at each open mark.
///
/// Values below the last mark are out of reach until that mark is popped.
#[derive(Debug, Default)]
pub struct MarkedStack {
    values: Vec<NodeId>,
    marks: Vec<usize>,
}

impl MarkedStack {
    /// The number of values.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// The number of open marks.
    pub fn mark_count(&self) -> usize {
        self.marks.len()
    }

    /// Bytes of memory that the values take.
    pub fn used_bytes(&self) -> usize {
        self.values.len() * size_of::<NodeId>()
    }

    pub fn push(&mut self, id: NodeId) {
        self.values.push(id);
    }

    pub fn push_mark(&mut self) {
        self.marks.push(self.values.len());
    }

    /// Removes the last value in reach.
    pub fn pop(&mut self) -> Option<NodeId> {
        self.top()?;
        self.values.pop()
    }

    /// Removes the last mark and the values above it.
    pub fn pop_mark(&mut self) -> Option<Vec<NodeId>> {
        let mark = self.marks.pop()?;
        Some(self.values.split_off(mark))
    }

    /// The last value in reach.
    pub fn top(&self) -> Option<NodeId> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.values.last().copied().filter(|_| self.values.len() > floor)
    }
}
