//! The filesystem of one mount: the replies to the kernel's requests.
//!
//! `filesystem` takes each request and sends exactly one reply. The session's threads never wait for the source:
//! what may block runs in the `blocking_pool`, and virtual files are read by the cache. So a source that hangs
//! delays only its own readers. What is shown is decided in `view`.

mod attr;
mod blocking_pool;
mod denied_ops;
mod filesystem;
mod handles;
mod inodes;
mod listings;
mod open_virtual_files;
mod outcomes;
mod readdir;
mod retries;
mod source_handles;
mod state;
mod xattrs;

pub use attr::OwnerOverride;
pub use blocking_pool::BlockingPool;
pub use filesystem::FuseFilesystem;
pub use handles::HandleTable;
pub use listings::Listings;
pub use state::{FilesystemState, MountDescription};
