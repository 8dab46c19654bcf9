//! Loading tensors into memory from sources and from mounts.

#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

#[path = "../common/mod.rs"]
mod common;

mod loads_any_tensor;
#[cfg(feature = "mount")]
mod loads_from_a_mount;
mod loads_several_checkpoints;
mod maps_tensors_in_place;
