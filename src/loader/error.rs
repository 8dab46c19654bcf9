//! What can go wrong with a load, in words, with the remedy.

use std::path::{Path, PathBuf};

use crate::checkpoint::SliceError;
use crate::{source, view, virtual_file};

/// A checkpoint that cannot be opened, or tensors that cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It cannot be found, or not be shown.
    #[error(transparent)]
    View(#[from] view::ViewError),
    /// It cannot be laid out.
    #[error(transparent)]
    VirtualFile(#[from] virtual_file::VirtualFileError),
    /// Its files cannot be read, or changed.
    #[error(transparent)]
    Source(#[from] source::SourceError),
    /// There is no tensor of that name.
    #[error("{path}: has no tensor {name:?}{}", near.as_ref().map_or(String::new(), |near| format!("; there is {near:?}")))]
    UnknownTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
        /// One that there is, and that looks much like it.
        near: Option<String>,
    },
    /// There is no such part of a tensor.
    #[error("{path}: {name}: {fault}")]
    Slice {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong with the part.
        fault: SliceError,
    },
    /// The memory that was given is not as long as what is to be read into it.
    #[error("{path}: {name}: has {needs} bytes, and memory for {given} was given")]
    TargetLength {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Bytes of the tensor.
        needs: u64,
        /// Bytes of the memory.
        given: u64,
    },
    /// The system has not as much memory.
    #[error("{path}: there is no memory for {bytes} bytes")]
    OutOfMemory {
        /// The checkpoint.
        path: PathBuf,
        /// So much was wanted at once.
        bytes: u64,
    },
    /// There is no reading with so little memory.
    #[error("{path}: {given} bytes of memory were allowed for reading, which needs {needs}")]
    MemoryLimit {
        /// The checkpoint.
        path: PathBuf,
        /// So much was allowed.
        given: u64,
        /// So much it takes.
        needs: u64,
    },
    /// The system starts no thread that is needed.
    #[error("{path}: the system starts no thread to read it with")]
    NoThread {
        /// The checkpoint.
        path: PathBuf,
    },
    /// What was read cannot get to where it belongs.
    #[error("{path}: cannot get to where it is wanted: {fault}")]
    Sink {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong there.
        fault: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Whoever wanted it wants no more.
    #[error("{path}: was stopped before all of it was read")]
    Stopped {
        /// The checkpoint.
        path: PathBuf,
    },
}

impl LoadError {
    /// The file or directory at fault.
    pub fn path(&self) -> &Path {
        match self {
            LoadError::View(error) => error.path(),
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
    pub fn remedy(&self) -> &str {
        match self {
            LoadError::View(error) => error.remedy(),
            LoadError::VirtualFile(error) => error.remedy(),
            LoadError::Source(error) => error.remedy(),
            LoadError::UnknownTensor { .. } => "see which there are, with `ckptfs inspect`",
            LoadError::Slice { .. } => "see its shape, with `ckptfs inspect`",
            LoadError::TargetLength { .. } => "give memory of the tensor's own type and shape",
            LoadError::OutOfMemory { .. } => {
                "load fewer tensors at a time, or those parts that are needed"
            }
            LoadError::MemoryLimit { .. } => "allow more",
            LoadError::NoThread { .. } => {
                "allow more threads (`ulimit -u`, or the limit of the container)"
            }
            LoadError::Sink { .. } => "load it on the CPU",
            LoadError::Stopped { .. } => "load it again",
        }
    }
}
