//! A stub of the CUDA driver's library, `libcuda.so.1`, for machines without a GPU. It has the functions that a copy
//! pipeline calls, with the names and types of the real ones.
//!
//! Settings come from the environment (`settings`). Each fault is printed on standard error, and a report (`report`)
//! says what was called and what was left behind.
//!
//! It is stricter than the real driver. The work of a stream is not done until something waits for it, so that a
//! missing wait shows in the bytes. What the real driver leaves undefined is a fault.

pub mod calls;
pub mod codes;
mod contexts;
mod device_memory;
mod driver;
mod faults;
mod handles;
mod host_memory;
mod kernels;
mod memory;
mod names;
mod report;
mod settings;
mod streams;
