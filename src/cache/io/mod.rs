//! Reading sources: the threads that wait, the ways of reading, and the replies.

pub mod executor;
pub mod reply;
pub mod source;
