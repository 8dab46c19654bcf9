//! Locks for [`super::ring`], which `proofs/ring` has of another kind.

pub use std::sync::{Condvar, Mutex};

use std::sync::{MutexGuard, PoisonError};

pub use crate::threads::lock;

/// Waits until somebody says that there is more.
pub fn wait<'a, T>(more: &Condvar, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    more.wait(held).unwrap_or_else(PoisonError::into_inner)
}
