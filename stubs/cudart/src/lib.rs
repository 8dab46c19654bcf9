//! A stub of CUDA's runtime library, `libcudart.so.13`: the functions that PyTorch calls, translated into calls of the
//! driver, `libcuda.so.1`.
//!
//! The driver copies, orders and checks. With the stub of the driver that is as late and as strict as `stubs/cuda` is.
//!
//! There are no kernels. A launch fails with "not supported", and its name goes to standard error.

mod answers;
mod calls;
mod codes;
mod devices;
mod driver;
