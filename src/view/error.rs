//! Why a view cannot be had, or not a part of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{checkpoint, source, virtual_file};

use super::Refusal;

/// A directory or an image that cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// The source's own answer.
    #[error(transparent)]
    Source(#[from] source::SourceError),
    /// A checkpoint that was shown can no longer be read.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::CheckpointError),
    /// A checkpoint that was shown can no longer be laid out.
    #[error(transparent)]
    VirtualFile(#[from] virtual_file::VirtualFileError),
    /// The one checkpoint that was asked for cannot be shown.
    #[error("{}", .0.reason)]
    Refused(Arc<Refusal>),
    /// It is never the same twice.
    #[error("{path}: changes faster than it can be read")]
    KeepsChanging {
        /// The directory or checkpoint.
        path: PathBuf,
    },
}

impl ViewError {
    /// The file or directory at fault.
    pub fn path(&self) -> &Path {
        match self {
            ViewError::Source(error) => error.path(),
            ViewError::Checkpoint(error) => error.path(),
            ViewError::VirtualFile(error) => error.path(),
            ViewError::Refused(refusal) => &refusal.path,
            ViewError::KeepsChanging { path } => path,
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> &str {
        match self {
            ViewError::Source(error) => error.remedy(),
            ViewError::Checkpoint(error) => error.remedy(),
            ViewError::VirtualFile(error) => error.remedy(),
            ViewError::Refused(refusal) => &refusal.remedy,
            ViewError::KeepsChanging { .. } => {
                "wait until the program that writes it is done, then try again"
            }
        }
    }

    /// Whether the checkpoint itself is at fault, rather than the machine.
    pub fn is_refusal(&self) -> bool {
        match self {
            ViewError::Source(error) => error.is_refusal(),
            ViewError::Checkpoint(error) => error.is_refusal(),
            ViewError::VirtualFile(error) => error.is_refusal(),
            ViewError::Refused(_) => true,
            ViewError::KeepsChanging { .. } => false,
        }
    }
}
