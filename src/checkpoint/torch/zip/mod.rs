//! Finds the records of a torch zip archive, strictly.
//!
//! In: any [`ReadAt`](crate::source::ReadAt). Out: a [`ZipArchive`]: the records by name, each with the place of its
//! bytes.
//!
//! General zip readers find an archive inside whatever surrounds it, and tolerate counts and names that disagree.
//! Readers that tolerate different things see different archives in one file: this is how malware scanners were
//! fooled. So this reader accepts one form only. The end record is at the very end, the directory is right before
//! it, and every number is equal in both its places.
//!
//! In a store, where each small read is slow, the first read of a record also reads and checks its header.

mod archive;
mod deduced_records;
mod directory;
mod end_record;
mod error;
mod fields;
mod local_header;
mod packed_record;
mod record_reader;
mod tail;
mod zip64;

pub use archive::{PICKLE, ZipArchive, read_archive};
pub use error::ZipError;
pub use packed_record::{PackedRecord, read_record};
