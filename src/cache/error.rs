//! Why a read of an open image was not answered with bytes.

use std::path::{Path, PathBuf};

use crate::{image, source};

/// A read that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sources cannot be read, or changed.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// The program itself failed while it read: the read can be tried again.
    #[error("{path}: reading it failed in a way that should not be possible")]
    Failed {
        /// The checkpoint's file that was read.
        path: PathBuf,
    },
    /// Reading was stopped, or no thread could be started for it.
    #[error("reading was stopped")]
    Stopped,
}

impl From<source::Error> for Error {
    fn from(error: source::Error) -> Self {
        Error::Image(error.into())
    }
}

impl Error {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Error::Image(error) => error.remedy(),
            Error::Failed { .. } => "try again, and report it with the log",
            Error::Stopped => "mount again",
        }
    }

    /// Whether the bytes that the image was made of are gone, so that no later read can do better.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Error::Image(image::Error::Source(
                source::Error::Changed { .. } | source::Error::Short { .. }
            ))
        )
    }

    /// The source at fault, where there is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Error::Image(image::Error::Source(error)) => Some(error.path()),
            Error::Image(_) | Error::Stopped => None,
            Error::Failed { path } => Some(path),
        }
    }
}
