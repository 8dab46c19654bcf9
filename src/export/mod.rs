//! Writes a virtual file as a real file, whole or not at all: it has no name until it is complete and on the disk.

mod atomic_file;
mod copy;
pub(crate) mod temp_file;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use crate::shell_word::shell_word;
use crate::source;
use crate::virtual_file::{self, VirtualFileReader};

pub use atomic_file::AtomicFile;

/// Why a file was not written. Whatever the reason, nothing is left of the attempt.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The virtual file cannot be read.
    #[error(transparent)]
    VirtualFile(#[from] virtual_file::VirtualFileError),
    /// The name is taken.
    #[error("{path}: already exists")]
    Exists {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// A directory has that name.
    #[error("{path}: is a directory")]
    IsDirectory {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// A pipe, a socket or a device has that name.
    #[error("{path}: is not a regular file")]
    NotRegularFile {
        /// What has the name.
        path: PathBuf,
    },
    /// The file is larger than the free space.
    #[error("{path}: needs {needs} bytes, and {free} are free there")]
    NoSpace {
        /// The path that was asked for.
        path: PathBuf,
        /// Bytes of the whole file.
        needs: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A system call failed.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The path that was asked for.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The caller asked to stop.
    #[error("stopped before it was complete; nothing was written")]
    Stopped,
}

impl ExportError {
    fn io(path: &Path, action: &'static str, source: impl Into<io::Error>) -> Self {
        ExportError::Io { path: path.to_path_buf(), action, source: source.into() }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            ExportError::VirtualFile(error) => return error.remedy(),
            ExportError::Exists { .. } => "choose another name, or replace it with --force",
            ExportError::IsDirectory { .. } | ExportError::NotRegularFile { .. } => {
                "give the name of a file"
            }
            ExportError::NoSpace { .. } => "make room, or choose another disk",
            ExportError::Io { path, source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    "make room, or choose another disk"
                }
                io::ErrorKind::FileTooLarge => {
                    "raise the limit on file sizes, or choose another disk"
                }
                io::ErrorKind::NotFound => {
                    let directory = path.parent().unwrap_or(path);
                    return format!("make the directory first: mkdir -p {}", shell_word(directory))
                        .into();
                }
                _ => "choose another disk, or see whether this one works (dmesg tells)",
            },
            ExportError::Stopped => "run it again to start over",
        })
    }
}

/// What the writer reports, and asks, while it works.
pub trait ExportProgress {
    /// Called after this many more bytes.
    fn on_write(&self, bytes: u64);
    /// Whether to give up.
    fn should_stop(&self) -> bool;
}

/// Writes the whole virtual file to `path`; replaces an existing file only with `replace`.
pub fn export(
    reader: &VirtualFileReader,
    path: &Path,
    replace: bool,
    progress: &dyn ExportProgress,
) -> Result<(), ExportError> {
    let size = reader.virtual_file().size();
    let file = AtomicFile::create(path, replace)?;
    file.require_room(size)?;
    copy::copy_contents(reader, &file, progress)?;
    // The sources are checked after their last byte was read.
    reader.check_all_unchanged()?;
    file.sync()?;
    if progress.should_stop() {
        return Err(ExportError::Stopped);
    }
    file.publish()
}

impl From<source::SourceError> for ExportError {
    fn from(error: source::SourceError) -> Self {
        ExportError::VirtualFile(error.into())
    }
}
