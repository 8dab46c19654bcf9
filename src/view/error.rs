//! Why a view cannot be had, or not a part of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{checkpoint, image, source};

use super::Refusal;

/// A directory or an image that cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The source's own answer.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// A checkpoint that was shown can no longer be read.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// A checkpoint that was shown can no longer be laid out.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// The one checkpoint that was asked for cannot be shown.
    #[error("{}", .0.reason)]
    Refused(Arc<Refusal>),
    /// It is never the same twice.
    #[error("{path}: changes faster than it can be read")]
    Restless {
        /// The directory or checkpoint.
        path: PathBuf,
    },
}

impl Error {
    /// The file or directory at fault.
    pub fn path(&self) -> &Path {
        match self {
            Error::Source(error) => error.path(),
            Error::Checkpoint(error) => error.path(),
            Error::Image(error) => error.path(),
            Error::Refused(refusal) => &refusal.path,
            Error::Restless { path } => path,
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> &str {
        match self {
            Error::Source(error) => error.remedy(),
            Error::Checkpoint(error) => error.remedy(),
            Error::Image(error) => error.remedy(),
            Error::Refused(refusal) => &refusal.remedy,
            Error::Restless { .. } => {
                "wait until the program that writes it is done, then try again"
            }
        }
    }

    /// Whether the checkpoint itself is at fault, rather than the machine.
    pub fn is_refusal(&self) -> bool {
        match self {
            Error::Source(error) => error.is_refusal(),
            Error::Checkpoint(error) => error.is_refusal(),
            Error::Image(error) => error.is_refusal(),
            Error::Refused(_) => true,
            Error::Restless { .. } => false,
        }
    }
}
