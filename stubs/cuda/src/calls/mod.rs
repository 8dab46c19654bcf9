//! The functions of the C interface, by subject: see NVIDIA's driver API.
//!
//! An output pointer of C is a reference that may be absent: a null pointer gives `INVALID_VALUE`. Handles and
//! addresses are numbers.

#![allow(non_snake_case)] // The names are NVIDIA's.

pub mod context;
pub mod copy;
pub mod device;
pub mod event;
pub mod library;
pub mod lookup;
pub mod memory;
pub mod module;
mod output;
pub mod stream;
pub mod test;
pub mod unsupported;

pub use output::Out;
