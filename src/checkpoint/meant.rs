//! Which of the checkpoints that a directory holds is meant by the directory itself.
//!
//! In: the names of its files. Out: the one that is meant and what to tell of the rest, or all of them where
//! several could be meant.

use std::path::Path;
use std::sync::Arc;

use crate::source::Root;

use super::group::{Candidate, Members, candidates_of, indexed, is_shard_of};
use super::listed::Listed;

/// The checkpoint that is meant by a directory.
#[derive(Debug)]
pub struct Meant {
    /// Its files.
    pub candidate: Candidate,
    /// What is left out beside it, in words.
    pub note: Option<String>,
}

/// The only one; or the one file that lies beside nothing but shards and indexes of its own name, which is
/// what a process leaves that is killed while it puts one in the place of the other. Transformers and
/// diffusers take the file too.
pub fn meant(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Result<Meant, Vec<Candidate>> {
    let mut found = candidates_of(root, directory, names);
    if found.len() == 1 {
        return Ok(Meant { candidate: found.remove(0), note: None });
    }
    match found.iter().position(|one| is_safetensors(one) && is_above_all(one, &found)) {
        Some(place) => {
            let candidate = found.swap_remove(place);
            let note = Some(note_of_rest(&candidate.name, names));
            Ok(Meant { candidate, note })
        }
        None => Err(found),
    }
}

fn is_safetensors(one: &Candidate) -> bool {
    let is_named = one.name.ends_with(".safetensors") || one.name.ends_with(".sft");
    is_named && one.members == Members::File
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

fn note_of_rest(file: &str, names: &[String]) -> String {
    let is_index = |name| indexed(name).is_some_and(|whole| whole == file);
    let rest = Listed::of(names.iter().filter(|name| is_shard_of(name, file) || is_index(name)));
    format!(
        "`{file}` is taken of this directory, as by transformers and diffusers; left out beside it: {rest}"
    )
}
