//! Errors of a view: what cannot be shown, or no longer, and the remedy.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::CheckpointError;
use crate::recipe::StepError;
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
    /// A file of a recipe cannot be shown.
    #[error("{path}: {fault}")]
    Recipe {
        /// Where it would be shown.
        path: PathBuf,
        /// What is wrong.
        fault: Box<RecipeFault>,
    },
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
            ViewError::Recipe { path, .. } | ViewError::KeepsChanging { path } => path,
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
            ViewError::Recipe { fault, .. } => fault.remedy().into(),
            ViewError::KeepsChanging { .. } => WAIT_REMEDY.into(),
        }
    }

    /// Whether the checkpoint itself is at fault, rather than the machine.
    pub fn is_refusal(&self) -> bool {
        match self {
            ViewError::Source(error) => error.is_refusal(),
            ViewError::Checkpoint(error) => error.is_refusal(),
            ViewError::VirtualFile(error) => error.is_refusal(),
            ViewError::Refused(_) | ViewError::Recipe { .. } => true,
            ViewError::KeepsChanging { .. } => false,
        }
    }
}

/// What is wrong with a file of a recipe.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecipeFault {
    /// It would hide a file of the source.
    #[error("the recipe shows {shown}, and the source has a file or directory of that name")]
    HidesFile { shown: String },
    /// It would hide a refused checkpoint, whose files are shown as they are.
    #[error(
        "the recipe shows {shown}, which would hide {hidden}, and that is refused by itself: {reason}"
    )]
    HidesRefused { shown: String, hidden: String, reason: String },
    /// Its path leads through a link or a file.
    #[error("the recipe shows {shown}, and {above} is {what} in the source")]
    NotADirectory { shown: String, above: String, what: &'static str },
    /// A file beside it cannot be followed.
    #[error("`beside` matches {name}, which cannot be shown: {reason}")]
    UnreadableBeside { name: String, reason: String },
    /// No file to show beside it.
    #[error("the rule beside = [\"{glob}\"] matches no name in {directory}")]
    NothingBeside { glob: String, directory: String },
    /// The directory of the files beside it cannot be listed.
    #[error("`beside` needs the names in {directory}, which cannot be listed: {reason}")]
    UnlistedBeside { directory: String, reason: String },
    /// The configuration has no fields to set.
    #[error("its configuration {config} {reason}")]
    Config { config: String, reason: String },
    /// The recipe has no file at the path.
    #[error("the recipe shows no such file; it shows: {shown}")]
    NotShown { shown: String },
    /// A step cannot be done.
    #[error(transparent)]
    Step(#[from] StepError),
}

impl RecipeFault {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            RecipeFault::HidesFile { .. } | RecipeFault::HidesRefused { .. } => {
                "give the file of the recipe another path"
            }
            RecipeFault::NotADirectory { .. } => {
                "give the file of the recipe a path through directories; that of the link's target, for example"
            }
            RecipeFault::UnreadableBeside { .. } => {
                "let the globs of `beside` match other names, or put a copy in the place of the link"
            }
            RecipeFault::NothingBeside { .. } => {
                "correct the glob, or let it match nothing: optional = true"
            }
            RecipeFault::UnlistedBeside { .. } => {
                "make the directory readable, or leave `beside` out"
            }
            RecipeFault::Config { .. } => "correct the configuration, or leave `config` out",
            RecipeFault::NotShown { .. } => "give one of these paths, beneath the source",
            RecipeFault::Step(error) => error.remedy(),
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

/// A file of a recipe that is not shown.
#[derive(Debug)]
pub struct RefusedView {
    /// Its path in the view; `None` if nothing of the recipe is shown.
    pub path: Option<String>,
    /// Why it is not shown.
    pub refusal: Arc<Refusal>,
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
