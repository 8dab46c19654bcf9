//! A cache of remote objects on the disks of this machine, which all processes of a user share.
//!
//! Each version of an object has a folder, with a file (a block) for each range that was read. A block gets its name when
//! it is whole, and never changes: no lock is needed, and a killed process leaves nothing. The least recently used blocks
//! are evicted when there is no room. Every read compares checksums, which one file in the folder has.
//!
//! The cache sends no request. Callers know which version is the newest.

mod block;
mod block_file;
mod block_reader;
mod checksums;
mod folder;
mod ledger;
mod limits;
mod manifest;
mod object;
mod page_dropper;
mod usage;

pub use folder::{CacheReport, DiskCache, RemovedBlocks};
pub use limits::{CacheOptions, CacheShortage};
pub use manifest::{CachedVersion, ObjectId};
pub use object::CachedObject;
