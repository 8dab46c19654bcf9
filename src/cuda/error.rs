//! What can go wrong with a device, in words, with the remedy.

use crate::loader;

/// A device that cannot be used, or tensors that cannot be had on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error("CUDA: this machine has no driver (libcuda.so.1)")]
    NoDriver,
    /// This process was forked from one that uses the driver.
    #[error("CUDA: this process was forked from one that uses it")]
    Forked,
    /// There is no such device.
    #[error("cuda:{ordinal}: there is no such device, of {count}")]
    NoDevice {
        /// The one that was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The device has not as much memory.
    #[error("cuda:{ordinal}: has no memory for {bytes} bytes ({free} of {total} are free)")]
    OutOfMemory {
        /// The device.
        ordinal: usize,
        /// So many were wanted.
        bytes: usize,
        /// So many are free.
        free: usize,
        /// So many there are.
        total: usize,
    },
    /// The system gives no memory that a device can read by itself.
    #[error("cuda:{ordinal}: there is no host memory to pass bytes through: {why}")]
    PinnedMemory {
        /// The device.
        ordinal: usize,
        /// What the driver says.
        why: String,
    },
    /// A call to the driver failed.
    #[error("cuda:{ordinal}: {call}: {why}")]
    Driver {
        /// The device.
        ordinal: usize,
        /// Which call.
        call: &'static str,
        /// What the driver says.
        why: String,
    },
    /// What is to be loaded cannot be had.
    #[error(transparent)]
    Load(loader::LoadError),
}

impl CudaError {
    /// What the user can do about it.
    pub fn remedy(&self) -> &str {
        match self {
            CudaError::NoDriver => "install NVIDIA's driver, or load on the CPU",
            CudaError::Forked => "start processes with `spawn`, or load on the CPU",
            CudaError::NoDevice { .. } => "see which there are, with `nvidia-smi`",
            CudaError::OutOfMemory { .. } => "free memory on the device, or load fewer tensors",
            CudaError::PinnedMemory { .. } => {
                "allow more memory to be locked (`ulimit -l`), or use less of it"
            }
            CudaError::Driver { .. } => "see what the driver says, with `nvidia-smi` and `dmesg`",
            CudaError::Load(error) => error.remedy(),
        }
    }
}

impl From<loader::LoadError> for CudaError {
    fn from(error: loader::LoadError) -> Self {
        match error {
            // What a stage of ours said comes back as it was.
            loader::LoadError::Sink { path, error } => match error.downcast::<CudaError>() {
                Ok(ours) => *ours,
                Err(error) => CudaError::Load(loader::LoadError::Sink { path, error }),
            },
            error => CudaError::Load(error),
        }
    }
}
