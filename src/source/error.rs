//! Errors of opening and reading files, each with a remedy.

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::shell_word::shell_word;

use super::missing::{describe_missing, missing_remedy, no_client_remedy, shown_missing_path};
use super::url::is_source_url;

/// A file or directory that cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// No file has that name.
    #[error("{}: {}", shown_missing_path(.path), describe_missing(.path))]
    Missing {
        /// The requested path.
        path: PathBuf,
    },
    /// A symbolic link whose target does not exist, inside or outside of the directory that the user named.
    #[error("{path}: is a link to {target}, which does not exist")]
    Dangling {
        /// The requested path.
        path: PathBuf,
        /// The target, as the link stores it.
        target: PathBuf,
    },
    /// Neither a regular file nor, where one is accepted, a directory.
    #[error("{path}: is {kind}, and a checkpoint is a regular file")]
    NotAFile {
        /// The requested path.
        path: PathBuf,
        /// The kind that it has instead, with its article.
        kind: &'static str,
    },
    /// A link or a `..` leads out of the directory that the user named.
    #[error("{path}: leads out of {root}")]
    OutsideRoot {
        /// The requested path.
        path: PathBuf,
        /// The directory that bounds it.
        root: PathBuf,
    },
    /// The file is no longer the one that was parsed.
    #[error("{path}: {}changed {} since it was read", failed_request(.request.as_deref()), place_of(.path))]
    Changed {
        /// The changed file.
        path: PathBuf,
        /// The failed request to its store; `None` if a comparison of metadata found the change.
        request: Option<String>,
    },
    /// The file ends before bytes that it must have.
    #[error("{path}: ends before byte {offset} of what it must hold")]
    Truncated {
        /// The truncated file.
        path: PathBuf,
        /// The offset at which the read began.
        offset: u64,
    },
    /// A header differs from what a parser deduced.
    #[error("{path}: {}", .mismatch.reason)]
    HeaderMismatch {
        /// The file with the header.
        path: PathBuf,
        /// What is wrong with the header.
        mismatch: Box<HeaderMismatch>,
    },
    /// The bytes of the file do not pass a check of their format.
    #[error("{path}: {}", .damage.reason)]
    Damaged {
        /// The damaged file.
        path: PathBuf,
        /// What is wrong with it.
        damage: Box<Damage>,
    },
    /// The path is on a FUSE mount whose daemon has ended.
    #[error("{path}: lies on a mount whose daemon has gone")]
    StaleMount {
        /// The requested path.
        path: PathBuf,
    },
    /// A URL, and this build has no client for it.
    #[error("{path}: is a URL, and this build of ckptfs reads files on disk only")]
    NoRemote {
        /// The URL that the user gave.
        path: PathBuf,
    },
    /// A store or a server does not give what was asked for.
    #[cfg(feature = "remote")]
    #[error("{path}: cannot {action}: {error}")]
    Remote {
        /// The URL of the file or directory.
        path: PathBuf,
        /// The request that failed.
        action: Cow<'static, str>,
        /// The answer of the store, or why there was none.
        error: Box<super::remote::RemoteError>,
    },
    /// Any other error of a system call.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

/// What the reader of a format found wrong with bytes of a file.
#[derive(Clone, Debug)]
pub struct Damage {
    /// What is wrong.
    pub reason: String,
    /// What the user can do.
    pub remedy: String,
}

/// A header that differs from what a parser deduced.
#[derive(Debug)]
pub struct HeaderMismatch {
    /// What is wrong with the file.
    pub reason: String,
    /// What the user can do.
    pub remedy: &'static str,
}

const NOT_CONNECTED_ERRNO: i32 = Errno::NOTCONN.raw_os_error();
/// Filesystems, ours too, return this for a file that another file has replaced.
const STALE_ERRNO: i32 = Errno::STALE.raw_os_error();
const TOO_MANY_FILES_ERRNO: i32 = Errno::MFILE.raw_os_error();

