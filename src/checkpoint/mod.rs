//! A checkpoint on disk: its tensors, and the places of their bytes.
//!
//! In: a path, or opened files ([`crate::source`]).
//! Out: a [`Checkpoint`]: tensors, metadata, notes on what was chosen or left out, and refused entries.
//!
//! Nothing of a pickle is executed or imported, and no tensor byte is read.
//! Every size and offset that a file states is checked against the file before it is believed.
//!
//! [`open()`] finds what a path means. `directory` groups the files of a directory into candidates. `single_file`
//! reads one file of any [`Format`], `shards` joins several, `unread_format` names the formats without a reader, and `origins` reads the bytes of tensors.

mod contents;
mod conversions;
mod damaged_deltas;
mod delta;
mod delta_error;
mod delta_index;
mod directory;
mod error;
mod format;
mod json;
mod name_index;
mod newest_version;
mod no_choice;
mod open;
mod options;
mod origins;
mod patch;
mod refusal;
mod safetensors;
mod shard_index;
mod shards;
mod single_file;
mod tensor;
mod torch;
mod training;
mod training_error;
mod truncated_list;
mod unread_format;

pub use contents::{Checkpoint, MAX_TENSOR_COUNT};
pub use damaged_deltas::damaged_delta_count;
pub use delta_error::DeltaError;
pub use directory::{
    BaseVersion, CHECKPOINT_EXTENSIONS, Candidate, CandidateFiles, DefaultChoice, LoaderName,
    NumberedSetError, TrainingFormat, candidates_by_name, choose_default, find_candidates,
    is_training_file, lone_shard_note, training_pattern, unsharded_name_of_index,
};
pub use error::CheckpointError;
pub use format::{Format, detect_unread};
pub(crate) use json::python_numbers;
pub(crate) use name_index::NameIndex;
pub use newest_version::{
    DeltaVersions, NewestVersion, newest_version_paths, open_newest, version_of_folder,
};
pub use open::{choose_in_directory, open, open_by_name, open_candidate};
pub use options::ParseOptions;
pub(crate) use origins::ConvertedRun;
pub use origins::OpenOrigins;
pub(crate) use origins::{Scatter, scatters_of};
pub use patch::{lower_patch_limit, set_patch_limit};
pub(crate) use refusal::RESERVED_NAME;
pub use refusal::{RefusedEntry, TensorError};
pub(crate) use safetensors::header_describes;
pub use safetensors::{HeaderError, MAX_HEADER_BYTES};
pub use shard_index::{IndexError, ShardIndex, parse_index};
pub use single_file::parse_bytes;
pub use tensor::{
    Axis, AxisSlice, Boxes, ByteRun, CastError, Dtype, Grid, LayoutKind, MAX_ELEMENT_BYTES,
    MAX_OVERLAP_COUNT, Origin, OriginId, PatchedBytes, Shape, SliceError, StackError, Tensor,
    TensorBox, TensorBytes, TensorName, TensorPart, TilingError, find_overlaps,
};
pub use torch::{LegacyError, PickleError, SelectError, ZipError};
pub use training_error::TrainingError;
pub use unread_format::UnreadFormat;
