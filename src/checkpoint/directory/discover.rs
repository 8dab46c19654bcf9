//! Groups the files of a directory into checkpoints: an index and its shards, a numbered set, or a single file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use super::training_folder::training_folders;
use super::universal_folder::universal_folder;
use crate::checkpoint::delta_index::parse_delta_metadata;
use crate::checkpoint::format::{self, DetectedFormat};
use crate::checkpoint::shard_index::shard_names;
use crate::checkpoint::torch;
use crate::checkpoint::unread_format::UnreadFormat;
use crate::source::{FileKind, OpenFile, Root, SourceError};

use super::candidate::{Candidate, CandidateFiles, NumberedSetError};
use super::nested_training::nested_training_folder;
use super::numbered_name::split_digits;
use super::shard_name::{
    ShardName, has_checkpoint_extension, is_shard_of, numbered_shards, unsharded_name_of_index,
};
use super::version_chain::{find_chain_paths, read_index};

/// Names of training state that lies beside a model: how a name begins, or a word anywhere in it.
const TRAINING_PATTERNS: [&str; 8] = [
    "optimizer*",
    "optim_world_size_*",
    "extra_state_world_size_*",
    "scheduler*",
    "rng_state*",
    "training_args*",
    "*_optim_states*",
    "*_model_states*",
];

/// The pattern of training state that a name matches.
pub fn training_pattern(name: &str) -> Option<&'static str> {
    TRAINING_PATTERNS.into_iter().find(|pattern| {
        let word = pattern.trim_matches('*');
        if pattern.starts_with('*') { name.contains(word) } else { name.starts_with(word) }
    })
}

/// Whether a name is that of training state.
pub fn is_training_file(name: &str) -> bool {
    training_pattern(name).is_some()
}

/// The index that is the only checkpoint of a directory, if the names of its files leave no doubt.
pub fn sole_index(names: &[String]) -> Option<&str> {
    let mut indexes = names.iter().filter_map(|name| Some((name, unsharded_name_of_index(name)?)));
    let (index, unsharded) = indexes.next()?;
    let mut others =
        names.iter().filter(|name| has_checkpoint_extension(name) && !is_training_file(name));
    (indexes.next().is_none() && others.all(|name| is_shard_of(name, &unsharded))).then_some(index)
}

/// The checkpoints of a directory, by name.
pub fn find_candidates(root: &Arc<Root>, directory: &Path) -> Result<Vec<Candidate>, SourceError> {
    Ok(candidates_among(root, directory, &root.file_names(directory)?))
}

/// The checkpoints of a directory whose file names are known, by name.
pub fn candidates_among(root: &Arc<Root>, directory: &Path, names: &[String]) -> Vec<Candidate> {
    let mut found = candidates_by_name(root, directory, names, &is_training_file);
    found.retain(|candidate| {
        let name = &candidate.name;
        // A file that cannot be read stays, so that opening it reports why. A file with a name of safetensors stays,
        // whatever it holds.
        let is_named_safetensors = name.ends_with(".safetensors") || name.ends_with(".sft");
        is_named_safetensors
            || candidate.files != CandidateFiles::Single
            || looks_like_checkpoint(root, &directory.join(name)).unwrap_or(true)
    });
    found
}

/// Whether the first bytes of a file are those of a checkpoint.
fn looks_like_checkpoint(root: &Arc<Root>, path: &Path) -> Result<bool, SourceError> {
    let file = OpenFile::open_in_root(root, path)?;
    let format = format::detect(&file, &file.file().path())?;
    Ok(matches!(format, DetectedFormat::Checkpoint(_)))
}

/// Maximum number of files, and of subdirectories, that are looked at to say why a directory has no checkpoint.
const MAX_LOOK_COUNT: usize = 64;

