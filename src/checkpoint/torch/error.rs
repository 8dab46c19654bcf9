//! Why a torch file cannot be read. The caller adds the path.

use crate::source::SourceError;

use super::legacy::LegacyError;
use super::pickle::PickleError;
use super::state_dict::SelectError;
use super::zip::ZipError;

/// What is wrong with a torch file.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    /// The bytes cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The archive is damaged, or could be read in two ways.
    #[error(transparent)]
    Zip(#[from] ZipError),
    /// The archive is a program with its weights.
    #[error("a TorchScript program")]
    TorchScript,
    /// The file of the older form is damaged.
    #[error(transparent)]
    Legacy(#[from] LegacyError),
    /// The pickle breaks its format or its limits.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// There is no dictionary of tensors to show.
    #[error(transparent)]
    Selection(#[from] SelectError),
}

impl TorchError {
    /// The error of reading the file, if it is one; otherwise the same error.
    pub fn into_source(self) -> Result<SourceError, TorchError> {
        match self {
            TorchError::Source(error)
            | TorchError::Zip(ZipError::Source(error))
            | TorchError::Legacy(LegacyError::Source(error)) => Ok(error),
            error => Err(error),
        }
    }
}
