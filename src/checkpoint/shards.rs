//! Reads a set of shards as one checkpoint.
//!
//! In: the shards' names, and the index that names them, where there is one. Out: the checkpoint, in which
//! every name stands once, and in the shard where the index says that it does.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::huge_pages;
use crate::source::{OpenFile, Root};
use crate::threads::parallel_map;

use super::index::ShardIndex;
use super::truncated_list::TruncatedList;
use super::{Checkpoint, CheckpointError, IndexError, MAX_TENSOR_COUNT, ParseOptions, sniff};

/// Threads that read shards: most of it is waiting for a cold disk, the rest is for every core.
const MAX_READER_THREADS: usize = 8;

/// Bytes that are asked for at once of a shard whose header is to be read: the headers of most are no longer.
const HEADER_READAHEAD_BYTES: u64 = 256 << 10;

/// Shards that were read, one after the other in one checkpoint.
pub struct JoinedShards {
    checkpoint: Option<Checkpoint>,
    ranges: Vec<ShardRange>,
}

/// What of the whole is a shard's.
struct ShardRange {
    path: PathBuf,
    tensors: Range<usize>,
    refused: Range<usize>,
}

/// Reads each by itself, in order; an error is that of the shard that is named.
pub fn read_shards(
    root: &Arc<Root>,
    directory: &Path,
    path: &Path,
    shards: &[String],
    options: &ParseOptions,
) -> Result<JoinedShards, (String, CheckpointError)> {
    // Once one is refused none behind it is read.
    let (tensors, refused) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let read = |shard: &String| {
        let file = OpenFile::open_in_root(root, &directory.join(shard))?;
        file.advise_will_need(0..HEADER_READAHEAD_BYTES);
        let part = sniff::read_file(&file, options)?;
        let all = tensors.fetch_add(part.tensors.len(), Relaxed) + part.tensors.len();
        let too_many = || CheckpointError::TooManyTensors {
            path: path.to_path_buf(),
            limit: MAX_TENSOR_COUNT,
        };
        if all > MAX_TENSOR_COUNT { Err(too_many()) } else { Ok(part) }
    };
    let numbered: Vec<(usize, &String)> = shards.iter().enumerate().collect();
    let parts = parallel_map(&numbered, MAX_READER_THREADS, |&(number, shard)| {
        let wanted = number < refused.load(Relaxed);
        let part = wanted.then(|| read(shard).map_err(|error| (shard.clone(), error)))?;
        if part.is_err() {
            refused.fetch_min(number, Relaxed);
        }
        Some(part)
    });
    let parts = parts.into_iter().flatten().collect::<Result<Vec<_>, _>>()?;
    let mut joined = JoinedShards { checkpoint: None, ranges: Vec::with_capacity(parts.len()) };
    let all = parts.iter().map(|part| part.tensors.len()).sum();
    parts.into_iter().for_each(|part| joined.append(part, all));
    Ok(joined)
}

/// The names of a shard that stand in another, or nowhere, by the index: tensors, and what is refused.
type MisplacedNames<'a> = (Vec<&'a str>, Vec<&'a str>);

impl JoinedShards {
    /// Adds a shard to those before it, of which there will be so many tensors.
    fn append(&mut self, mut part: Checkpoint, all: usize) {
        let Some(whole) = &mut self.checkpoint else {
            let more = all - part.tensors.len();
            huge_pages::reserve(&mut part.tensors, more);
            let (tensors, refused) = (0..part.tensors.len(), 0..part.refused.len());
            self.ranges.push(ShardRange { path: part.path.clone(), tensors, refused });
            self.checkpoint = Some(part);
            return;
        };
        let by = whole.origins.len() as u32;
        let (tensors, refused) = (whole.tensors.len(), whole.refused.len());
        whole.origins.extend(part.origins);
        whole.tensors.extend(part.tensors.into_iter().map(|mut tensor| {
            tensor.bytes.shift_origin(by);
            tensor
        }));
        whole.refused.extend(part.refused);
        for note in part.notes {
            if !whole.notes.contains(&note) {
                whole.notes.push(note);
            }
        }
        if let Some(metadata) = part.metadata {
            merge_metadata(whole.metadata.get_or_insert_default(), metadata, &mut whole.notes);
        }
        let (tensors, refused) = (tensors..whole.tensors.len(), refused..whole.refused.len());
        self.ranges.push(ShardRange { path: part.path, tensors, refused });
    }

