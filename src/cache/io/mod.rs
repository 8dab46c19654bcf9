//! Reading sources, on threads that may wait.

pub mod executor;
mod origin_reader;
pub mod source;
