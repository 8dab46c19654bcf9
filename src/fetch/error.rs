//! Reasons that a fetch fails.

use std::path::PathBuf;

use crate::byte_size::{format_size, format_size_up};
use crate::shell_word::shell_word;
use crate::source::{CacheShortage, RemoteError, SourceError};
use crate::view::ViewError;
use crate::virtual_file::VirtualFileError;

/// The reason that a fetch failed.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The path cannot be shown.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A virtual file cannot be opened.
    #[error(transparent)]
    VirtualFile(#[from] VirtualFileError),
    /// A source cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// An option of stores has an invalid value.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The path is no URL.
    #[error("{path}: is on this machine already")]
    NotRemote {
        /// The path that was given.
        path: PathBuf,
    },
    /// There is no cache to fetch into.
    #[error("{path}: there is no cache on disk to fetch it into")]
    NoCache {
        /// The URL that was given.
        path: PathBuf,
    },
    /// The cache cannot keep all of it: the last bytes would evict the first.
    #[error("{}", no_room_message(path, *bytes, *shortage))]
    NoRoom {
        /// The URL that was given.
        path: PathBuf,
        /// Bytes of everything that is shown.
        bytes: u64,
        /// What the cache lacks.
        shortage: CacheShortage,
    },
    /// The cache did not keep everything.
    #[error("{path}: the cache on disk has not kept {missing} of {total} bytes")]
    NotKept {
        /// The URL that was given.
        path: PathBuf,
        /// Bytes that are not in the cache.
        missing: u64,
        /// Bytes of everything that is shown.
        total: u64,
    },
    /// The caller asked to stop.
    #[error("stopped; what was fetched stays in the cache")]
    Stopped,
}

fn no_room_message(path: &std::path::Path, bytes: u64, shortage: CacheShortage) -> String {
    let (path, bytes) = (path.display(), format_size(bytes));
    match shortage {
        CacheShortage::Limit { max_bytes, .. } => format!(
            "{path}: takes {bytes}, and the cache on disk is limited to {}: nothing was fetched",
            format_size(max_bytes)
        ),
        CacheShortage::Disk { missing_bytes } => format!(
            "{path}: takes {bytes}, and the disk of the cache lacks {} for it: nothing was fetched",
            format_size_up(missing_bytes)
        ),
    }
}

impl FetchError {
    /// What the user can do about it.
    pub fn remedy(&self) -> std::borrow::Cow<'_, str> {
        match self {
            FetchError::View(error) => error.remedy(),
            FetchError::VirtualFile(error) => error.remedy(),
            FetchError::Source(error) => error.remedy(),
            FetchError::Remote(error) => error.remedy(),
            FetchError::NotRemote { .. } => "give the URL of a store, such as s3://BUCKET/PATH".into(),
            FetchError::NoCache { path } => format!(
                "leave out --no-cache and CKPTFS_NO_CACHE, or give a folder of your own: ckptfs fetch --cache-dir DIR {}",
                shell_word(path)
            )
            .into(),
            FetchError::NoRoom { path, shortage: CacheShortage::Limit { needed_bytes, .. }, .. } => format!(
                "ckptfs fetch --cache-size {} {}",
                format_size_up(*needed_bytes),
                shell_word(path)
            )
            .into(),
            FetchError::NoRoom { path, shortage: CacheShortage::Disk { missing_bytes }, .. } => format!(
                "free {} there, or give a folder on a larger disk: ckptfs fetch --cache-dir DIR {}",
                format_size_up(*missing_bytes),
                shell_word(path)
            )
            .into(),
            FetchError::NotKept { path, .. } => format!(
                "another program wrote to the cache or its disk meanwhile; fetch the rest: ckptfs fetch {}",
                shell_word(path)
            )
            .into(),
            FetchError::Stopped => "run it again to go on".into(),
        }
    }

    /// The remedy for a program in Python.
    #[cfg(feature = "python")]
    pub fn python_remedy(&self) -> std::borrow::Cow<'_, str> {
        match self {
            FetchError::NoCache { .. } => {
                "ckptfs.configure(no_cache=False), or give a folder of your own: ckptfs.configure(cache_dir=DIR)".into()
            }
            FetchError::NoRoom { shortage: CacheShortage::Limit { needed_bytes, .. }, .. } => {
                format!("ckptfs.configure(cache_size=\"{}\")", format_size_up(*needed_bytes)).into()
            }
            FetchError::NoRoom { shortage: CacheShortage::Disk { missing_bytes }, .. } => format!(
                "free {} there, or give a folder on a larger disk: ckptfs.configure(cache_dir=DIR)",
                format_size_up(*missing_bytes)
            )
            .into(),
            error => error.remedy(),
        }
    }
}