/// The mountpoint of the dead mount that a path lies on: no path in such a mount can be looked at.
fn dead_mountpoint(path: &Path) -> &Path {
    let is_dead = |path: &&Path| {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        rustix::fs::stat(path).is_err_and(|error| error == Errno::NOTCONN)
    };
    path.ancestors().take_while(is_dead).last().unwrap_or(path)
}

/// What to do about a file that is being written. A handle that was open before keeps failing.
pub(crate) const WAIT_REMEDY: &str =
    "wait until the program that writes it is done, then open it again";

/// The part of a message that names a request to a store.
fn failed_request(request: Option<&str>) -> String {
    request.map_or_else(String::new, |request| format!("cannot {request}: "))
}

/// Words for where the bytes of a path lie.
fn place_of(path: &Path) -> &'static str {
    if is_source_url(path) { "in its store" } else { "on disk" }
}

impl SourceError {
    /// The file or directory at fault.
    pub fn path(&self) -> &Path {
        match self {
            SourceError::Missing { path }
            | SourceError::Dangling { path, .. }
            | SourceError::NotAFile { path, .. }
            | SourceError::OutsideRoot { path, .. }
            | SourceError::Changed { path, .. }
            | SourceError::Truncated { path, .. }
            | SourceError::HeaderMismatch { path, .. }
            | SourceError::Damaged { path, .. }
            | SourceError::StaleMount { path }
            | SourceError::NoRemote { path }
            | SourceError::Io { path, .. } => path,
            #[cfg(feature = "remote")]
            SourceError::Remote { path, .. } => path,
        }
    }

    /// A change that was found by a comparison of metadata, without a failed request.
    pub(crate) fn changed(path: PathBuf) -> SourceError {
        SourceError::Changed { path, request: None }
    }

