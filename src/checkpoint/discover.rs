//! Which files of a directory make up which checkpoint: an index and its shards, a numbered set,
//! or a file by itself.
//!
//! In: a directory. Out: [`Candidate`]s, by name. What a directory then *shows* is the view's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use crate::source::{self, OpenFile, ReadAt, Root};

use super::candidate::{Candidate, CandidateFiles, NumberedSetError};
use super::json::replace_python_numbers;
use super::{index, sniff};

/// Extensions of files that can be checkpoints.
pub const CHECKPOINT_EXTENSIONS: [&str; 6] = ["safetensors", "sft", "bin", "pt", "pth", "ckpt"];

/// What training leaves beside a model, and nobody means by "the checkpoint": how a name begins, or
/// what is anywhere in it.
const TRAINING_PATTERNS: [&str; 6] = [
    "optimizer*",
    "scheduler*",
    "rng_state*",
    "training_args*",
    "*_optim_states*",
    "*_model_states*",
];

/// A shard's name taken apart: `stem-00001-of-00002.ext`, or with a variant before the extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ShardName<'a> {
    stem: &'a str,
    digits: usize,
    pub number: u64,
    pub total: u64,
    variant: &'a str,
    extension: &'a str,
}

impl<'a> ShardName<'a> {
    pub(super) fn parse(name: &'a str) -> Option<Self> {
        let (rest, extension) = name.rsplit_once('.')?;
        let (before, after) = rest.rsplit_once("-of-")?;
        let (of, variant) = after.split_once('.').unwrap_or((after, ""));
        let (stem, number) = before.rsplit_once('-')?;
        let is_number =
            |s: &str| (3..=8).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_digit());
        if stem.is_empty()
            || !CHECKPOINT_EXTENSIONS.contains(&extension)
            || !is_number(number)
            || !is_number(of)
            || number.len() != of.len()
            || of.bytes().all(|b| b == b'0')
        {
            return None;
        }
        let digits = number.len();
        let (number, of) = (number.parse().ok()?, of.parse().ok()?);
        Some(ShardName { stem, digits, number, total: of, variant, extension })
    }

    fn unsharded_name(&self) -> String {
        let ShardName { stem, variant, extension, .. } = self;
        if variant.is_empty() {
            format!("{stem}.{extension}")
        } else {
            format!("{stem}.{variant}.{extension}")
        }
    }

    fn with_number(&self, number: u64) -> String {
        self.with_digits(&format!("{number:0digits$}", digits = self.digits))
    }

    fn with_digits(&self, number: &str) -> String {
        let ShardName { stem, digits, total: of, variant, extension, .. } = self;
        let variant = if variant.is_empty() { String::new() } else { format!(".{variant}") };
        format!("{stem}-{number}-of-{of:0digits$}{variant}.{extension}")
    }
}

/// What to tell of a file that is read by itself, and is one of a set by its name.
pub fn lone_shard_note(name: &str) -> Option<String> {
    let ShardName { number, total: of, .. } =
        ShardName::parse(name).filter(|shard| shard.total > 1)?;
    Some(format!("this is shard {number} of {of} alone; give the directory for all"))
}

/// The whole file that an index stands for: `X.ext.index.json` and `X.ext.index.variant.json`.
pub(super) fn unsharded_name_of_index(name: &str) -> Option<String> {
    let rest = name.strip_suffix(".json")?;
    let (whole, variant) = match rest.strip_suffix(".index") {
        Some(whole) => (whole, None),
        None => rest.rsplit_once(".index.").map(|(whole, variant)| (whole, Some(variant)))?,
    };
    let (stem, extension) = whole.rsplit_once('.')?;
    if stem.is_empty() || !CHECKPOINT_EXTENSIONS.contains(&extension) {
        return None;
    }
    Some(match variant {
        None => whole.to_owned(),
        Some(variant) => format!("{stem}.{variant}.{extension}"),
    })
}

/// The pattern that a name matches which training leaves beside a model: optimizer state and the like.
pub fn training_pattern(name: &str) -> Option<&'static str> {
    TRAINING_PATTERNS.into_iter().find(|pattern| {
        let word = pattern.trim_matches('*');
        if pattern.starts_with('*') { name.contains(word) } else { name.starts_with(word) }
    })
}

/// Whether it matches one.
pub fn is_training_file(name: &str) -> bool {
    training_pattern(name).is_some()
}

