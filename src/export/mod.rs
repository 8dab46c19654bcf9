//! Writes a virtual file as a real file, whole or not at all: it has no name until it is complete and on the disk.
//!
//! Or writes its bytes in order, to a pipe for example.

mod atomic_file;
mod copy;
mod ordered_writer;
mod output_path;

use std::borrow::Cow;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::shell_word::shell_word;
use crate::source::{self, SourceUrl};
use crate::virtual_file::{self, Progress, VirtualFileReader};

pub use atomic_file::AtomicFile;
pub use output_path::{check_output_path, safetensors_name};

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
    /// A link of that name leads to no file.
    #[error("{path}: is a link to {target}, which does not exist")]
    DanglingLink {
        /// The path that was asked for.
        path: PathBuf,
        /// The target, as the link stores it.
        target: PathBuf,
    },
    /// A pipe, a socket or a device has that name.
    #[error("{path}: is not a regular file")]
    NotRegularFile {
        /// What has the name.
        path: PathBuf,
    },
    /// The path is a URL.
    #[error("{path}: is a URL, and ckptfs writes files on disk only")]
    Url {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// The name is that of a file of another format.
    #[error("{path}: .{suffix} is the suffix of another format, and this writes safetensors")]
    OtherSuffix {
        /// The path that was asked for.
        path: PathBuf,
        /// The suffix, without its dot.
        suffix: String,
        /// The path with the suffix of safetensors.
        right_path: PathBuf,
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
    /// What the bytes are written to takes no more of them.
    #[error("cannot write the checkpoint to standard output: {source}")]
    Stream {
        /// The system's error.
        source: io::Error,
    },
    /// The caller asked to stop before the file had its name.
    #[error("stopped before it was complete; nothing was written")]
    Stopped,
    /// The caller asked to stop before the last byte was written in order.
    #[error("stopped before everything was written to standard output")]
    StreamStopped,
}

/// The remedy for an output URL. A key without a suffix is that of a folder.
fn upload_remedy(url: &Path) -> String {
    let key = match SourceUrl::parse(url) {
        Some(Ok(url)) => url.key,
        _ => String::new(),
    };
    let (files, option) = match Path::new(&key).extension() {
        Some(_) => ("model.safetensors", ""),
        None => ("model", "--recursive "),
    };
    let command = match source::url_scheme(url) {
        Some("s3") if !key.is_empty() => "aws s3 cp",
        Some("gs") if !key.is_empty() => "gcloud storage cp",
        Some("file") => return "give the path that the URL names".to_owned(),
        _ => {
            return "write to this machine, then upload it with the client of the store".to_owned();
        }
    };
    let word = shell_word(url);
    format!("write to this machine, then upload it: {command} {option}{files} {word}")
}

impl ExportError {
    fn io(path: &Path, action: &'static str, source: impl Into<io::Error>) -> Self {
        ExportError::Io { path: path.to_path_buf(), action, source: source.into() }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            ExportError::VirtualFile(error) => return error.remedy(),
            ExportError::OtherSuffix { right_path, .. } => {
                let right = shell_word(right_path);
                return format!("call it {right}, or keep the name with --any-suffix").into();
            }
            ExportError::Url { path } => return upload_remedy(path).into(),
            ExportError::Stream { source } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    "make room where standard output goes, and run it again: what was written is not whole"
                }
                _ => "run it again: what was written is not whole; see why its reader stopped",
            },
            ExportError::Exists { .. } => "choose another name, or replace it with --force",
            ExportError::IsDirectory { .. } => "give the name of a file",
            ExportError::DanglingLink { path, .. } => {
                return format!("remove it first: rm {}", shell_word(path)).into();
            }
            ExportError::NotRegularFile { .. } => {
                "give the name of a file, or - for standard output"
            }
            ExportError::NoSpace { .. } => "make room, or choose another disk",
            ExportError::Io { path, source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied => {
                    "choose a directory that you may write to, or run as the user who may"
                }
                io::ErrorKind::ReadOnlyFilesystem => {
                    "choose another directory: this one is read-only, as every mount of ckptfs is"
                }
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
            ExportError::StreamStopped => "run it again: what was written is not whole",
        })
    }
}

/// Writes the whole virtual file to `path`; replaces an existing file only with `replace`.
pub fn export(
    reader: &VirtualFileReader,
    path: &Path,
    replace: bool,
    progress: &dyn Progress,
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

/// Writes all bytes of the virtual file in order. After an error, what was written is not whole.
pub fn export_to(
    reader: &VirtualFileReader,
    out: &mut (dyn Write + Send),
    progress: &dyn Progress,
) -> Result<(), ExportError> {
    copy::stream_contents(reader, out, progress)?;
    Ok(reader.check_all_unchanged()?)
}

impl From<source::SourceError> for ExportError {
    fn from(error: source::SourceError) -> Self {
        ExportError::VirtualFile(error.into())
    }
}
