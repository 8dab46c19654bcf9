//! Blocks of source bytes in memory.

pub mod extents;
pub mod id;
pub mod pool;
pub mod table;
