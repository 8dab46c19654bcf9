//! Errors of a load, with the remedy for each.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::checkpoint::{CheckpointError, SliceError};
use crate::recipe::RecipeError;
use crate::shell_word::shell_word;
use crate::source::SourceError;
use crate::view::ViewError;
use crate::virtual_file::VirtualFileError;

/// A checkpoint that cannot be opened, or tensors that cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The checkpoint cannot be found or parsed.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The recipe cannot be read.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The checkpoint cannot be laid out.
    #[error(transparent)]
    VirtualFile(#[from] VirtualFileError),
    /// The files cannot be read, or have changed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// No tensor has the name.
    #[error("{path}: has no tensor {name:?}{}", similar.as_ref().map_or(String::new(), |similar| format!("; there is {similar:?}")))]
    UnknownTensor {
        /// The path of the checkpoint.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
        /// The most similar name that exists.
        similar: Option<String>,
    },
    /// The tensor has no such slice.
    #[error("{path}: {name}: {error}")]
    Slice {
        /// The path of the checkpoint.
        path: PathBuf,
        /// The name of the tensor.
        name: String,
        /// The fault of the slice.
        error: SliceError,
    },
    /// The memory to load into has another length than the tensor.
    #[error("{path}: {name}: has {needed} bytes, and memory for {provided} was given")]
    TargetLength {
        /// The path of the checkpoint.
        path: PathBuf,
        /// The name of the tensor.
        name: String,
        /// Bytes of the tensor.
        needed: u64,
        /// Bytes of the memory.
        provided: u64,
    },
    /// The system has too little memory.
    #[error("{path}: there is no memory for {bytes} bytes")]
    OutOfMemory {
        /// The path of the checkpoint.
        path: PathBuf,
        /// The size of the allocation that failed.
        bytes: u64,
    },
    /// The memory that the options allow is too little to read with.
    #[error("{path}: {allowed} bytes of memory were allowed for reading, which needs {needed}")]
    MemoryLimit {
        /// The path of the checkpoint.
        path: PathBuf,
        /// Bytes that are allowed.
        allowed: u64,
        /// Bytes that reading needs.
        needed: u64,
    },
    /// The system starts no thread to read with.
    #[error("{path}: cannot start a thread to read it")]
    NoThread {
        /// The path of the checkpoint.
        path: PathBuf,
    },
    /// The sink cannot deliver the bytes to their target.
    #[error("{path}: cannot be delivered to its target: {error}")]
    Sink {
        /// The path of the checkpoint.
        path: PathBuf,
        /// The fault of the sink.
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller stopped the load.
    #[error("{path}: was stopped before all of it was read")]
    Stopped {
        /// The path of the checkpoint.
        path: PathBuf,
    },
}

impl LoadError {
    /// The file or directory at fault.
    pub fn path(&self) -> &Path {
        match self {
            LoadError::View(error) => error.path(),
            LoadError::Recipe(error) => error.path(),
            LoadError::VirtualFile(error) => error.path(),
            LoadError::Source(error) => error.path(),
            LoadError::UnknownTensor { path, .. }
            | LoadError::Slice { path, .. }
            | LoadError::TargetLength { path, .. }
            | LoadError::OutOfMemory { path, .. }
            | LoadError::MemoryLimit { path, .. }
            | LoadError::NoThread { path }
            | LoadError::Sink { path, .. }
            | LoadError::Stopped { path } => path,
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            LoadError::View(error) => return error.remedy(),
            LoadError::Recipe(error) => return error.remedy(),
            LoadError::VirtualFile(error) => return error.remedy(),
            LoadError::Source(error) => return error.remedy(),
            LoadError::UnknownTensor { path, .. } => {
                let path = shell_word(path);
                return format!("see which there are: ckptfs inspect --tensors {path}").into();
            }
            LoadError::Slice { path, .. } => {
                let path = shell_word(path);
                return format!("see its shape: ckptfs inspect --tensors {path}").into();
            }
            LoadError::TargetLength { .. } => "give memory of the tensor's own type and shape",
            LoadError::OutOfMemory { .. } => {
                "load fewer tensors at a time, or those parts that are needed"
            }
            LoadError::MemoryLimit { needed, .. } => {
                return format!("allow at least {needed} bytes").into();
            }
            LoadError::NoThread { .. } => {
                "allow more threads (`ulimit -u`, or the limit of the container)"
            }
            LoadError::Sink { .. } => "load it on the CPU",
            LoadError::Stopped { .. } => "load it again",
        })
    }
}

impl From<CheckpointError> for LoadError {
    fn from(error: CheckpointError) -> LoadError {
        LoadError::View(ViewError::Checkpoint(error))
    }
}
