//! Why a virtual file cannot be laid out or read.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::checkpoint::{self, RefusedEntry};
use crate::source;

/// A virtual file that cannot be laid out or read.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum VirtualFileError {
    /// The sources cannot be read, or changed.
    #[error(transparent)]
    Source(#[from] source::SourceError),
    /// Something in the checkpoint cannot be shown.
    #[error(transparent)]
    Refused(Box<checkpoint::CheckpointError>),
    /// The header would be longer than any reader takes.
    #[error(
        "{path}: as one file its header would be longer than the {limit} bytes that any reader takes"
    )]
    HeaderTooLong { path: PathBuf, limit: u64 },
    /// The tensors together are larger than a file can be.
    #[error("{path}: as one file it would be larger than a file can be")]
    TooLarge { path: PathBuf },
    /// The system has too little memory for a buffer.
    #[error("{path}: there is no memory for a buffer of {bytes} bytes")]
    OutOfMemory { path: PathBuf, bytes: u64 },
}

impl VirtualFileError {
    /// The refusal of a checkpoint with refused entries, of which `tensor_count` tensors can be shown.
    pub(super) fn from_refused(
        path: PathBuf,
        refused: Vec<RefusedEntry>,
        tensor_count: usize,
    ) -> Self {
        VirtualFileError::Refused(Box::new(checkpoint::CheckpointError::RefusedEntries {
            path,
            refused,
            tensor_count,
        }))
    }

    /// The file or directory at fault.
    pub fn path(&self) -> &Path {
        match self {
            VirtualFileError::Source(error) => error.path(),
            VirtualFileError::Refused(error) => error.path(),
            VirtualFileError::HeaderTooLong { path, .. }
            | VirtualFileError::TooLarge { path }
            | VirtualFileError::OutOfMemory { path, .. } => path,
        }
    }

    /// What the user can do.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            VirtualFileError::Source(error) => error.remedy(),
            VirtualFileError::Refused(error) => error.remedy(),
            VirtualFileError::HeaderTooLong { .. } | VirtualFileError::TooLarge { .. } => {
                "split the checkpoint".into()
            }
            VirtualFileError::OutOfMemory { .. } => {
                "end other programs, or raise the limit on memory (ulimit -v)".into()
            }
        }
    }

    /// Whether the checkpoint itself is at fault, rather than the machine.
    pub fn is_refusal(&self) -> bool {
        match self {
            VirtualFileError::Source(error) => error.is_refusal(),
            VirtualFileError::OutOfMemory { .. } => false,
            _ => true,
        }
    }
}
