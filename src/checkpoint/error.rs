//! Why a checkpoint is refused, in words: the file, the tensor, what is wrong, what to do.

use std::path::{Path, PathBuf};

use crate::source;

use super::index::IndexError;
use super::safetensors::HeaderError;
use super::torch::{LegacyError, PickleError, SelectError, ZipError};
use super::truncated_list::TruncatedList;

/// A checkpoint that cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The bytes cannot be had.
    #[error(transparent)]
    Source(#[from] source::SourceError),
    /// A safetensors file breaks its format.
    #[error("{path}: not a valid safetensors file: {fault}")]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: HeaderError,
    },
    /// A torch archive is damaged, or could be read in two ways.
    #[error("{path}: not a safe torch archive: {fault}")]
    Zip {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: ZipError,
    },
    /// A pickle breaks its format or its limits.
    #[error("{path}: the pickle in it is not readable: {fault}")]
    Pickle {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: PickleError,
    },
    /// A file of torch's older form is damaged.
    #[error("{path}: not a valid torch file of the older form: {fault}")]
    Legacy {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: LegacyError,
    },
    /// One rank's file of a sharded save: it has pieces of tensors under the names of whole ones.
    #[error(
        "{path}: one rank's part of a sharded checkpoint: its tensors are pieces under full names"
    )]
    RankShard {
        /// The file.
        path: PathBuf,
    },
    /// There is no dictionary of tensors to show.
    #[error("{path}: {fault}")]
    Selection {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: SelectError,
    },
    /// An index does not fit its shards.
    #[error("{path}: the index does not fit its shards: {fault}")]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        fault: IndexError,
    },
    /// The same tensor in two shards.
    #[error("{path}: tensor `{tensor}` is also in {other}")]
    DuplicateTensor {
        /// The later shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The earlier shard.
        other: PathBuf,
    },
    /// Some shards of a numbered set are not there.
    #[error("{path}: incomplete: {missing} of {of} shards are missing, {first} among them")]
    IncompleteSet {
        /// The directory.
        path: PathBuf,
        /// How many are missing.
        missing: u64,
        /// How many there should be.
        of: u64,
        /// The first that is missing.
        first: String,
    },
    /// A numbered set is complete both when counted from 0 and when counted from 1.
    #[error("{path}: either `{first}` or `{last}` does not belong to this set of {of} shards")]
    AmbiguousNumbering {
        /// The directory.
        path: PathBuf,
        /// How many shards there should be.
        of: u64,
        /// The shard numbered 0.
        first: String,
        /// The one with the highest number.
        last: String,
    },
    /// More tensors than any checkpoint has.
    #[error("{path}: more than {limit} tensors")]
    TooManyTensors {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: usize,
    },
    /// Something else altogether.
    #[error("{path}: {what}")]
    NotACheckpoint {
        /// The file.
        path: PathBuf,
        /// What it is, as far as its first bytes tell.
        what: &'static str,
    },
    /// A directory without any.
    #[error("{path}: no checkpoint in this directory")]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
    },
    /// A directory with several, and none was named.
    #[error("{path}: several checkpoints in this directory: {}", TruncatedList::from_names(.names))]
    SeveralCheckpoints {
        /// The directory.
        path: PathBuf,
        /// Their names; any of them can be given after the directory.
        names: Vec<String>,
    },
    /// A chosen dictionary has entries that cannot be shown.
    #[error("{path}: {} cannot be shown; the first is {}", count_entries(.refused.len()), .refused.first().map(RefusedEntry::to_string).unwrap_or_default())]
    RefusedEntries {
        /// The file, or the directory of a set.
        path: PathBuf,
        /// The entries.
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

    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            CheckpointError::Source(error) => error.remedy(),
            CheckpointError::Header { .. } => {
                "fetch or save the file again; it is damaged or was written by a faulty program"
            }
            CheckpointError::Zip { fault, .. } => fault.remedy(),
            CheckpointError::Pickle { .. } => {
                "fetch the file again; if it comes from someone you do not know, do not open it with torch.load"
            }
            CheckpointError::Legacy { .. } => {
                "fetch the file again, or save it again with a current torch"
            }
            CheckpointError::RankShard { .. } => {
                "join the ranks first, with torch.distributed.checkpoint's consolidate_safetensors_files, or save with enable_consolidation=True"
            }
            CheckpointError::Selection { fault, .. } => fault.remedy(),
            CheckpointError::Index { fault, .. } => fault.remedy(),
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

/// An entry of the chosen dictionary that cannot be shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{name}`: {fault}")]
pub struct RefusedEntry {
    /// Its name, as a tensor of that name would be called.
    pub name: String,
    /// Why.
    pub fault: TensorError,
}

/// Why one entry cannot be shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// Not a tensor, and not a plain value either.
    #[error("is a Python object of class {class}, which is not executed")]
    Object {
        /// Its class.
        class: String,
    },
    /// A kind of tensor that safetensors has no counterpart for.
    #[error("is {kind}, which safetensors cannot hold")]
    UnsupportedKind {
        /// What it is, with its article.
        kind: String,
    },
    /// An element type that safetensors has no counterpart for.
    #[error("has elements of type {dtype}, which safetensors cannot hold")]
    UnsupportedDtype {
        /// torch's name for it.
        dtype: String,
    },
    /// The bytes are not the values.
    #[error("is a {view} view: its bytes are not its values")]
    LazyView {
        /// `conjugate` or `negative`.
        view: &'static str,
    },
    /// It reaches past the storage.
    #[error("reaches past the end of its storage `{storage}` ({needs} bytes needed, {has} there)")]
    OutOfBounds {
        /// The storage.
        storage: String,
        /// Bytes that would be needed.
        needs: u128,
        /// Bytes that there are.
        has: u64,
    },
    /// The storage's stated size is not that of its record.
    #[error("its storage `{storage}` states {stated} bytes and has {has}")]
    StorageSize {
        /// The storage.
        storage: String,
        /// Bytes by the pickle.
        stated: u128,
        /// Bytes in the file.
        has: u64,
    },
    /// The storage is not in the file.
    #[error("its storage `{storage}` is not in the file")]
    MissingStorage {
        /// The storage.
        storage: String,
    },
    /// The storage is packed in a way that is not read, or too large to unpack.
    #[error("its storage `{storage}` is compressed {why}")]
    Compressed {
        /// The storage.
        storage: String,
        /// Why that does not do.
        why: &'static str,
    },
    /// A shape whose size does not fit.
    #[error("has a shape whose size overflows")]
    Overflow,
    /// Repeating bytes beyond reason.
    #[error("repeats its bytes: with those before it, to {bytes} bytes, past the limit of {limit}")]
    Expansion {
        /// Bytes it would take.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Arguments that no torch writes.
    #[error("is not rebuilt as torch does it: {what}")]
    Malformed {
        /// What is off.
        what: &'static str,
    },
    /// Something happens to it after it was built.
    #[error("is changed by the pickle after it was built")]
    Modified,
    /// A key that no tensor can be named by.
    #[error("has a key that is not text, or longer than any name")]
    InvalidKey,
    /// A name that the format keeps for itself.
    #[error("has the name that safetensors keeps for metadata")]
    ReservedName,
}

impl TensorError {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            TensorError::OutOfBounds { .. }
            | TensorError::StorageSize { .. }
            | TensorError::MissingStorage { .. }
            | TensorError::Overflow
            | TensorError::Malformed { .. }
            | TensorError::Modified => "fetch the file again: it is damaged or was tampered with",
            TensorError::Compressed { .. } => {
                "save it again with torch.save, which does not compress"
            }
            TensorError::Expansion { .. } => {
                "save it with .contiguous(), or leave it out with --allow-partial"
            }
            _ => "leave it out with --allow-partial, or choose another dictionary with --root KEY",
        }
    }
}
