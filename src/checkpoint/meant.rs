//! Which of the checkpoints that a directory holds is meant by the directory itself.
//!
//! In: its [`Candidate`]s. Out: the one that is meant, or all of them where several could be.

use super::group::{Candidate, Members, indexed, is_shard_of};
use super::listed::Listed;

/// The only one; or the one file that lies beside nothing but shards and an index of its own name, which is
/// what a process leaves that is killed while it puts one in the place of the other. Transformers and
/// diffusers take the file too.
pub fn meant(mut found: Vec<Candidate>) -> Result<Candidate, Vec<Candidate>> {
    let is_file = |one: &Candidate| {
        one.members == Members::File
            && (one.name.ends_with(".safetensors") || one.name.ends_with(".sft"))
    };
    let place = match &*found {
        [_] => Some(0),
        _ => found.iter().position(|one| {
            let of_its_set = |other: &Candidate| {
                other == one
                    || is_shard_of(&other.name, &one.name)
                    || (other.whole == one.name && other.members != Members::File)
            };
            is_file(one) && found.iter().all(of_its_set)
        }),
    };
    place.map(|place| found.swap_remove(place)).ok_or(found)
}

/// What to tell of the files of a directory that a file in it comes before, if there are any.
pub(super) fn note_of_rest(file: &str, names: &[String]) -> Option<String> {
    let is_of = |name: &&String| {
        is_shard_of(name, file) || indexed(name).is_some_and(|whole| whole == file)
    };
    let rest = Listed::of(names.iter().filter(is_of));
    (!rest.is_empty()).then(|| {
        format!("`{file}` is what loaders take, and so does this; left out beside it: {rest}")
    })
}
