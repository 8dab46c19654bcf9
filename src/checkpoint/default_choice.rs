//! Which of the checkpoints that a directory holds is meant by the directory itself.
//!
//! In: the names of its files. Out: the one that is meant and what to tell of the rest, or all of them where
//! several could be meant.

use std::path::Path;
use std::sync::Arc;

use crate::source::Root;

use super::candidate::{Candidate, LoaderName, Members};
use super::discover::{ShardName, candidates_of, is_shard_of};
use super::truncated_list::Listed;

/// The checkpoint that is meant by a directory.
#[derive(Debug)]
pub struct Meant {
    /// Its files.
    pub candidate: Candidate,
    /// What is left out beside it, in words.
    pub note: Option<String>,
}

/// Finds the candidate that the directory itself stands for, by the first rule that fits:
///
/// - the only one;
/// - the file beside which lie only shards and indexes of its own name. A process that is killed while it replaces
///   one by the other leaves such a directory;
/// - the first that transformers takes, if all have names that loaders look for.
pub fn meant(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Result<Meant, Vec<Candidate>> {
    let mut found = candidates_of(root, directory, names);
    if found.len() == 1 {
        return Ok(Meant { candidate: found.remove(0), note: None });
    }
    let above = found.iter().position(|one| one.is_safetensors_file() && is_above_all(one, &found));
    match above.or_else(|| first_of_loaders(&found)) {
        Some(place) => {
            let candidate = found.swap_remove(place);
            let note = Some(note_of_rest(&candidate.name, &found));
            Ok(Meant { candidate, note })
        }
        None => Err(found),
    }
}

/// Whether all others are of the set that has its name.
fn is_above_all(one: &Candidate, all: &[Candidate]) -> bool {
    let is_shard = |name: &String| is_shard_of(name, &one.name);
    all.iter().filter(|other| *other != one).all(|other| match &other.members {
        Members::File => is_shard(&other.name),
        Members::Index { shards, .. } => other.whole == one.name && shards.iter().all(is_shard),
        Members::Numbered { .. } => other.whole == one.name,
    })
}

/// The one that transformers takes of files of one model: the plain name before variants, safetensors before
/// pickles, a file before a set. It takes no variant unasked: without a plain name, all must be of one variant.
fn first_of_loaders(all: &[Candidate]) -> Option<usize> {
    let names = all.iter().map(|one| {
        let LoaderName { stem, variant } = LoaderName::of(&one.whole)?;
        Some((stem, variant, one.rank()))
    });
    let names: Vec<(&str, &str, u8)> = names.collect::<Option<_>>()?;
    // The empty variant, which is the plain name, sorts first.
    let (place, first) = names.iter().enumerate().min_by_key(|(_, name)| *name)?;
    let (stem, variant, _) = first;
    let is_of_one_model = names.iter().all(|(other, ..)| other == stem);
    let is_plain = variant.is_empty() || names.iter().all(|(_, other, _)| other == variant);
    let is_unique = names.iter().filter(|name| *name == first).count() == 1;
    let is_joinable = !matches!(all[place].members, Members::Numbered { fault: Some(_), .. });
    (is_of_one_model && is_plain && is_unique && is_joinable).then_some(place)
}

fn note_of_rest(taken: &str, rest: &[Candidate]) -> String {
    let mut names: Vec<String> = rest.iter().flat_map(Candidate::originals).collect();
    // Shards last: a long list shows only its first names.
    names.sort_by_key(|name| (ShardName::parse(name).is_some(), name.clone()));
    let rest = Listed::of(names);
    format!("`{taken}` is taken of this directory, as by transformers; left out beside it: {rest}")
}