    pub(crate) fn io(path: &Path, action: &'static str, source: impl Into<io::Error>) -> Self {
        let path = path.to_path_buf();
        match source.into() {
            error if error.kind() == io::ErrorKind::NotFound => SourceError::Missing { path },
            error if error.raw_os_error() == Some(NOT_CONNECTED_ERRNO) => {
                SourceError::StaleMount { path }
            }
            source => SourceError::Io { path, action, source },
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            SourceError::Missing { path } => return missing_remedy(path).into(),
            SourceError::Dangling { .. } => "put the file there, or remove the link",
            SourceError::NotAFile { .. } => "give a checkpoint file or a directory that holds one",
            SourceError::OutsideRoot { .. } => {
                "if you trust where it leads, allow it with --follow-symlinks; otherwise copy the file into the directory"
            }
            SourceError::Changed { path, .. } if is_source_url(path) => {
                "open it again; if that fails too, check that its server states the same ETag in every answer"
            }
            SourceError::HeaderMismatch { mismatch, .. } => mismatch.remedy,
            SourceError::Damaged { damage, .. } => &damage.remedy,
            SourceError::Changed { .. } | SourceError::Truncated { .. } => WAIT_REMEDY,
            SourceError::Io { source, .. } if source.raw_os_error() == Some(STALE_ERRNO) => {
                WAIT_REMEDY
            }
            SourceError::NoRemote { path } => return no_client_remedy(path).into(),
            #[cfg(feature = "remote")]
            SourceError::Remote { error, .. } => return error.remedy(),
            SourceError::StaleMount { path } => {
                let mountpoint = shell_word(dead_mountpoint(path));
                return format!(
                    "remove the mount: ckptfs unmount {mountpoint}, or umount if another program made it"
                )
                .into();
            }
            SourceError::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                "ask for read permission on it, or run as its owner"
            }
            SourceError::Io { source, .. }
                if source.raw_os_error() == Some(TOO_MANY_FILES_ERRNO) =>
            {
                "raise the limit on open files (ulimit -n)"
            }
            SourceError::Io { source, .. }
                if matches!(
                    Errno::from_io_error(source),
                    Some(Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG)
                ) =>
            {
                "check the path"
            }
            SourceError::Io { .. } => {
                "see whether the disk or the network filesystem that it lies on works (dmesg tells)"
            }
        })
    }

    /// Turns the error into [`SourceError::Dangling`] if its path is a link to nothing. The path must be one that
    /// the user typed, or lie in a directory that the user typed: the link is followed wherever it leads.
    pub fn or_dangling(self) -> SourceError {
        match &self {
            SourceError::Missing { path } | SourceError::OutsideRoot { path, .. } => {
                let target_status = rustix::fs::stat(path).map(|_| ());
                match (target_status, std::fs::read_link(path)) {
                    (Err(Errno::NOENT), Ok(target)) => {
                        SourceError::Dangling { path: path.clone(), target }
                    }
                    _ => self,
                }
            }
            _ => self,
        }
    }

    /// The same error about the path that the user typed, if that names the missing file: `x`, not `./x`.
    pub(crate) fn with_typed_path(self, typed: &Path) -> SourceError {
        match self {
            SourceError::Missing { path } if path.file_name() == typed.file_name() => {
                SourceError::Missing { path: typed.to_path_buf() }
            }
            error => error,
        }
    }

    /// The `errno` of the system call that failed, if one did.
    pub fn errno(&self) -> Option<i32> {
        match self {
            SourceError::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// Whether nothing has that name.
    #[cfg(feature = "remote")]
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, SourceError::Missing { .. })
    }

    /// Whether a store denies it.
    #[cfg(feature = "remote")]
    pub(super) fn is_denied_by_store(&self) -> bool {
        use super::remote::RemoteError;
        matches!(self, SourceError::Remote { error, .. } if matches!(**error, RemoteError::Denied { .. }))
    }

    /// Whether a store was silent for too long. It logs that itself, once for all its files.
    pub fn is_outage(&self) -> bool {
        match self {
            #[cfg(feature = "remote")]
            SourceError::Remote { error, .. } => error.is_outage(),
            _ => false,
        }
    }

    /// Whether the same read may succeed later although the file stays as it is: its store failed or denied it.
    pub fn may_pass(&self) -> bool {
        match self {
            #[cfg(feature = "remote")]
            SourceError::Remote { error, .. } => !error.is_refusal(),
            _ => false,
        }
    }

    /// Whether only the read failed, so that the file may be intact.
    pub fn is_read_failure(&self) -> bool {
        self.may_pass() || matches!(self, SourceError::Io { .. })
    }

    /// Whether it is a directory of a server that lists none.
    pub(super) fn is_unlisted(&self) -> bool {
        #[cfg(feature = "remote")]
        if let SourceError::Remote { error, .. } = self {
            return matches!(**error, super::remote::RemoteError::NoListing);
        }
        false
    }

    /// Whether this user is not permitted to do it.
    pub fn is_denied(&self) -> bool {
        matches!(self, SourceError::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Whether the system lacks memory or address space.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, SourceError::Io { source, .. } if source.kind() == io::ErrorKind::OutOfMemory)
    }

    /// Whether the checkpoint itself is at fault, rather than the machine.
    pub fn is_refusal(&self) -> bool {
        match self {
            SourceError::Missing { .. }
            | SourceError::Dangling { .. }
            | SourceError::StaleMount { .. }
            | SourceError::NoRemote { .. }
            | SourceError::Io { .. } => false,
            #[cfg(feature = "remote")]
            SourceError::Remote { error, .. } => error.is_refusal(),
            SourceError::NotAFile { .. }
            | SourceError::OutsideRoot { .. }
            | SourceError::Changed { .. }
            | SourceError::Truncated { .. }
            | SourceError::HeaderMismatch { .. }
            | SourceError::Damaged { .. } => true,
        }
    }
}
