//! Sources in object stores and behind web servers.
//!
//! [`RemoteDirectory`] lists prefixes, and opens objects as [`RemoteFile`]s. Both are blocking: a caller's thread waits
//! while the `runtime`'s threads serve the sockets. Every read is conditional on the version that was opened, and its
//! answer is compared with it: length, range and ETag. `retry` resumes a read that broke where it broke.
//!
//! `transport` is the one place where requests are sent, by the clients of `http_client`. These trust the system's
//! certificates and the user's, which `certificates` reads. `answer` checks what comes back, `listing_filter` removes
//! unusable names from it, and `redirect` decides what is followed. `addresses` limits what is
//! connected to. `client` makes the client of a store, with the credentials that `credentials` finds, and `store` sends its
//! requests. `listing` has the known names of directories.

mod access_check;
mod addresses;
mod answer;
mod certificates;
mod client;
mod concurrency;
mod credentials;
mod directory;
mod error;
mod failure;
mod file;
mod http_client;
mod listing;
mod listing_filter;
mod options;
mod outage;
mod overrides;
mod pages;
mod redirect;
mod retry;
mod runtime;
mod secret_query;
mod store;
mod transport;
mod version;

pub use access_check::{AccessStep, StepOutcome, check_access};
pub use directory::RemoteDirectory;
pub use error::RemoteError;
pub use options::RemoteOptions;
pub use overrides::{
    CONNECTIONS_RANGE, PERCENT_RANGE, RemoteOverrides, SECONDS_RANGE, set_remote_options,
};
#[cfg(feature = "cli")]
pub use runtime::stop_requests_with;
