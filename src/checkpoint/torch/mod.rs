//! Reads what `torch.save` wrote, in its two forms, without executing its pickle.
//!
//! In: an opened file, its path and the options. Out: [`Contents`]: the tensors of the chosen
//! dictionary with the places of their bytes, notes, and what is refused.
//!
//! The way through: an envelope ([`zip`] or [`legacy`]) gives the pickle and the storages;
//! [`pickle`] turns the first into nodes; [`meaning`] says which nodes are tensors; [`choose`] picks
//! the dictionary, as [`state_dict`] knows it, and [`naming`] names its entries; [`place`] turns a view
//! of a storage into a place in the file. [`gate`] bounds the memory of concurrent parses.

mod census;
mod choice_fault;
mod choose;
mod contents;
mod gate;
mod legacy;
mod meaning;
mod naming;
mod pickle;
mod place;
mod state_dict;
mod zip;

pub use choice_fault::Fault as ChoiceFault;
pub use contents::{Contents, read_legacy, read_zip};
pub use legacy::Fault as LegacyFault;
pub use pickle::Fault as PickleFault;
pub use zip::Fault as ZipFault;

/// The first bytes of a zip archive.
pub const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

/// The first bytes of every file of the older form: torch's magic number, pickled by itself.
pub const LEGACY_MAGIC: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
