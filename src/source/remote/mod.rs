//! Sources in object stores and behind web servers.
//!
//! [`RemoteDirectory`] lists prefixes, and opens objects as [`RemoteFile`]s. Both are blocking: a caller's thread waits
//! while the `runtime`'s threads serve the sockets. Every read is conditional on the version that was opened, and its
//! answer is compared with it: length, range and ETag. `retry` resumes a read that broke where it broke.
//!
//! `transport` is the one place where requests are sent; `listing_filter` removes unusable names from its answers, and
//! `addresses` bounds what it connects to. `store` builds the client of a store, with the credentials that `credentials`
//! finds. `listing` has the known names of directories.

mod access_check;
mod addresses;
mod concurrency;
mod credentials;
mod directory;
mod error;
mod file;
mod listing;
mod listing_filter;
mod options;
mod outage;
mod pages;
mod retry;
mod runtime;
mod secret_query;
mod store;
mod transport;
mod version;

pub use access_check::{AccessStep, StepOutcome, check_access};
pub use directory::RemoteDirectory;
pub use error::RemoteError;
pub use options::{
    CONNECTIONS_RANGE, PERCENT_RANGE, RemoteOptions, RemoteOverrides, SECONDS_RANGE,
    set_remote_options,
};
