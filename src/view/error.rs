//! Errors of a view: what cannot be shown, or no longer, and the remedy.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::CheckpointError;
use crate::source::{SourceError, WAIT_REMEDY};
use crate::virtual_file::VirtualFileError;

/// A directory or a virtual file that cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// The source cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A checkpoint that was shown can no longer be parsed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A checkpoint that was shown can no longer be laid out.
    #[error(transparent)]
    VirtualFile(#[from] VirtualFileError),
    /// The one checkpoint that the view is for cannot be shown.
    #[error("{}", .0.reason)]
    Refused(Arc<Refusal>),
    /// The files differ at every look.
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

    /// Whether a store was silent for too long, which its log line already says.
    pub fn is_outage(&self) -> bool {
        self.source_error().is_some_and(SourceError::is_outage)
    }

    /// Whether a retry may succeed although no file changes.
    pub fn may_pass(&self) -> bool {
        self.source_error().is_some_and(SourceError::may_pass)
    }

    fn source_error(&self) -> Option<&SourceError> {
        match self {
            ViewError::Source(error)
            | ViewError::Checkpoint(CheckpointError::Source(error))
            | ViewError::VirtualFile(VirtualFileError::Source(error)) => Some(error),
            ViewError::VirtualFile(VirtualFileError::Refused(error)) => match &**error {
                CheckpointError::Source(error) => Some(error),
                _ => None,
            },
            _ => None,
        }
    }

    /// The same error about the path that the user typed, if that names the missing file.
    #[cfg(feature = "mount")]
    pub(crate) fn with_typed_path(self, typed: &Path) -> ViewError {
        match self {
            ViewError::Source(error) => error.with_typed_path(typed).into(),
            error => error,
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            ViewError::Source(error) => error.remedy(),
            ViewError::Checkpoint(error) => error.remedy(),
            ViewError::VirtualFile(error) => error.remedy(),
            ViewError::Refused(refusal) => refusal.remedy.as_str().into(),
            ViewError::KeepsChanging { .. } => WAIT_REMEDY.into(),
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

/// A checkpoint that stays as it is.
#[derive(Debug)]
pub struct Refusal {
    /// The path in messages.
    pub path: PathBuf,
    /// The names of its files.
    pub originals: Vec<String>,
    /// Why it cannot be shown as a virtual file.
    pub reason: String,
    /// What the user can do about it.
    pub remedy: String,
    /// Whether it is no checkpoint at all, so that there was nothing to refuse.
    pub is_not_checkpoint: bool,
}

impl Refusal {
    /// The refusal of files, for an error.
    pub fn new(originals: Vec<String>, error: &ViewError) -> Refusal {
        Refusal {
            path: error.path().to_path_buf(),
            originals,
            reason: error.to_string(),
            remedy: error.remedy().into_owned(),
            is_not_checkpoint: matches!(
                error,
                ViewError::Checkpoint(CheckpointError::UnreadFormat { format, .. }) if !format.is_torch()
            ),
        }
    }
}
