//! Blocks of source bytes in memory, and the replies that wait for them.

pub mod id;
pub mod pool;
pub mod reply;
pub mod table;
