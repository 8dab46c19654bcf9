//! Bounds what is built from the parts of a table: a pickle can use one part in a million places.

use crate::checkpoint::tensor::Shape;
use crate::checkpoint::torch::as_counts;
use crate::checkpoint::torch::pickle::{Arena, NodeId};

/// Why a budget is spent.
const SPENT: &str = "it repeats its shapes more often than a save does";

/// The number of steps and pieces that may still be built. torch writes each with at least one byte of its own.
#[derive(Debug)]
pub struct PartBudget {
    left: u64,
}

impl PartBudget {
    /// The budget of a table with this number of bytes.
    pub fn new(table_bytes: u64) -> PartBudget {
        PartBudget { left: table_bytes }
    }

    /// Takes a number of parts, before they are built.
    pub fn take(&mut self, count: usize) -> Result<(), &'static str> {
        self.left = self.left.checked_sub(count as u64).ok_or(SPENT)?;
        Ok(())
    }

    /// The shape or the steps that a node has; `None` if it has none.
    pub fn shape(&mut self, arena: &Arena, id: NodeId) -> Result<Option<Shape>, &'static str> {
        let Some(counts) = as_counts(arena, id) else { return Ok(None) };
        self.take(counts.len())?;
        Ok(Some(counts.into()))
    }
}
