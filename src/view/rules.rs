//! Which checkpoints of a directory become images, and by what name: names decide, nothing is read.
//!
//! Loaders choose among what they find, each in its own way, so that an image must take the place of
//! its originals and must never be a second `.safetensors` beside a model. In a folder with a model
//! layout only files of the names that loaders look for are turned; in any other, each checkpoint is.

use std::collections::{BTreeMap, BTreeSet};

use crate::checkpoint::{Candidate, LoaderName, lone_shard_note};

use super::KeepRules;

/// A checkpoint that is to be an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualFilePlan {
    pub candidate: Candidate,
    /// The image's name.
    pub name: String,
}

/// What is to become of a directory's checkpoints.
#[derive(Debug, Default)]
pub struct DirectoryPlan {
    pub files: Vec<VirtualFilePlan>,
    /// Those that stay as they are, and why.
    pub skipped: Vec<(String, String)>,
}

/// Bytes of a name at the most, here as on any filesystem.
const MAX_NAME_BYTES: usize = 255;

/// What marks a folder as a model's, whatever else is in it.
const MODEL_CONFIG_NAME: &str = "config.json";

/// The name as safetensors of a file that loaders look for, with its variant; nothing if none does.
fn loader_target(whole: &str) -> Option<String> {
    let LoaderName { stem, variant } = LoaderName::parse(whole)?;
    Some(format!("{stem}{variant}.safetensors"))
}

/// What a file of any name is called as safetensors.
fn target_from_stem(whole: &str) -> String {
    let stem = whole.rsplit_once('.').map(|(stem, _)| stem).filter(|stem| !stem.is_empty());
    format!("{}.safetensors", stem.unwrap_or(whole))
}

/// What keeps a candidate as it is: its own name, that of the whole, or that of any of its files.
fn keep_reason(candidate: &Candidate, keep: &KeepRules) -> Option<String> {
    if let Some(why) =
        [&candidate.name, &candidate.unsharded_name].into_iter().find_map(|n| keep.reason(n))
    {
        return Some(why);
    }
    candidate
        .original_names()
        .iter()
        .find_map(|name| Some(format!("{name} is {}", keep.reason(name)?)))
}

/// Decides for the candidates of a directory in which these names are, of whatever kind.
pub fn plan_directory(
    names: &[String],
    candidates: Vec<Candidate>,
    keep: &KeepRules,
) -> DirectoryPlan {
    let real: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    // What is kept is no candidate, and marks the folder all the same.
    let wholes = candidates.iter().map(|c| c.unsharded_name.as_str());
    let known_ones: Vec<&str> =
        real.iter().copied().chain(wholes).filter(|name| loader_target(name).is_some()).collect();
    let is_model = real.contains(MODEL_CONFIG_NAME) || !known_ones.is_empty();
    // A file or set that is a model's safetensors already.
    let first = known_ones.into_iter().find(|name| name.ends_with(".safetensors"));
    let first = first.map(str::to_owned);
    let mut plans = DirectoryPlan::default();
    let mut wanted: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
    for candidate in candidates {
        let target = match loader_target(&candidate.unsharded_name) {
            target if is_model => target,
            _ => Some(target_from_stem(&candidate.unsharded_name)),
        };
        if candidate.is_safetensors_file() {
            let note = lone_shard_note(&candidate.name);
            plans.skipped.extend(note.map(|note| (candidate.name, note)));
            continue;
        }
        if let Some(why) = keep_reason(&candidate, keep) {
            plans.skipped.push((candidate.name, why));
            continue;
        }
        match target {
            Some(target) if target.len() > MAX_NAME_BYTES => {
                plans.skipped.push((candidate.name, "its name would be too long".to_owned()));
            }
            Some(target) => wanted.entry(target).or_default().push(candidate),
            None => {
                let why = "not a name that loaders look for, in a model's folder";
                plans.skipped.push((candidate.name, why.to_owned()));
            }
        }
    }
    for (target, mut candidates) in wanted {
        if real.contains(target.as_str()) {
            let why = format!("a real {target} lies beside it");
            plans.skipped.extend(candidates.into_iter().map(|c| (c.name, why.clone())));
            continue;
        }
        if let Some(first) = &first {
            let why = format!("would be a second .safetensors beside the model's {first}");
            let (torch, others): (Vec<_>, _) = candidates.into_iter().partition(|c| c.is_torch());
            plans.skipped.extend(torch.into_iter().map(|c| (c.name, why.clone())));
            candidates = others;
        }
        candidates.sort_by_key(Candidate::loader_rank);
        let tied = candidates.len() > 1
            && (!is_model || candidates[0].loader_rank() == candidates[1].loader_rank());
        if tied {
            let why = |other: &str| format!("{other} would be {target} as well");
            for (n, candidate) in candidates.iter().enumerate() {
                let other = &candidates[usize::from(n == 0)].name;
                plans.skipped.push((candidate.name.clone(), why(other)));
            }
            continue;
        }
        let mut candidates = candidates.into_iter();
        if let Some(candidate) = candidates.next() {
            let why = format!("{target} is made of {}", candidate.name);
            plans.skipped.extend(candidates.map(|c| (c.name, why.clone())));
            plans.files.push(VirtualFilePlan { candidate, name: target });
        }
    }
    plans.skipped.sort();
    plans
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
