//! Reads what `torch.save` wrote, in its two forms, without executing its pickle.
//!
//! In: an opened file and the options. Out: [`FileContents`](super::contents::FileContents): the tensors of the
//! selected dictionary with the places of their bytes, notes, and refused entries.
//!
//! An envelope ([`zip`] or [`legacy`]) gives the pickle and the storages. [`pickle`] turns the first into nodes.
//! [`interpret`] says what a node is, [`tensor_view`] and [`storage_ref`] which tensor and which storage.
//! [`state_dict`] selects the dictionary and names its entries. [`storage_bounds`] turns a view of a storage into
//! a place in the file: every bound of a tensor is checked there. [`gate`] bounds the memory of concurrent parses.

mod axis_cut;
mod device_mesh;
mod error;
mod gate;
mod interpret;
mod legacy;
mod names;
mod object;
pub mod pickle;
mod rank_piece;
mod reader;
mod state_dict;
mod storage_bounds;
mod storage_finder;
mod storage_ref;
mod tensor_view;
mod values;
mod zip;

pub use error::TorchError;
pub use gate::acquire as acquire_parse_permit;
pub use legacy::LegacyError;
pub use names::shorten_name;
pub use object::{attribute, class_of, entry};
pub use pickle::PickleError;
pub use rank_piece::{LocalPart, PieceReader, RankPiece, RecordedRanks, has_rank_pieces};
pub use reader::{read_legacy, read_zip};
pub use state_dict::{
    FLAT_PARAMETER, FLAT_PARAMETER_REMEDY, SelectError, Selection, is_training_key,
    select_state_dict,
};
pub use storage_ref::as_count;
pub use tensor_view::{as_counts, torch_dtype};
pub use values::TorchValues;
pub use zip::ZipError;
