//! Chooses the checkpoint that a directory stands for.
//!
//! In: the names of its files. Out: the chosen candidate and a note on the rest; or all candidates, where none is
//! the obvious one.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::truncated_list::TruncatedList;
use crate::source::Root;

use super::candidate::{Candidate, CandidateFiles, LoaderName};
use super::discover::candidates_among;
use super::shard_name::{ShardName, is_shard_of};

/// The checkpoint that a directory stands for.
#[derive(Debug)]
pub struct DefaultChoice {
    /// The chosen candidate.
    pub candidate: Candidate,
    /// What is left out, in words.
    pub note: Option<String>,
}

/// Chooses a candidate by the first rule that fits:
///
/// - the only one;
/// - the file beside which lie only shards and indexes of its own name. A process that is killed while it replaces
///   one by the other leaves such a directory;
/// - the first in the order of transformers, if loaders look for the names of all;
/// - the only training folder, if loaders look for the name of no other candidate.
pub fn choose_default(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Result<DefaultChoice, Vec<Candidate>> {
    let mut found = candidates_among(root, directory, names);
    if found.len() == 1 {
        return Ok(DefaultChoice { candidate: found.remove(0), note: None });
    }
    let covering =
        found.iter().position(|one| one.is_safetensors_file() && covers_all_others(one, &found));
    match covering.or_else(|| loader_preference(&found)).or_else(|| sole_training_folder(&found)) {
        Some(index) => {
            let candidate = found.swap_remove(index);
            let note = Some(left_out_note(&candidate.name, &found));
            Ok(DefaultChoice { candidate, note })
        }
        None => Err(found),
    }
}

/// The index of the only training folder, if loaders look for the name of no other candidate.
fn sole_training_folder(all: &[Candidate]) -> Option<usize> {
    let is_ranks = |one: &&Candidate| matches!(one.files, CandidateFiles::Ranks(_));
    let others = all.iter().filter(|one| !is_ranks(one));
    let is_sole = all.iter().filter(is_ranks).count() == 1
        && others.map(|one| LoaderName::parse(&one.unsharded_name)).all(|name| name.is_none());
    all.iter().position(|one| is_ranks(&one)).filter(|_| is_sole)
}

/// Whether all others are shards and indexes of a candidate's name.
fn covers_all_others(one: &Candidate, all: &[Candidate]) -> bool {
    let is_shard = |name: &String| is_shard_of(name, &one.name);
    all.iter().filter(|other| *other != one).all(|other| match &other.files {
        CandidateFiles::Single => is_shard(&other.name),
        CandidateFiles::Indexed { shards, .. } => {
            other.unsharded_name == one.name && shards.iter().all(is_shard)
        }
        CandidateFiles::Numbered { .. } => other.unsharded_name == one.name,
        CandidateFiles::Ranks(_) | CandidateFiles::Delta { .. } => false,
    })
}

/// The index of the candidate that transformers takes among the files of one model. A plain name comes before variants,
/// safetensors before pickles, a file before a set.
///
/// It takes no variant by default: without a plain name, all must be of one variant.
fn loader_preference(all: &[Candidate]) -> Option<usize> {
    let names = all.iter().map(|one| {
        let LoaderName { stem, variant } = LoaderName::parse(&one.unsharded_name)?;
        Some((stem, variant, one.loader_rank()))
    });
    let names: Vec<(&str, &str, u8)> = names.collect::<Option<_>>()?;
    // The empty variant, which is the plain name, sorts first.
    let (index, first) = names.iter().enumerate().min_by_key(|(_, name)| *name)?;
    let (stem, variant, _) = first;
    let is_of_one_model = names.iter().all(|(other, ..)| other == stem);
    let is_plain = variant.is_empty() || names.iter().all(|(_, other, _)| other == variant);
    let is_unique = names.iter().filter(|name| *name == first).count() == 1;
    let is_joinable = !matches!(all[index].files, CandidateFiles::Numbered { error: Some(_), .. });
    (is_of_one_model && is_plain && is_unique && is_joinable).then_some(index)
}

fn left_out_note(chosen: &str, rest: &[Candidate]) -> String {
    let mut names: Vec<String> = rest.iter().flat_map(Candidate::original_names).collect();
    // Shards last: a long list shows only its first names.
    names.sort_by_key(|name| (ShardName::parse(name).is_some(), name.clone()));
    let rest = TruncatedList::from_names(names);
    format!("`{chosen}` was chosen in this directory, as transformers does; left out: {rest}")
}
