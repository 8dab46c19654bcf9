//! Loading to devices, on stubs of NVIDIA's libraries.
//!
//! Each test runs its body in a process of its own, because a process loads these libraries once.

#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

#[path = "../common/mod.rs"]
mod common;

mod casts_on_devices;
mod finds_the_cuda_driver;
mod gpudirect_reads;
mod loads_to_devices;
