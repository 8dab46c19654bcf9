//! Why a checkpoint is refused: the file, the tensor, what is wrong, and what to do.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::shell_word::shell_word;
use crate::source::SourceError;

use super::conversions::folder_of;
use super::delta_error::DeltaError;

use super::refusal::RefusedEntry;
use super::safetensors::HeaderError;
use super::shard_index::IndexError;
use super::torch::{LegacyError, PickleError, SelectError, ZipError};
use super::training_error::TrainingError;
use super::truncated_list::TruncatedList;
use super::unread_format::UnreadFormat;

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
    RankShard {
        path: PathBuf,
        /// A file beside it that its folder stands for.
        chosen: Option<&'static str>,
    },
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
    #[error("{path}: incomplete: {missing} of {total} shards {}", name_missing(*.missing, .first))]
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
    /// The file is of a format that is not read.
    #[error("{path}: {format}")]
    UnreadFormat { path: PathBuf, format: UnreadFormat },
    /// A directory without a checkpoint.
    #[error("{path}: no checkpoint in this directory{}", describe_subdirectories(.subdirectories))]
    NoCheckpoint {
        path: PathBuf,
        /// Its subdirectories with checkpoints, the latest step last.
        subdirectories: Vec<String>,
    },
    /// A directory with several checkpoints, of which none is the obvious one.
    #[error("{path}: several checkpoints in this directory: {}", TruncatedList::from_names(.names))]
    SeveralCheckpoints {
        path: PathBuf,
        /// Their names, each of which the user can append to the directory.
        names: Vec<String>,
        /// The one that the remedy names: the first that can be read.
        suggested: String,
    },
    /// A version that is a delta cannot be shown.
    #[error("{path}: {error}")]
    Delta { path: PathBuf, error: Box<DeltaError> },
    /// A training folder cannot be joined.
    #[error("{path}: {error}")]
    Training { path: PathBuf, error: Box<TrainingError> },
    /// The selected dictionary has entries that cannot be shown.
    #[error("{path}: {} cannot be shown{}; the first is {}", count_entries(.refused.len()), if *.tensor_count == 0 { ", and nothing else is there" } else { "" }, .refused.first().map(RefusedEntry::to_string).unwrap_or_default())]
    RefusedEntries {
        /// The file, or the directory of a set.
        path: PathBuf,
        refused: Vec<RefusedEntry>,
        /// The number of tensors that can be shown.
        tensor_count: usize,
    },
}

/// The verb and the names of missing shards: `is missing: X`, `are missing: X and 2 more`.
fn name_missing(missing: u64, first: &str) -> String {
    match missing {
        1 => format!("is missing: {first}"),
        n => format!("are missing: {first} and {} more", n - 1),
    }
}

fn count_entries(n: usize) -> String {
    match n {
        1 => "1 entry".to_owned(),
        n => format!("{n} entries"),
    }
}

fn describe_subdirectories(nested: &[String]) -> String {
    match nested {
        [] => String::new(),
        names => format!(" itself; beneath it: {}", TruncatedList::from_names(names)),
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
            | CheckpointError::RankShard { path, .. }
            | CheckpointError::Selection { path, .. }
            | CheckpointError::Index { path, .. }
            | CheckpointError::DuplicateTensor { path, .. }
            | CheckpointError::IncompleteSet { path, .. }
            | CheckpointError::AmbiguousNumbering { path, .. }
            | CheckpointError::TooManyTensors { path, .. }
            | CheckpointError::UnreadFormat { path, .. }
            | CheckpointError::Training { path, .. }
            | CheckpointError::Delta { path, .. }
            | CheckpointError::NoCheckpoint { path, .. }
            | CheckpointError::SeveralCheckpoints { path, .. }
            | CheckpointError::RefusedEntries { path, .. } => path,
        }
    }

    /// What the user can do, with the command to type next where there is one.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            CheckpointError::Source(error) => error.remedy(),
            CheckpointError::Header { path, error } => error.remedy(path),
            CheckpointError::Zip { error, .. } => error.remedy().into(),
            CheckpointError::Pickle { error, .. } => error.remedy().into(),
            CheckpointError::Legacy { error: LegacyError::Pickle { error, .. }, .. } => {
                error.remedy().into()
            }
            CheckpointError::Legacy { .. } => {
                "fetch the file again, or save it again with a current torch".into()
            }
            CheckpointError::RankShard { path, chosen } => {
                let folder = folder_of(path);
                let give = "the folder with the files of all ranks";
                match chosen {
                    None => format!("give {give}: {}", shell_word(folder)),
                    Some(name) => format!(
                        "give the whole model: {file}; or move that file away, and give {give}: {}",
                        shell_word(folder),
                        file = shell_word(&folder.join(name)),
                    ),
                }
                .into()
            }
            CheckpointError::Selection { path, error } => error.remedy(path).into(),
            CheckpointError::Index { path, error } => error.remedy(path).into(),
            CheckpointError::DuplicateTensor { path, other, .. } => format!(
                "move the one that belongs to another checkpoint out of the directory: {} or {}",
                shell_word(path),
                shell_word(other)
            )
            .into(),
            CheckpointError::IncompleteSet { path, first, missing, .. } => {
                let more = if *missing > 1 { ", and the others" } else { "" };
                format!("fetch {}{more}", shell_word(&path.join(first))).into()
            }
            CheckpointError::AmbiguousNumbering { path, first, last, .. } => format!(
                "move the one that does not belong out of the directory: {} or {}",
                shell_word(&path.join(first)),
                shell_word(&path.join(last))
            )
            .into(),
            CheckpointError::TooManyTensors { .. } => "split the checkpoint".into(),
            CheckpointError::UnreadFormat { path, format } => format.remedy(path).into(),
            CheckpointError::Training { path, error } => error.remedy(path),
            CheckpointError::Delta { path, error } => error.remedy(path),
            CheckpointError::NoCheckpoint { path, subdirectories } => {
                match subdirectories.last() {
                    Some(name) => {
                        format!("give one by its path, such as {}", shell_word(&path.join(name)))
                    }
                    None => format!(
                        "give a directory with .safetensors, .bin, .pt, .pth or .ckpt files; see what this one has: ls -A {}",
                        shell_word(path)
                    ),
                }
                .into()
            }
            CheckpointError::SeveralCheckpoints { path, suggested, .. } => {
                format!("name one of them, such as {}", shell_word(&path.join(suggested))).into()
            }
            CheckpointError::RefusedEntries { refused, tensor_count, .. } => {
                let remaining = *tensor_count > 0;
                let first = refused.first().map(|entry| entry.error.remedy(remaining));
                match first {
                    Some(remedy) => remedy,
                    None => "leave them out with --allow-partial".into(),
                }
            }
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
