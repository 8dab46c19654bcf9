//! Errors of devices, each with a remedy.

use std::borrow::Cow;

use crate::loader;

/// A device that cannot be used, or a load to it that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error("CUDA: this machine has no driver (libcuda.so.1)")]
    NoDriver,
    /// This process was forked from one that uses the driver.
    #[error("CUDA: this process was forked from one that uses it")]
    Forked,
    /// There is no device of that number.
    #[error("cuda:{ordinal}: no such device, {count} found")]
    NoDevice {
        /// The requested number.
        ordinal: usize,
        /// The number of devices.
        count: usize,
    },
    /// The device lacks memory.
    #[error("cuda:{ordinal}: has no memory for {bytes} bytes ({free} of {total} are free)")]
    OutOfMemory {
        /// The number of the device.
        ordinal: usize,
        /// The requested bytes.
        bytes: usize,
        /// The free bytes.
        free: usize,
        /// All bytes of the device.
        total: usize,
    },
    /// The system provides no pinned memory.
    #[error("cuda:{ordinal}: there is no host memory to pass bytes through: {why}")]
    PinnedMemory {
        /// The number of the device.
        ordinal: usize,
        /// The driver's reason.
        why: String,
    },
    /// A call to the driver failed.
    #[error("cuda:{ordinal}: {call}: {why}")]
    Driver {
        /// The number of the device.
        ordinal: usize,
        /// The function of the driver.
        call: &'static str,
        /// The driver's reason.
        why: String,
    },
    /// The bytes could not be loaded.
    #[error(transparent)]
    Load(loader::LoadError),
}

impl CudaError {
    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            CudaError::NoDriver => "install NVIDIA's driver, or load on the CPU",
            CudaError::Forked => "start processes with `spawn`, or load on the CPU",
            CudaError::NoDevice { .. } => "list the devices with `nvidia-smi`",
            CudaError::OutOfMemory { .. } => "free memory on the device, or load fewer tensors",
            CudaError::PinnedMemory { .. } => {
                "allow more memory to be locked (`ulimit -l`), or use less of it"
            }
            CudaError::Driver { .. } => "see what the driver says, with `nvidia-smi` and `dmesg`",
            CudaError::Load(error) => return error.remedy(),
        })
    }
}

impl From<loader::LoadError> for CudaError {
    fn from(error: loader::LoadError) -> Self {
        match error {
            // An error of our own sink comes back as it was.
            loader::LoadError::Sink { path, error } => match error.downcast::<CudaError>() {
                Ok(ours) => *ours,
                Err(error) => CudaError::Load(loader::LoadError::Sink { path, error }),
            },
            error => CudaError::Load(error),
        }
    }
}
