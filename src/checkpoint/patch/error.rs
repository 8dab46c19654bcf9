//! Why the changes of a tensor cannot be decoded.

use crate::source::SourceError;

/// A layer that cannot be decoded.
#[derive(Debug)]
pub struct LayerError {
    /// The number of the layer.
    pub layer: usize,
    pub error: PatchError,
}

/// Why the changes of a tensor by one delta cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub enum PatchError {
    /// The compressed bytes cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The compressed bytes are damaged, or of another format.
    #[error("its changes are no zstd frame: {0}")]
    Frame(String),
    /// The frame does not state its size, as it must.
    #[error("the frame of its changes does not state its size")]
    NoSize,
    /// The frame states a size that the changes of this tensor cannot have.
    #[error("the frame of its changes states {stated} bytes, and {expected} are needed")]
    StatedSize { stated: u64, expected: u64 },
    /// Fewer bytes than needed.
    #[error("its changes end early: {expected} bytes are needed")]
    Short { expected: u64 },
    /// More bytes than needed.
    #[error("its changes do not end where they should, after {expected} bytes")]
    Long { expected: u64 },
    /// More changes than the tensor has bytes.
    #[error("{count} bytes of it are said to change, and it has {len}")]
    Count { count: u64, len: u64 },
    /// A change past the end of the tensor.
    #[error("byte {position} of it is said to change, and it has {len}")]
    OutOfRange { position: u64, len: u64 },
    /// Positions that are not in order, or the same twice.
    #[error(
        "byte {position} of it is said to change after byte {previous}: trainers write positions in ascending order"
    )]
    Unordered { position: u64, previous: u64 },
}
