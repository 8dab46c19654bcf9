//! Locks for [`super::ring`]. `proofs/ring` replaces them with those of loom.

pub use std::sync::{Condvar, Mutex};

use std::sync::{MutexGuard, PoisonError};

pub use crate::threads::lock;

/// Waits for a notification.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
