//! Reading sources, on threads that may wait.

pub mod executor;
pub mod source;
