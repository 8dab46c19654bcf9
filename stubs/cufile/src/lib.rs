//! A stub of NVIDIA's library for GPUDirect Storage, `libcufile.so.0`, beside the stub of CUDA's driver. It has the
//! functions that a loader calls, with the names and types of libcufile 1.17.
//!
//! Settings come from the environment (`settings`). Reads write to "device" memory at once, whatever is queued there.
//! Each fault is printed on standard error, and there is a report at the end.
//!
//! It is stricter than the real library: what that does in a slower way, or leaves undefined, is a fault.

mod calls;
mod cuda;
mod library;
mod refused;
mod settings;
