//! GPUDirect Storage: the storage writes what is read of a file straight into the memory of a device.
//!
//! In: open files, and chunks of device memory. Out: bytes in the chunks, or what is missing, in words. NVIDIA's
//! library for it (`libcufile`) is found when it is first needed. Where it would read by the host's memory
//! instead, it is taken for not there: we do that faster.

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
