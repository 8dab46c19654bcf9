//! Bytes on disk: which files may be opened, whether they have changed, and how to read them.
//!
//! A [`SourceFile`] is a path and a [`FileState`], without a descriptor. Opened, it is an [`OpenFile`], which any
//! thread may read at any offset.
//!
//! A path that a directory or a file contains (a symbolic link, an index) is opened beneath its [`Root`] by the
//! kernel (`openat2`). It cannot lead out of the directory that the user named.

mod error;
mod file;
mod file_limit;
mod file_reader;
mod long_path;
mod metadata;
mod missing;
mod page_cache;
mod read_at;
mod root;
mod settled;
#[cfg(test)]
mod test_file;

pub use error::SourceError;
pub(crate) use error::WAIT_REMEDY;
pub use file::{FileBytes, OpenFile, SourceFile, UserPath};
pub use file_limit::raise_file_limit;
pub use file_reader::{DIRECT_ALIGNMENT_BYTES, DirectFile, FileReader, ReadMode};
pub use metadata::{FileIdentity, FileKind, FileMetadata, FileState};
pub use missing::{describe_missing, is_remote_name, missing_remedy};
pub use page_cache::{ActiveRead, PageCacheGuard, WholeFileGuard};
pub use read_at::ReadAt;
pub use root::{
    DirEntry, LinkPolicy, ResolvedPath, Root, is_directory, is_hub_repository, split_parent,
};
pub use settled::{is_past_clock_step, is_settled};