    /// All of them as one checkpoint, once every name stands in one shard, and all are there of which an
    /// index says so.
    pub fn into_checkpoint(
        self,
        path: PathBuf,
        index: Option<&ShardIndex<'_>>,
    ) -> Result<Checkpoint, CheckpointError> {
        let JoinedShards { checkpoint: Some(mut whole), ranges: parts } = self else {
            return Err(CheckpointError::Index { path, fault: IndexError::NoShards });
        };
        let unnamed = check_names(&whole, &parts, &path, index)?;
        whole.is_sharded = true;
        whole.path = path;
        if !unnamed.is_empty() {
            let (n, names) = (unnamed.len(), TruncatedList::from_names(&unnamed));
            let note = format!("in the shards and not in the index, kept ({n}): {names}");
            whole.notes.push(note);
        }
        Ok(whole)
    }
}

/// Makes sure of it. Gives the names of the tensors that an index does not name.
fn check_names(
    whole: &Checkpoint,
    parts: &[ShardRange],
    path: &Path,
    index: Option<&ShardIndex<'_>>,
) -> Result<Vec<String>, CheckpointError> {
    let holder = |name: &str| index.and_then(|index| index.shard_of(name));
    let places: Vec<usize> = (0..parts.len()).collect();
    // What lies where no index says it does.
    let others = parallel_map(&places, MAX_READER_THREADS, |&place| {
        let is_other = |name: &&str| holder(name) != Some(place);
        let (tensors, refused) = parts[place].names(whole);
        let others: MisplacedNames<'_> =
            (tensors.filter(is_other).collect(), refused.filter(is_other).collect());
        others
    });
    if let Some(index) = index {
        check_all_present(index, whole, parts, &others)
            .map_err(|fault| CheckpointError::Index { path: path.to_path_buf(), fault })?;
    }
    let unnamed = others.iter().filter(|_| index.is_some()).flat_map(|(tensors, _)| tensors);
    let unnamed = unnamed.map(|&name| name.to_owned()).collect();
    let others = (0..).zip(others).flat_map(|(place, (tensors, refused))| {
        tensors.into_iter().chain(refused).map(move |name| (name, place))
    });
    let mut found = HashMap::<_, _, foldhash::fast::RandomState>::default();
    for (name, place) in others {
        let other = holder(name).unwrap_or_else(|| *found.entry(name).or_insert(place));
        if other != place {
            return Err(CheckpointError::DuplicateTensor {
                path: parts[place.max(other)].path.clone(),
                tensor: name.to_owned(),
                other: parts[place.min(other)].path.clone(),
            });
        }
    }
    Ok(unnamed)
}

fn check_all_present(
    index: &ShardIndex<'_>,
    whole: &Checkpoint,
    parts: &[ShardRange],
    others: &[MisplacedNames<'_>],
) -> Result<(), IndexError> {
    for (place, (part, (tensors, refused))) in parts.iter().zip(others).enumerate() {
        let named = part.tensors.len() - tensors.len() + part.refused.len() - refused.len();
        if named < index.tensor_count_in(place) {
            let (tensors, refused) = part.names(whole);
            let there: HashSet<&str> = tensors.chain(refused).collect();
            let missing = index.tensors_in(place).filter(|name| !there.contains(name)).min();
            return Err(IndexError::MissingTensor {
                tensor: missing.unwrap_or_default().to_owned(),
                shard: index.shards()[place].clone(),
            });
        }
    }
    Ok(())
}

impl ShardRange {
    /// The names of its tensors, and of what of it is refused.
    fn names<'a>(
        &self,
        whole: &'a Checkpoint,
    ) -> (impl Iterator<Item = &'a str>, impl Iterator<Item = &'a str>) {
        let tensors = whole.tensors[self.tensors.clone()].iter().map(|tensor| &*tensor.name);
        let refused = whole.refused[self.refused.clone()].iter();
        (tensors, refused.map(|refused| refused.name.as_str()))
    }
}

fn merge_metadata(
    whole: &mut BTreeMap<String, String>,
    part: BTreeMap<String, String>,
    notes: &mut Vec<String>,
) {
    for (key, value) in part {
        match whole.get(&key) {
            None => drop(whole.insert(key, value)),
            Some(first) if *first == value => {}
            Some(_) => {
                let note =
                    format!("metadata `{key}` differs between shards: that of the first is kept");
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
        }
    }
}
