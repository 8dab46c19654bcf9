//! Which of the checkpoints that a directory holds is meant by the directory itself.
//!
//! In: the names of its files. Out: the one that is meant and what to tell of the rest, or all of them where
//! several could be meant.

use std::path::Path;
use std::sync::Arc;

use crate::source::Root;

use super::candidate::{Candidate, LoaderName, Members};
use super::group::{ShardName, candidates_of, is_shard_of};
use super::listed::Listed;

/// The checkpoint that is meant by a directory.
#[derive(Debug)]
pub struct Meant {
    /// Its files.
    pub candidate: Candidate,
    /// What is left out beside it, in words.
    pub note: Option<String>,
}

/// The only one; the file that lies beside nothing but shards and indexes of its own name, which is what a process
/// leaves that is killed while it puts one in the place of the other; or, where all have names that loaders look for
/// one by one, the first that transformers takes.
pub fn meant(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Result<Meant, Vec<Candidate>> {
    let mut found = candidates_of(root, directory, names);
    if found.len() == 1 {
        return Ok(Meant { candidate: found.remove(0), note: None });
    }
    let above = found.iter().position(|one| one.is_done() && is_above_all(one, &found));
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
/// pickles, a file before a set. Of variants alone it takes none unasked, so that they must be the same one.
fn first_of_loaders(all: &[Candidate]) -> Option<usize> {
    let named = all.iter().map(|one| {
        let LoaderName { stem, variant } = LoaderName::of(&one.whole)?;
        Some((stem, variant, one.rank()))
    });
    let named: Vec<(&str, &str, u8)> = named.collect::<Option<_>>()?;
    // No text comes before the empty one.
    let (place, first) = named.iter().enumerate().min_by_key(|(_, name)| *name)?;
    let (stem, variant, _) = first;
    let is_of_one_model = named.iter().all(|(other, ..)| other == stem);
    let is_plain = variant.is_empty() || named.iter().all(|(_, other, _)| other == variant);
    let is_only = named.iter().filter(|name| *name == first).count() == 1;
    let is_joined = !matches!(all[place].members, Members::Numbered { fault: Some(_), .. });
    (is_of_one_model && is_plain && is_only && is_joined).then_some(place)
}

fn note_of_rest(taken: &str, rest: &[Candidate]) -> String {
    let mut names: Vec<String> = rest.iter().flat_map(Candidate::originals).collect();
    // Shards last: of many names only the first are told.
    names.sort_by_key(|name| (ShardName::parse(name).is_some(), name.clone()));
    let rest = Listed::of(names);
    format!("`{taken}` is taken of this directory, as by transformers; left out beside it: {rest}")
}
