//! Daemons and sources that do not answer. A binary of its own, because the state of the machine changes:
//! every `status` on the machine waits for a mount that does not answer.

#![cfg(feature = "mount")]
#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

#[path = "../common/mod.rs"]
mod common;

mod heals_dead_mounts;
mod sources_that_hang;
mod stuck_mounts_block_nobody;
mod unmount_waits_for_daemon;
