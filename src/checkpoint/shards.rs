//! Reads a set of shards, and joins them into one checkpoint.
//!
//! In: the names of the shards, and their index, if there is one. Out: the checkpoint, in which every name is
//! unique and in the shard that the index says.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::huge_pages;
use crate::source::{OpenFile, Root};
use crate::threads::parallel_map;

use super::contents::{Checkpoint, MAX_TENSOR_COUNT};
use super::error::CheckpointError;
use super::options::ParseOptions;
use super::shard_index::{IndexError, ShardIndex};
use super::single_file::read_file;
use super::truncated_list::TruncatedList;

/// Threads that compare names.
const MAX_NAME_THREADS: usize = 8;

/// Bytes that are read ahead of a shard at once: most headers are not longer.
const HEADER_READAHEAD_BYTES: u64 = 256 << 10;

/// Shards that were read, appended to one checkpoint.
pub struct JoinedShards {
    checkpoint: Option<Checkpoint>,
    ranges: Vec<ShardRange>,
}

/// The part of the joined checkpoint that comes from one shard.
struct ShardRange {
    path: PathBuf,
    tensors: Range<usize>,
    refused: Range<usize>,
}

impl ShardRange {
    /// The names of its tensors, and of its refused entries.
    fn names<'a>(
        &self,
        whole: &'a Checkpoint,
    ) -> (impl Iterator<Item = &'a str>, impl Iterator<Item = &'a str>) {
        let tensors = whole.tensors[self.tensors.clone()].iter().map(|tensor| &*tensor.name);
        let refused = whole.refused[self.refused.clone()].iter();
        (tensors, refused.map(|entry| entry.name.as_str()))
    }
}

/// Reads the shards in parallel, and appends them in order. An error comes with the name of its shard.
pub fn read_shards(
    root: &Arc<Root>,
    directory: &Path,
    path: &Path,
    shards: &[String],
    options: &ParseOptions,
) -> Result<JoinedShards, (String, CheckpointError)> {
    // After an error, no shard with a higher number is read.
    let (tensors, first_failed) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let read = |shard: &String| {
        let file = OpenFile::open_in_root(root, &directory.join(shard))?;
        file.advise_will_need(0..HEADER_READAHEAD_BYTES);
        let mut part = read_file(&file, options)?;
        if shards.len() > 1 {
            // Dropped before the join, so that the headers of all shards are never in memory at once.
            part.header = None;
        }
        let all = tensors.fetch_add(part.tensors.len(), Relaxed) + part.tensors.len();
        let too_many = || CheckpointError::TooManyTensors {
            path: path.to_path_buf(),
            limit: MAX_TENSOR_COUNT,
        };
        if all > MAX_TENSOR_COUNT { Err(too_many()) } else { Ok(part) }
    };
    let numbered: Vec<(usize, &String)> = shards.iter().enumerate().collect();
    let parts = parallel_map(&numbered, root.reader_threads(), |&(number, shard)| {
        let is_needed = number < first_failed.load(Relaxed);
        let part = is_needed.then(|| read(shard).map_err(|error| (shard.clone(), error)))?;
        if part.is_err() {
            first_failed.fetch_min(number, Relaxed);
        }
        Some(part)
    });
    let parts = parts.into_iter().flatten().collect::<Result<Vec<_>, _>>()?;
    let mut joined = JoinedShards { checkpoint: None, ranges: Vec::with_capacity(parts.len()) };
    let total = parts.iter().map(|part| part.tensors.len()).sum();
    parts.into_iter().for_each(|part| joined.append(part, total));
    Ok(joined)
}

/// Names in a shard that the index puts into another shard, or nowhere: tensors, and refused entries.
type MisplacedNames<'a> = (Vec<&'a str>, Vec<&'a str>);

