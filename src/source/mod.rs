//! Bytes on disk and in object stores: which files may be opened, whether they have changed, and how to read them.
//!
//! `store` has the traits of every kind of source. `local` is this machine, `remote` the others.
//!
//! A [`SourceFile`] is a path and a [`FileState`], without a descriptor. Opened, it is an [`OpenFile`], which any
//! thread may read at any offset.
//!
//! A path that a directory or a file contains (a symbolic link, an index) is opened beneath its [`Root`] by the
//! kernel (`openat2`). It cannot lead out of the directory that the user named.
//!
//! `deferred_checks` compares the headers that a parser deduced, and did not read, of a file in a store.

mod deferred_checks;
#[cfg(feature = "remote")]
mod disk_cache;
mod error;
mod file;
mod file_limit;
mod file_reader;
mod lease;
mod local;
mod metadata;
mod missing;
mod page_cache;
mod read_at;
mod read_spans;
#[cfg(feature = "remote")]
mod remote;
mod request_counters;
mod root;
#[cfg(feature = "remote")]
mod scatter;
mod settled;
mod store;
#[cfg(test)]
mod test_file;
mod url;

pub use deferred_checks::{DeferredChecks, HeaderCheck, UnreadHeader};
#[cfg(feature = "remote")]
pub use disk_cache::{
    CacheOptions, CacheReport, CacheShortage, CachedVersion, DiskCache, RemovedBlocks,
};
pub(crate) use error::WAIT_REMEDY;
pub use error::{Damage, HeaderMismatch, SourceError};
pub use file::{FileBytes, OpenFile, SourceFile, UserPath};
pub use file_limit::raise_file_limit;
pub use file_reader::{DIRECT_ALIGNMENT_BYTES, DirectFile, FileReader, ReadMode};
pub use local::is_hub_repository;
pub use metadata::{FileIdentity, FileKind, FileMetadata, FileState};
pub use missing::{
    describe_missing, is_remote_name, missing_remedy, shown_missing_path, url_scheme,
};
pub use page_cache::{ActiveRead, PageCacheGuard, WholeFileGuard};
pub use read_at::ReadAt;
#[cfg(all(feature = "remote", feature = "cli"))]
pub use remote::stop_requests_with;
#[cfg(feature = "remote")]
pub use remote::{
    AccessStep, CONNECTIONS_RANGE, PERCENT_RANGE, RemoteError, RemoteOptions, RemoteOverrides,
    SECONDS_RANGE, StepOutcome, check_access, set_remote_options,
};
pub use request_counters::{RequestCounters, request_counters, store_failures};
pub use root::{Root, is_directory, split_parent};
pub use settled::{is_past_clock_step, is_settled};
pub use store::{DirEntry, LinkPolicy, PreferredRequests, REMOTE_GAP_BYTES, ResolvedPath, Storage};
pub use url::{
    HIDDEN_QUERY, QuerySource, SourceUrl, StoreKind, UrlError, absolute_path, is_source_url,
    reads_stdin, shown_path,
};