/// The first file that stands in the place of a checkpoint and is of a format that is not read.
pub fn find_unread_file(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Option<(String, UnreadFormat)> {
    let files = names.iter().filter(|name| has_checkpoint_extension(name));
    let mut files = files.filter(|name| !is_training_file(name)).take(MAX_LOOK_COUNT);
    files.find_map(|name| {
        let file = OpenFile::open_in_root(root, &directory.join(name)).ok()?;
        match format::detect(&file, &file.file().path()) {
            Ok(DetectedFormat::Unread(format)) if format.replaces_checkpoint() => {
                Some((name.clone(), format))
            }
            _ => None,
        }
    })
}

/// The subdirectories with checkpoints, by the number at the end of their names, then by name. Other filesystems that
/// are mounted there are not looked at.
pub fn find_nested(root: &Arc<Root>, directory: &Path) -> Vec<String> {
    let Ok(entries) = root.entries(directory) else { return Vec::new() };
    let device = |path: &Path| root.cached_metadata(path).map(|metadata| metadata.dev).ok();
    let own_device = device(directory);
    let folders = entries.into_iter().filter(|entry| entry.kind == FileKind::Directory);
    let mut names: Vec<String> = folders
        .filter_map(|entry| entry.name.into_string().ok())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort_by_cached_key(|name| (number_at_end(name), name.clone()));
    let first = names.len().saturating_sub(MAX_LOOK_COUNT);
    let nested = names.split_off(first).into_iter().filter_map(|name| {
        let path = directory.join(&name);
        let files = root.file_names(&path).ok().filter(|_| device(&path) == own_device)?;
        let candidates = candidates_by_name(root, &path, &files, &is_training_file);
        (!candidates.is_empty()).then_some(name)
    });
    nested.collect()
}

/// The number at the end of a name, such as a step.
fn number_at_end(name: &str) -> Option<u64> {
    split_digits(name).1.parse().ok()
}

/// The checkpoints that the names in a directory suggest. Of the files, only these are read: indexes, DeepSpeed's
/// `latest`, and the pickles of per-rank files whose names do not tell what they hold.
///
/// A name that `is_excluded` makes no checkpoint, nor does a set that it belongs to.
pub fn candidates_by_name(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
    is_excluded: &dyn Fn(&str) -> bool,
) -> Vec<Candidate> {
    let mut found = Vec::new();
    let mut claimed: BTreeSet<String> = BTreeSet::new();
    for name in names {
        let Some(unsharded_name) = unsharded_name_of_index(name) else { continue };
        let IndexedShards { shards: indexed, is_delta } =
            indexed_shards(root, &directory.join(name));
        if is_delta {
            let shards: Vec<String> = indexed.iter().cloned().collect();
            claimed.extend(indexed);
            let (chain, base) = find_chain_paths(root, directory);
            let files = CandidateFiles::Delta { shards, chain, base };
            found.push(Candidate { name: name.clone(), unsharded_name, files });
            continue;
        }
        let mut unindexed = numbered_shards(names, &unsharded_name);
        unindexed.retain(|name| !indexed.contains(name));
        claimed.extend(indexed.iter().cloned());
        claimed.extend(unindexed.iter().cloned());
        let files = CandidateFiles::Indexed { shards: indexed.into_iter().collect(), unindexed };
        found.push(Candidate { name: name.clone(), unsharded_name, files });
    }
    // Training state is excluded by itself, but belongs to what the ranks saved.
    let is_kept = |name: &String| is_excluded(name) && !is_training_file(name);
    let has_pieces = |name: &str| {
        let file = OpenFile::open_in_root(root, &directory.join(name));
        file.is_ok_and(|file| torch::has_rank_pieces(&file))
    };
    let folders = match universal_folder(root, directory, names) {
        Some(folder) => vec![folder],
        None => training_folders(names, &has_pieces),
    };
    for folder in folders.into_iter().filter(|folder| !folder.names.iter().any(is_kept)) {
        claimed.extend(folder.names.iter().cloned());
        found.push(Candidate::from_training_folder(folder));
    }
    let is_free = |name: &str| !claimed.contains(name) && !is_excluded(name);
    // Sets by their names without numbers.
    let mut sets: BTreeMap<ShardName, Vec<u64>> = BTreeMap::new();
    let mut singles: Vec<String> = Vec::new();
    for name in names.iter().filter(|name| is_free(name)) {
        match ShardName::parse(name) {
            Some(shard) => {
                sets.entry(shard.without_number()).or_default().push(shard.number);
            }
            None if has_checkpoint_extension(name) => singles.push(name.clone()),
            None => {}
        }
    }
    let mut unsharded_names: BTreeMap<String, usize> = BTreeMap::new();
    for name in sets.keys().map(ShardName::unsharded_name).chain(singles.iter().cloned()) {
        *unsharded_names.entry(name).or_default() += 1;
    }
    for (set, mut numbers) in sets {
        numbers.sort_unstable();
        // Most writers count from 1, some from 0.
        let is_complete =
            |first| (first..first + set.total).all(|n| numbers.binary_search(&n).is_ok());
        let seems_from_zero = numbers[0] == 0 && numbers.last() < Some(&set.total);
        let (range, is_ambiguous) = match (is_complete(0), is_complete(1)) {
            (true, true) => (0..set.total + 1, true),
            (from_zero, from_one) => {
                let first = u64::from(!from_zero && (from_one || !seems_from_zero));
                (first..first + set.total, false)
            }
        };
        let (own, extra): (Vec<u64>, Vec<u64>) =
            numbers.into_iter().partition(|n| range.contains(n));
        let present = own.iter().map(Some).chain(std::iter::repeat(None));
        let missing = range.zip(present).find(|(want, have)| *have != Some(want));
        // A file too many beside a complete set is a checkpoint of its own.
        if missing.is_none() {
            singles.extend(extra.into_iter().map(|n| set.with_number(n)));
        }
        let error = match missing {
            Some((number, _)) => Some(NumberedSetError::MissingShard(set.with_number(number))),
            None => is_ambiguous.then_some(NumberedSetError::AmbiguousNumbering),
        };
        // The set has the name of the single file, unless something else has that name.
        let unsharded_name = set.unsharded_name();
        let name = if unsharded_names.get(&unsharded_name) == Some(&1) {
            unsharded_name.clone()
        } else {
            set.with_digits("*")
        };
        let files = CandidateFiles::Numbered {
            shards: own.iter().map(|&n| set.with_number(n)).collect(),
            total: set.total,
            error,
        };
        found.push(Candidate { name, unsharded_name, files });
    }
    found.extend(singles.into_iter().map(Candidate::single));
    let nested = nested_training_folder(root, directory, names, &found);
    found.extend(
        nested
            .filter(|folder| !folder.names.iter().any(is_kept))
            .map(Candidate::from_training_folder),
    );
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// What an index says of its shards.
#[derive(Default)]
struct IndexedShards {
    shards: BTreeSet<String>,
    /// Whether they hold changes of another checkpoint.
    is_delta: bool,
}

/// The shards that an index names; none if it cannot be read, which opening it reports.
fn indexed_shards(root: &Arc<Root>, path: &Path) -> IndexedShards {
    let read = || {
        let json = read_index(&OpenFile::open_in_root(root, path).ok()?).ok()??;
        let shards = shard_names(&json).ok()?.into_iter().collect();
        // One that is refused is that of a delta, too.
        let is_delta = !matches!(parse_delta_metadata(&json), Ok(None));
        Some(IndexedShards { shards, is_delta })
    };
    read().unwrap_or_default()
}
