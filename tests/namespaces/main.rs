//! Mounts in other mount namespaces. A binary of its own, because the state of the machine changes.
//! A new namespace copies every mount of the machine, and keeps it until the namespace ends.

#![cfg(feature = "mount")]
#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

#[path = "../common/mod.rs"]
mod common;

mod diagnoses_for_users;
mod logs_to_the_system;
mod mounts_from_fstab;
mod unmount_leaves_other_mounts;
mod unprivileged;

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static NAMESPACES: RwLock<()> = RwLock::new(());

/// For a test that makes namespaces, beside others that do.
fn shared() -> RwLockReadGuard<'static, ()> {
    NAMESPACES.read().unwrap_or_else(PoisonError::into_inner)
}

/// For a test whose mounts no other test's namespace may copy.
fn exclusive() -> RwLockWriteGuard<'static, ()> {
    NAMESPACES.write().unwrap_or_else(PoisonError::into_inner)
}
