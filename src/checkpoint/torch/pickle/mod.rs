//! Reads a pickle without executing it.
//!
//! In: the bytes of one pickle, protocols 2 to 5. Out: an [`Arena`]: the values that the pickle describes, as nodes
//! that refer to each other by number.
//!
//! A class or function is a name, and is never looked up. A call is a node. What a node means is decided elsewhere.
//!
//! No known crate fits. Those that exist either build nested values, which a memo bomb makes grow without bound, or
//! resolve what they read.

mod arena;
mod cursor;
mod error;
mod integer;
mod limits;
mod memo;
mod opcode;
mod stack;
mod vm;

pub use arena::{Arena, Node, NodeId};
pub use error::PickleError;
pub use limits::{MAX_PICKLE_BYTES, memory_allowance};
pub use vm::read_pickle;
