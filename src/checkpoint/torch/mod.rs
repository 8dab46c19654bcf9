//! Reads what `torch.save` wrote, in its two forms, without executing its pickle.
//!
//! In: an opened file, its path and the options. Out: [`Contents`]: the tensors of the chosen
//! dictionary with the places of their bytes, notes, and what is refused.
//!
//! The way through: an envelope ([`zip`] or [`legacy`]) gives the pickle and the storages;
//! [`pickle`] turns the first into nodes; [`interpret`] says which nodes are tensors; [`select_state_dict`] picks
//! the dictionary, as [`state_dict`] knows it, and [`flatten_names`] names its entries; [`storage_bounds`] turns a view
//! of a storage into a place in the file. [`gate`] bounds the memory of concurrent parses.

mod flatten_names;
mod gate;
mod interpret;
mod legacy;
mod pickle;
mod reachability;
mod reader;
mod select_error;
mod select_state_dict;
mod state_dict;
mod storage_bounds;
mod zip;

pub use legacy::LegacyError;
pub use pickle::PickleError;
pub use reader::{FileContents, read_legacy, read_zip};
pub use select_error::SelectError;
pub use zip::ZipError;

/// The first bytes of a zip archive.
pub const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

/// The first bytes of every file of the older form: torch's magic number, pickled by itself.
pub const LEGACY_MAGIC: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
