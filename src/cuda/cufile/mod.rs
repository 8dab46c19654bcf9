//! GPUDirect Storage: storage writes the bytes of a file straight into the memory of a device.
//!
//! NVIDIA's library for it (`libcufile`) is loaded at the first use. Where the library would read through the host's
//! memory instead, it counts as unavailable: our own reads are faster then.

mod abi;
mod block_device;
mod chunk;
mod eligibility;
#[cfg(test)]
mod eligibility_tests;
mod file;
mod library;
mod unavailable;

pub use chunk::RegisteredChunk;
pub use file::RegisteredFile;
pub use library::CufileSession;
pub use unavailable::GdsUnavailable;