impl JoinedShards {
    /// Appends a shard. All shards together have `total` tensors.
    fn append(&mut self, mut part: Checkpoint, total: usize) {
        let Some(whole) = &mut self.checkpoint else {
            let more = total - part.tensors.len();
            huge_pages::reserve(&mut part.tensors, more);
            let (tensors, refused) = (0..part.tensors.len(), 0..part.refused.len());
            self.ranges.push(ShardRange { path: part.path.clone(), tensors, refused });
            self.checkpoint = Some(part);
            return;
        };
        let (tensors, refused) = (whole.tensors.len(), whole.refused.len());
        let path = part.path.clone();
        whole.append(part);
        let (tensors, refused) = (tensors..whole.tensors.len(), refused..whole.refused.len());
        self.ranges.push(ShardRange { path, tensors, refused });
    }

    /// The joined checkpoint. Fails unless every name is unique and every tensor of the index is in its shard.
    pub fn into_checkpoint(
        self,
        path: PathBuf,
        index: Option<&ShardIndex<'_>>,
    ) -> Result<Checkpoint, CheckpointError> {
        let JoinedShards { checkpoint: Some(mut whole), ranges } = self else {
            return Err(CheckpointError::Index { path, error: IndexError::NoShards });
        };
        let unnamed = check_names(&whole, &ranges, &path, index)?;
        whole.is_sharded = true;
        whole.path = path;
        if !unnamed.is_empty() {
            let (n, names) = (unnamed.len(), TruncatedList::from_names(&unnamed));
            let note = format!("tensors in the shards but not in the index, kept ({n}): {names}");
            whole.notes.push(note);
        }
        Ok(whole)
    }
}

/// Checks the names against the index, and that each is unique. Returns the tensors that the index does not name.
fn check_names(
    whole: &Checkpoint,
    ranges: &[ShardRange],
    path: &Path,
    index: Option<&ShardIndex<'_>>,
) -> Result<Vec<String>, CheckpointError> {
    let indexed_shard = |name: &str| index.and_then(|index| index.shard_of(name));
    let shards: Vec<usize> = (0..ranges.len()).collect();
    let misplaced = parallel_map(&shards, MAX_NAME_THREADS, |&shard| {
        let is_misplaced = |name: &&str| indexed_shard(name) != Some(shard);
        let (tensors, refused) = ranges[shard].names(whole);
        let names: MisplacedNames<'_> =
            (tensors.filter(is_misplaced).collect(), refused.filter(is_misplaced).collect());
        names
    });
    if let Some(index) = index {
        check_all_present(index, whole, ranges, &misplaced)
            .map_err(|error| CheckpointError::Index { path: path.to_path_buf(), error })?;
    }
    let unnamed = misplaced.iter().filter(|_| index.is_some()).flat_map(|(tensors, _)| tensors);
    let unnamed = unnamed.map(|&name| name.to_owned()).collect();
    let misplaced = (0..).zip(misplaced).flat_map(|(shard, (tensors, refused))| {
        tensors.into_iter().chain(refused).map(move |name| (name, shard))
    });
    let mut first_shards = HashMap::<_, _, foldhash::fast::RandomState>::default();
    for (name, shard) in misplaced {
        let other =
            indexed_shard(name).unwrap_or_else(|| *first_shards.entry(name).or_insert(shard));
        if other != shard {
            return Err(CheckpointError::DuplicateTensor {
                path: ranges[shard.max(other)].path.clone(),
                tensor: name.to_owned(),
                other: ranges[shard.min(other)].path.clone(),
            });
        }
    }
    Ok(unnamed)
}

/// Checks that every tensor of the index is in the shard that the index says.
fn check_all_present(
    index: &ShardIndex<'_>,
    whole: &Checkpoint,
    ranges: &[ShardRange],
    misplaced: &[MisplacedNames<'_>],
) -> Result<(), IndexError> {
    for (shard, (range, (tensors, refused))) in ranges.iter().zip(misplaced).enumerate() {
        let named = range.tensors.len() - tensors.len() + range.refused.len() - refused.len();
        if named < index.tensor_count_in(shard) {
            let (tensors, refused) = range.names(whole);
            let present: HashSet<&str> = tensors.chain(refused).collect();
            let missing = index.tensors_in(shard).filter(|name| !present.contains(name)).min();
            return Err(IndexError::MissingTensor {
                tensor: missing.unwrap_or_default().to_owned(),
                shard: index.shards()[shard].clone(),
            });
        }
    }
    Ok(())
}