/// Whether a file may be a checkpoint by its name. One that is nothing but an extension is none.
fn has_checkpoint_extension(name: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(stem, e)| !stem.is_empty() && CHECKPOINT_EXTENSIONS.contains(&e))
}

/// Whether a file is numbered as the shards of a whole file are.
pub(super) fn is_shard_of(name: &str, whole: &str) -> bool {
    ShardName::parse(name).is_some_and(|shard| shard.unsharded_name() == whole)
}

/// The files that are, in order.
pub(super) fn numbered_shards(names: &[String], whole: &str) -> Vec<String> {
    let mut numbered: Vec<String> =
        names.iter().filter(|name| is_shard_of(name, whole)).cloned().collect();
    numbered.sort();
    numbered
}

/// Whether sorted names are those of one set, all of it: then there is none among them that was left over.
pub(super) fn is_complete_set(names: &[String]) -> bool {
    let parsed: Option<Vec<ShardName>> = names.iter().map(|name| ShardName::parse(name)).collect();
    let Some([first, rest @ ..]) = parsed.as_deref() else { return false };
    let next =
        |(n, shard): (u64, &ShardName)| *shard == ShardName { number: first.number + n, ..*first };
    first.number <= 1 && names.len() as u64 == first.total && (1..).zip(rest).all(next)
}

/// The index that is the only checkpoint of a directory, where the names of its files leave no doubt.
pub(super) fn sole_index(names: &[String]) -> Option<&str> {
    let mut indexes = names.iter().filter_map(|name| Some((name, unsharded_name_of_index(name)?)));
    let (index, whole) = indexes.next()?;
    let mut others =
        names.iter().filter(|name| has_checkpoint_extension(name) && !is_training_file(name));
    (indexes.next().is_none() && others.all(|name| is_shard_of(name, &whole))).then_some(index)
}

/// The checkpoints of a directory, by name.
pub fn find_candidates(
    root: &Arc<Root>,
    directory: &Path,
) -> Result<Vec<Candidate>, source::SourceError> {
    Ok(candidates_among(root, directory, &root.file_names(directory)?))
}

