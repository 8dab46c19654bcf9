//! A stub of the CUDA driver's library, `libcuda.so.1`: the functions that a copy pipeline calls, with
//! the names and types of the real ones, on a machine without a GPU.
//!
//! In: calls of the C interface, and settings from the environment (`settings`). Out: what the real driver
//! would answer, bytes in "device" memory once somebody waited for them, words on standard error for each
//! fault, and a report (`report`).
//!
//! It is stricter than the real one. Work that is given to a stream is left undone until somebody waits for
//! it, so a wait that is missing shows in the bytes. What the real one leaves undefined is a fault.

pub mod calls;
pub mod codes;
mod contexts;
mod copies;
mod device_memory;
mod driver;
mod faults;
mod host_memory;
mod report;
mod settings;
mod streams;
