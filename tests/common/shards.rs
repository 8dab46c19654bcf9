//! Directories with sets of shards.

use std::fs;
use std::path::Path;

use ckptfs::checkpoint::{self, Checkpoint, CheckpointError, IndexError, ParseOptions};
use tempfile::TempDir;

use super::safetensors::valid;

pub const INDEX: &str = "model.safetensors.index.json";

pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    checkpoint::open(path, &ParseOptions::default())
}

pub fn open_following(path: &Path) -> Result<Checkpoint, CheckpointError> {
    checkpoint::open(path, &ParseOptions { follow_symlinks: true, ..ParseOptions::default() })
}

pub fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    let mut names: Vec<&str> = checkpoint.tensors.iter().map(|t| &*t.name).collect();
    names.sort_unstable();
    names
}

pub fn index(weight_map: &[(&str, &str)]) -> String {
    let entries: Vec<String> =
        weight_map.iter().map(|(tensor, shard)| format!("{tensor:?}:{shard:?}")).collect();
    format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{{{}}}}}"#, entries.join(","))
}

/// A directory with shards, each with its tensors, and an index.
pub fn set(shards: &[(&str, &[&str])], weight_map: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (shard, tensors) in shards {
        fs::write(directory.path().join(shard), valid(tensors)).expect("written");
    }
    fs::write(directory.path().join(INDEX), index(weight_map)).expect("written");
    directory
}

pub const A: &str = "model-00001-of-00002.safetensors";
pub const B: &str = "model-00002-of-00002.safetensors";

/// The error of an index.
pub fn error(answer: Result<Checkpoint, CheckpointError>) -> IndexError {
    match answer.expect_err("refused") {
        CheckpointError::Index { error, .. } => error,
        other => panic!("refused for another reason: {other}"),
    }
}