/// The same, of a directory whose files are known.
pub(super) fn candidates_among(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Vec<Candidate> {
    let mut found = candidates_by_name(root, directory, names, &is_training_file);
    found.retain(|candidate| {
        let name = &candidate.name;
        // What cannot be opened is listed, so that opening it can say why; and what calls itself
        // safetensors is, whatever is in it.
        let named = name.ends_with(".safetensors") || name.ends_with(".sft");
        named
            || candidate.files != CandidateFiles::Single
            || match OpenFile::open_in_root(root, &directory.join(name)) {
                Ok(file) => sniff::looks_like_checkpoint(&file),
                Err(_) => true,
            }
    });
    found
}

/// The checkpoints that the names of a directory's files suggest. Of the files only indexes are
/// read. What `is_kept` says of a name keeps it, and a set that it is part of, from being one.
pub fn candidates_by_name(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
    is_excluded: &dyn Fn(&str) -> bool,
) -> Vec<Candidate> {
    let mut found = Vec::new();
    let mut claimed: BTreeSet<String> = BTreeSet::new();
    for name in names {
        let Some(whole) = unsharded_name_of_index(name) else { continue };
        let named = indexed_shards(root, &directory.join(name));
        let mut beside = numbered_shards(names, &whole);
        beside.retain(|name| !named.contains(name));
        claimed.extend(named.iter().cloned());
        claimed.extend(beside.iter().cloned());
        let members =
            CandidateFiles::Indexed { shards: named.into_iter().collect(), unindexed: beside };
        found.push(Candidate { name: name.clone(), unsharded_name: whole, files: members });
    }
    let free = |name: &str| !claimed.contains(name) && !is_excluded(name);
    // By everything in the name but the number.
    let mut sets: BTreeMap<ShardName, Vec<u64>> = BTreeMap::new();
    let mut files: Vec<String> = Vec::new();
    for name in names.iter().filter(|name| free(name)) {
        match ShardName::parse(name) {
            Some(shard) => {
                sets.entry(ShardName { number: 0, ..shard }).or_default().push(shard.number);
            }
            None if has_checkpoint_extension(name) => files.push(name.clone()),
            None => {}
        }
    }
    let mut wholes: BTreeMap<String, usize> = BTreeMap::new();
    for name in sets.keys().map(ShardName::unsharded_name).chain(files.iter().cloned()) {
        *wholes.entry(name).or_default() += 1;
    }
    for (set, mut numbers) in sets {
        numbers.sort_unstable();
        // Most writers count from 1, some from 0.
        let is_whole =
            |first| (first..first + set.total).all(|n| numbers.binary_search(&n).is_ok());
        let seems_from_zero = numbers[0] == 0 && numbers.last() < Some(&set.total);
        let (range, is_ambiguous) = match (is_whole(0), is_whole(1)) {
            (true, true) => (0..set.total + 1, true),
            (from_zero, from_one) => {
                let first = u64::from(!from_zero && (from_one || !seems_from_zero));
                (first..first + set.total, false)
            }
        };
        let (own, other): (Vec<u64>, Vec<u64>) =
            numbers.into_iter().partition(|n| range.contains(n));
        let there = own.iter().map(Some).chain(std::iter::repeat(None));
        let missing = range.zip(there).find(|(want, have)| *have != Some(want));
        // A file too many beside a complete set is one by itself.
        if missing.is_none() {
            files.extend(other.into_iter().map(|n| set.with_number(n)));
        }
        let fault = match missing {
            Some((number, _)) => Some(NumberedSetError::MissingShard(set.with_number(number))),
            None => is_ambiguous.then_some(NumberedSetError::AmbiguousNumbering),
        };
        // Called by the name of the whole, unless something else has it.
        let whole = set.unsharded_name();
        let name =
            if wholes.get(&whole) == Some(&1) { whole.clone() } else { set.with_digits("*") };
        let members = CandidateFiles::Numbered {
            shards: own.iter().map(|&n| set.with_number(n)).collect(),
            total: set.total,
            error: fault,
        };
        found.push(Candidate { name, unsharded_name: whole, files: members });
    }
    found.extend(files.into_iter().map(Candidate::single));
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// The shards that an index names; none where it cannot be read, which opening it will say.
fn indexed_shards(root: &Arc<Root>, path: &Path) -> BTreeSet<String> {
    let read = || {
        let file = OpenFile::open_in_root(root, path)
            .ok()
            .filter(|file| file.size() <= index::MAX_INDEX_BYTES)?;
        let mut json = file.read_whole().ok()?;
        replace_python_numbers(&mut json);
        index::shard_names(&json).ok()
    };
    read().unwrap_or_default().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_of_every_spelling() {
        let parse = |name| ShardName::parse(name).map(|s| (s.unsharded_name(), s.number, s.total));
        assert_eq!(
            parse("model-00001-of-00003.safetensors"),
            Some(("model.safetensors".into(), 1, 3))
        );
        assert_eq!(
            parse("model.fp16-00002-of-00003.safetensors"),
            Some(("model.fp16.safetensors".into(), 2, 3))
        );
        assert_eq!(
            parse("model-00002-of-00003.fp16.safetensors"),
            Some(("model.fp16.safetensors".into(), 2, 3))
        );
        assert_eq!(
            parse("pytorch_model-00001-of-00002.bin"),
            Some(("pytorch_model.bin".into(), 1, 2))
        );
        assert_eq!(parse("model.safetensors"), None);
        assert_eq!(parse("one-of-many.safetensors"), None);
        assert_eq!(parse("-00001-of-00002.bin"), None);
    }

    #[test]
    fn a_shard_name_put_together_again_is_the_same() {
        for name in
            ["a-00001-of-00002.bin", "a.fp16-00001-of-00002.bin", "a-00001-of-00002.fp16.bin"]
        {
            let shard = ShardName::parse(name).unwrap();
            assert_eq!(shard.with_number(shard.number), name);
        }
    }

    #[test]
    fn index_names_of_every_spelling() {
        assert_eq!(
            unsharded_name_of_index("model.safetensors.index.json").as_deref(),
            Some("model.safetensors")
        );
        assert_eq!(
            unsharded_name_of_index("model.safetensors.index.fp16.json").as_deref(),
            Some("model.fp16.safetensors")
        );
        assert_eq!(
            unsharded_name_of_index("model.fp16.safetensors.index.json").as_deref(),
            Some("model.fp16.safetensors")
        );
        assert_eq!(
            unsharded_name_of_index("pytorch_model.bin.index.json").as_deref(),
            Some("pytorch_model.bin")
        );
        assert_eq!(unsharded_name_of_index("config.json"), None);
        assert_eq!(unsharded_name_of_index("notes.index.json"), None);
    }
}
