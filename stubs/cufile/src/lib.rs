//! A stub of NVIDIA's library for GPUDirect Storage, `libcufile.so.0`, beside the stub of CUDA's driver:
//! the functions that a loader calls, with the names and types of the real ones (header of libcufile 1.17).
//!
//! In: calls of the C interface, and settings from the environment (`settings`). Out: bytes of files in "device"
//! memory, at once and whatever is queued there; words on standard error for each fault, and a report.
//!
//! It is stricter than the real one: what that does by other, slower ways, or leaves undefined, is a fault.

mod calls;
mod cuda;
mod library;
mod refused;
mod settings;
