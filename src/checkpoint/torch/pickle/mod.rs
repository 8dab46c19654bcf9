//! Reads a pickle without executing it.
//!
//! In: the bytes of one pickle, protocols 2 to 5. Out: an [`Arena`]: what the pickle describes, as
//! nodes that name each other by number. A class or function is a name and is never looked up;
//! calling one is a node that says so. What a node means is decided elsewhere.
//!
//! A known crate is not used here: those that exist either build nested values (a memo bomb grows
//! without bound in them) or resolve what they read.

mod arena;
mod cursor;
mod error;
mod memo;
mod vm;

pub use arena::{Arena, Node, NodeId};
pub use error::PickleError;
pub use vm::{MAX_PICKLE_BYTES, memory_allowance, read_pickle};
