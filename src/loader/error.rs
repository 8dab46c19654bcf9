//! What can go wrong with a load, in words, with the remedy.

use std::path::{Path, PathBuf};

use crate::checkpoint::PartFault;
use crate::{image, source, view};

/// A checkpoint that cannot be opened, or tensors that cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It cannot be found, or not be shown.
    #[error(transparent)]
    View(#[from] view::Error),
    /// It cannot be laid out.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// Its files cannot be read, or changed.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// There is no tensor of that name.
    #[error("{path}: has no tensor {name:?}{}", near.as_ref().map_or(String::new(), |near| format!("; there is {near:?}")))]
    Unknown {
        /// The checkpoint.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
        /// One that there is, and that looks much like it.
        near: Option<String>,
    },
    /// There is no such part of a tensor.
    #[error("{path}: {name}: {fault}")]
    Part {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong with the part.
        fault: PartFault,
    },
    /// The memory that was given is not as long as what is to be read into it.
    #[error("{path}: {name}: has {needs} bytes, and memory for {given} was given")]
    Length {
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
    Memory {
        /// The checkpoint.
        path: PathBuf,
        /// So much was wanted at once.
        bytes: u64,
    },
    /// There is no reading with so little memory.
    #[error("{path}: {given} bytes of memory were allowed for reading, which needs {needs}")]
    Budget {
        /// The checkpoint.
        path: PathBuf,
        /// So much was allowed.
        given: u64,
        /// So much it takes.
        needs: u64,
    },
    /// The system starts no thread that is needed.
    #[error("{path}: the system starts no thread to read it with")]
    Threads {
        /// The checkpoint.
        path: PathBuf,
    },
    /// What was read cannot get to where it belongs.
    #[error("{path}: cannot get to where it is wanted: {fault}")]
    Stage {
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

impl Error {
    /// The file or directory at fault.
    pub fn path(&self) -> &Path {
        match self {
            Error::View(error) => error.path(),
            Error::Image(error) => error.path(),
            Error::Source(error) => error.path(),
            Error::Unknown { path, .. }
            | Error::Part { path, .. }
            | Error::Length { path, .. }
            | Error::Memory { path, .. }
            | Error::Budget { path, .. }
            | Error::Threads { path }
            | Error::Stage { path, .. }
            | Error::Stopped { path } => path,
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> &str {
        match self {
            Error::View(error) => error.remedy(),
            Error::Image(error) => error.remedy(),
            Error::Source(error) => error.remedy(),
            Error::Unknown { .. } => "see which there are, with `ckptfs inspect`",
            Error::Part { .. } => "see its shape, with `ckptfs inspect`",
            Error::Length { .. } => "give memory of the tensor's own type and shape",
            Error::Memory { .. } => "load fewer tensors at a time, or those parts that are needed",
            Error::Budget { .. } => "allow more",
            Error::Threads { .. } => {
                "allow more threads (`ulimit -u`, or the limit of the container)"
            }
            Error::Stage { .. } => "load it on the CPU",
            Error::Stopped { .. } => "load it again",
        }
    }
}
