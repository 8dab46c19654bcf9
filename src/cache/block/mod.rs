//! Blocks of source bytes in memory: where they lie, which there are, and how they are filled.

pub mod extents;
pub mod fill;
pub mod pool;
pub mod table;
