//! What a checkpoint on disk holds: its tensors, each with the place where its bytes lie.
//!
//! In: a path, or opened files ([`crate::source`]).
//! Out: a [`Checkpoint`]: tensors, metadata, notes on what was chosen and left out, and what is
//! refused and why. Nothing of a pickle is executed or imported, and no tensor byte is read:
//! every size and offset that a file states is checked against the file before it is believed.

mod candidate;
mod default_choice;
mod discover;
mod dtype;
mod error;
mod index;
mod json;
mod name;
mod name_index;
mod open;
mod open_sources;
mod overlaps;
mod safetensors;
mod shards;
mod slice;
mod sniff;
mod strided_read;
mod tensor;
mod torch;
mod truncated_list;

use std::collections::BTreeMap;

use crate::source::LinkPolicy;

pub use candidate::{Candidate, CandidateFiles, LoaderName, NumberedSetError};
pub use default_choice::{DefaultChoice, choose_default};
pub use discover::{
    CHECKPOINT_EXTENSIONS, candidates_by_name, find_candidates, is_training_file, lone_shard_note,
    training_pattern,
};
pub use dtype::Dtype;
pub use error::{CheckpointError, RefusedEntry, TensorError};
pub use index::{IndexError, ShardIndex, parse_index};
pub use name::TensorName;
pub(crate) use name_index::NameIndex;
pub use open::{open, open_by_name, open_candidate};
pub use open_sources::OpenSources;
pub use overlaps::{MAX_OVERLAP_COUNT, find_overlaps};
pub use safetensors::{HeaderError, MAX_HEADER_BYTES};
pub use slice::{AxisSlice, SliceError};
pub use sniff::parse_bytes;
pub use tensor::{Axis, ByteRun, Grid, LayoutKind, Origin, OriginId, Shape, Tensor, TensorBytes};
pub use torch::{LegacyError, PickleError, SelectError, ZipError};

/// How a checkpoint is to be read; all of it enters the virtual file's identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ParseOptions {
    /// The dictionary to show, as a dotted path from the top of a torch checkpoint.
    pub root_key: Option<String>,
    /// Leave out what cannot be shown, and say so, instead of refusing the checkpoint.
    pub allow_partial: bool,
    /// Let links and index entries lead out of the directory.
    pub follow_symlinks: bool,
}

impl ParseOptions {
    /// Where links may lead.
    pub fn link_policy(&self) -> LinkPolicy {
        if self.follow_symlinks { LinkPolicy::Anywhere } else { LinkPolicy::Inside }
    }

    /// The same options for a checkpoint that need not have the dictionary: the default one is shown.
    pub fn without_root_key(&self) -> ParseOptions {
        let ParseOptions { root_key: _, allow_partial, follow_symlinks } = *self;
        ParseOptions { root_key: None, allow_partial, follow_symlinks }
    }
}

/// The format of a file, told by its content and not by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Format {
    /// A safetensors file.
    #[serde(rename = "safetensors")]
    Safetensors,
    /// `torch.save` since 1.6: a zip archive.
    #[serde(rename = "torch zip")]
    TorchZip,
    /// `torch.save` before 1.6: pickles and raw storages in a row.
    #[serde(rename = "torch legacy")]
    TorchLegacy,
}

impl Format {
    /// The name that people and the JSON see.
    pub fn name(self) -> &'static str {
        match self {
            Format::Safetensors => "safetensors",
            Format::TorchZip => "torch zip",
            Format::TorchLegacy => "torch legacy",
        }
    }
}

/// A checkpoint, read but for its tensors' bytes.
#[derive(Debug)]
pub struct Checkpoint {
    /// The path to show to people: the file, the index, or a numbered set's name.
    pub path: std::path::PathBuf,
    /// The format of its files; of the first, should they differ.
    pub format: Format,
    /// Whether it is a set of shards.
    pub is_sharded: bool,
    /// What holds the bytes. Each file is followed by what had to be unpacked of it.
    pub origins: Vec<Origin>,
    /// The one file that it is, still open, for who reads on at once. Laying it out closes it.
    pub open_file: Option<crate::source::OpenFile>,
    /// The index of a set of shards, which is a source too: another index is another checkpoint.
    pub index_file: Option<std::sync::Arc<crate::source::SourceFile>>,
    /// The tensors, in the order of the source.
    pub tensors: Vec<Tensor>,
    /// The metadata of the source, which may be empty; `None` if the source has none.
    pub metadata: Option<BTreeMap<String, String>>,
    /// What was chosen and what was left out, in words.
    pub notes: Vec<String>,
    /// What cannot be shown. Not empty means refused, unless the options allow a part.
    pub refused: Vec<RefusedEntry>,
    /// The options that it was read with.
    pub options: ParseOptions,
}

/// Tensors in one checkpoint at the most: ten times the largest ever seen, and a header of more
/// would pass the 100,000,000 bytes that every reader takes.
pub const MAX_TENSOR_COUNT: usize = 2_000_000;

impl Checkpoint {
    /// The source files, its index included.
    pub fn source_files(&self) -> impl Iterator<Item = &std::sync::Arc<crate::source::SourceFile>> {
        let origins = self.origins.iter().filter_map(|origin| match origin {
            Origin::File(file) => Some(file),
            Origin::Memory(_) => None,
        });
        origins.chain(&self.index_file)
    }
}
