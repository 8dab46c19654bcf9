//! The filesystem of a mount: the replies to the kernel's requests.

mod attr;
mod blocking_pool;
mod counters;
mod denied_ops;
mod filesystem;
mod handles;
mod inodes;
mod node_path;
mod open_virtual_files;
mod readdir;
mod reply;
mod retries;
mod source_removed;
mod xattrs;

pub use attr::OwnerOverride;
pub use counters::MountCounters;
pub use filesystem::FuseFilesystem;
pub use handles::HandleTable;
pub use readdir::Listings;
pub use source_removed::SourceWatch;
