//! Why a checkpoint is refused: the file, the tensor, what is wrong, and what to do.

use std::path::{Path, PathBuf};

use crate::source::SourceError;

use super::refusal::RefusedEntry;
use super::safetensors::HeaderError;
use super::shard_index::IndexError;
use super::torch::{LegacyError, PickleError, SelectError, ZipError};
use super::truncated_list::TruncatedList;

/// A checkpoint that cannot be shown.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The bytes cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A safetensors file breaks its format.
    #[error("{path}: not a valid safetensors file: {error}")]
    Header { path: PathBuf, error: HeaderError },
    /// A torch archive is damaged, or could be read in two ways.
    #[error("{path}: not a safe torch archive: {error}")]
    Zip { path: PathBuf, error: ZipError },
    /// A pickle breaks its format or its limits.
    #[error("{path}: the pickle in it is not readable: {error}")]
    Pickle { path: PathBuf, error: PickleError },
    /// A file of torch's older form is damaged.
    #[error("{path}: not a valid torch file of the older form: {error}")]
    Legacy { path: PathBuf, error: LegacyError },
    /// One rank's file of a sharded save: it has pieces of tensors under the names of whole ones.
    #[error(
        "{path}: one rank's part of a sharded checkpoint: its pieces of tensors have the names of whole ones"
    )]
    RankShard { path: PathBuf },
    /// There is no dictionary of tensors to show.
    #[error("{path}: {error}")]
    Selection { path: PathBuf, error: SelectError },
    /// An index does not fit its shards.
    #[error("{path}: the index does not fit its shards: {error}")]
    Index { path: PathBuf, error: IndexError },
    /// Two shards have the same tensor.
    #[error("{path}: tensor `{tensor}` is also in {other}")]
    DuplicateTensor {
        /// The later shard.
        path: PathBuf,
        tensor: String,
        /// The earlier shard.
        other: PathBuf,
    },
    /// Some shards of a numbered set are missing.
    #[error("{path}: incomplete: {missing} of {total} shards are missing, {first} among them")]
    IncompleteSet {
        path: PathBuf,
        /// The number of missing shards.
        missing: u64,
        /// The number of shards of the complete set.
        total: u64,
        /// The first that is missing.
        first: String,
    },
    /// A numbered set is complete both when counted from 0 and when counted from 1.
    #[error("{path}: either `{first}` or `{last}` does not belong to this set of {total} shards")]
    AmbiguousNumbering {
        path: PathBuf,
        /// The number of shards of the complete set.
        total: u64,
        /// The shard numbered 0.
        first: String,
        /// The one with the highest number.
        last: String,
    },
    /// More tensors than any checkpoint has.
    #[error("{path}: more than {limit} tensors")]
    TooManyTensors { path: PathBuf, limit: usize },
    /// The file is of another format.
    #[error("{path}: {what}")]
    NotACheckpoint {
        path: PathBuf,
        /// What it is, judged by its first bytes.
        what: &'static str,
    },
    /// A directory without a checkpoint.
    #[error("{path}: no checkpoint in this directory")]
    NoCheckpoint { path: PathBuf },
    /// A directory with several checkpoints, of which none is the obvious one.
    #[error("{path}: several checkpoints in this directory: {}", TruncatedList::from_names(.names))]
    SeveralCheckpoints {
        path: PathBuf,
        /// Their names, each of which the user can append to the directory.
        names: Vec<String>,
    },
    /// The selected dictionary has entries that cannot be shown.
    #[error("{path}: {} cannot be shown; the first is {}", count_entries(.refused.len()), .refused.first().map(RefusedEntry::to_string).unwrap_or_default())]
    RefusedEntries {
        /// The file, or the directory of a set.
        path: PathBuf,
        refused: Vec<RefusedEntry>,
    },
}

fn count_entries(n: usize) -> String {
    match n {
        1 => "1 entry".to_owned(),
        n => format!("{n} entries"),
    }
}

impl CheckpointError {
    /// The file or directory at fault.
    pub fn path(&self) -> &Path {
        match self {
            CheckpointError::Source(error) => error.path(),
            CheckpointError::Header { path, .. }
            | CheckpointError::Zip { path, .. }
            | CheckpointError::Pickle { path, .. }
            | CheckpointError::Legacy { path, .. }
            | CheckpointError::RankShard { path }
            | CheckpointError::Selection { path, .. }
            | CheckpointError::Index { path, .. }
            | CheckpointError::DuplicateTensor { path, .. }
            | CheckpointError::IncompleteSet { path, .. }
            | CheckpointError::AmbiguousNumbering { path, .. }
            | CheckpointError::TooManyTensors { path, .. }
            | CheckpointError::NotACheckpoint { path, .. }
            | CheckpointError::NoCheckpoint { path }
            | CheckpointError::SeveralCheckpoints { path, .. }
            | CheckpointError::RefusedEntries { path, .. } => path,
        }
    }

    /// What the user can do.
    pub fn remedy(&self) -> &'static str {
        match self {
            CheckpointError::Source(error) => error.remedy(),
            CheckpointError::Header { .. } => {
                "fetch or save the file again; it is damaged or was written by a faulty program"
            }
            CheckpointError::Zip { error, .. } => error.remedy(),
            CheckpointError::Pickle { .. } => {
                "fetch the file again; if it comes from someone you do not know, do not open it with torch.load"
            }
            CheckpointError::Legacy { .. } => {
                "fetch the file again, or save it again with a current torch"
            }
            CheckpointError::RankShard { .. } => {
                "join the ranks first, with torch.distributed.checkpoint's consolidate_safetensors_files, or save with enable_consolidation=True"
            }
            CheckpointError::Selection { error, .. } => error.remedy(),
            CheckpointError::Index { error, .. } => error.remedy(),
            CheckpointError::DuplicateTensor { .. } => {
                "move away the shards that belong to another checkpoint, or give the index"
            }
            CheckpointError::IncompleteSet { .. } => "fetch the missing shards",
            CheckpointError::AmbiguousNumbering { .. } => {
                "move the one that does not belong out of the directory, or fetch the index of the set"
            }
            CheckpointError::TooManyTensors { .. } => "split the checkpoint",
            CheckpointError::NotACheckpoint { .. } => {
                "give a .safetensors file, a torch checkpoint, or a directory that holds one"
            }
            CheckpointError::NoCheckpoint { .. } => {
                "give a directory with .safetensors, .bin, .pt, .pth or .ckpt files"
            }
            CheckpointError::SeveralCheckpoints { .. } => "name one of them",
            CheckpointError::RefusedEntries { .. } => "leave them out with --allow-partial",
        }
    }

    /// Whether the checkpoint itself is at fault, rather than the machine or the command line.
    pub fn is_refusal(&self) -> bool {
        match self {
            CheckpointError::Source(error) => error.is_refusal(),
            CheckpointError::NoCheckpoint { .. } | CheckpointError::SeveralCheckpoints { .. } => {
                false
            }
            _ => true,
        }
    }
}
