//! The error of a read of an open virtual file.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::source::SourceError;
use crate::virtual_file::VirtualFileError;

/// A read that failed.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The sources cannot be read, or changed.
    #[error(transparent)]
    VirtualFile(#[from] VirtualFileError),
    /// The program itself failed while it read. The read can be tried again.
    #[error("{path}: reading it failed in a way that should not be possible")]
    Internal {
        /// The source file.
        path: PathBuf,
    },
    /// Reading was stopped, or no thread could be started for it.
    #[error("reading was stopped")]
    Stopped,
}

impl From<SourceError> for CacheError {
    fn from(error: SourceError) -> Self {
        CacheError::VirtualFile(error.into())
    }
}

impl CacheError {
    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            CacheError::VirtualFile(error) => error.remedy(),
            CacheError::Internal { .. } => "try again, and report it with the log".into(),
            CacheError::Stopped => "mount again".into(),
        }
    }

    /// Whether the bytes that were parsed are gone, so that no later read can do better.
    pub fn is_permanent(&self) -> bool {
        matches!(
            self,
            CacheError::VirtualFile(VirtualFileError::Source(
                SourceError::Changed { .. }
                    | SourceError::Truncated { .. }
                    | SourceError::HeaderMismatch { .. }
                    | SourceError::Damaged { .. }
            ))
        )
    }

    /// Whether a store was silent for too long, which its log line already says.
    pub fn is_outage(&self) -> bool {
        matches!(self, CacheError::VirtualFile(VirtualFileError::Source(error)) if error.is_outage())
    }

    /// The source at fault, where there is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            CacheError::VirtualFile(VirtualFileError::Source(error)) => Some(error.path()),
            CacheError::VirtualFile(_) | CacheError::Stopped => None,
            CacheError::Internal { path } => Some(path),
        }
    }
}
