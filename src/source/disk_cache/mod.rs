//! A cache of remote objects on the disks of this machine, which all processes of a user share.
//!
//! Each version of an object has a folder, and in it a file for each range that was read (a block). A block has no name
//! until it is whole, and is never changed: no lock is needed, and a killed process leaves nothing. The least recently
//! used blocks are removed where space ends. Every read compares checksums.
//!
//! Callers know versions, and whether one is still the newest: the cache has no network.

mod block;
mod block_file;
mod block_reader;
mod folder;
mod limits;
mod manifest;
mod object;
mod read_spans;
mod usage;

pub use folder::{CacheReport, DiskCache, RemovedBlocks};
pub use limits::CacheOptions;
pub use manifest::{CachedVersion, ObjectId};
pub use object::CachedObject;
