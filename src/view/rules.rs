//! Which checkpoints of a directory become virtual files, and by what name: names decide, nothing is read.
//!
//! Loaders choose among what they find, each in its own way. So a virtual file must take the place of its
//! originals, and must never be a second `.safetensors` beside a model. In a folder with a model's layout, only
//! files of the names that loaders look for become virtual files; in any other, each checkpoint does.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::{
    Candidate, CandidateFiles, LoaderName, lone_shard_note, unsharded_name_of_index,
};

use super::options::KeepRules;
use super::recipe_plan::RecipePlan;

/// A checkpoint that is to be a virtual file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualFilePlan {
    pub source: PlanSource,
    /// The virtual file's name.
    pub name: String,
}

/// What a virtual file is to be made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanSource {
    /// A checkpoint of the directory.
    Candidate(Candidate),
    /// What a recipe says.
    Recipe(Arc<RecipePlan>),
}

impl VirtualFilePlan {
    /// The checkpoint of the directory that the virtual file is made of, or takes the place of.
    fn candidate(&self) -> Option<&Candidate> {
        match &self.source {
            PlanSource::Candidate(candidate) => Some(candidate),
            PlanSource::Recipe(plan) => plan.replaced.as_ref(),
        }
    }

    /// The checkpoint of the directory that the virtual file is made of; `None` for a file of a recipe.
    pub fn own_candidate(&self) -> Option<&Candidate> {
        match &self.source {
            PlanSource::Candidate(candidate) => Some(candidate),
            PlanSource::Recipe(_) => None,
        }
    }

    /// The file of a recipe, if it is one.
    pub fn recipe(&self) -> Option<&Arc<RecipePlan>> {
        match &self.source {
            PlanSource::Candidate(_) => None,
            PlanSource::Recipe(plan) => Some(plan),
        }
    }

    /// The names that the virtual file hides.
    pub fn hidden_names(&self) -> Vec<String> {
        self.candidate().map(Candidate::hidden_names).unwrap_or_default()
    }

    /// Whether it cannot be shown beside the files that it is made of.
    pub fn excludes_originals(&self) -> bool {
        self.recipe().is_none() && self.candidate().is_some_and(Candidate::excludes_originals)
    }

    /// The index by which loaders know what it is made of, if there is one.
    pub fn index_name(&self) -> Option<&str> {
        match &self.source {
            PlanSource::Candidate(candidate) => candidate.index_name(),
            PlanSource::Recipe(_) => None,
        }
    }

    /// The names of what it is made of: files of the directory, or paths in the view.
    pub fn original_names(&self) -> Vec<String> {
        match &self.source {
            PlanSource::Candidate(candidate) => candidate.original_names(),
            PlanSource::Recipe(plan) => {
                plan.file.source_paths().map(|from| from.as_str().to_owned()).collect()
            }
        }
    }

    /// The name by which its source is called.
    pub fn source_name(&self) -> &str {
        match &self.source {
            PlanSource::Candidate(candidate) => &candidate.name,
            PlanSource::Recipe(_) => &self.name,
        }
    }

    /// The paths from the root whose state decides what it is.
    pub fn watched_paths(&self, directory: &Path) -> Vec<PathBuf> {
        match &self.source {
            PlanSource::Candidate(candidate) => {
                let own = candidate.watched_paths().into_iter().map(|name| directory.join(name));
                own.chain(candidate.watched_root_paths().iter().cloned()).collect()
            }
            PlanSource::Recipe(plan) => plan.watched_paths().to_vec(),
        }
    }
}

/// What the names of a directory decide.
#[derive(Debug, Default)]
pub struct NamePlan {
    pub files: Vec<VirtualFilePlan>,
    /// The names of checkpoints that stay as they are, and why.
    pub skipped: Vec<(String, String)>,
}

/// The longest name that filesystems take.
const MAX_NAME_BYTES: usize = 255;

/// The file that marks a folder as a model's, whatever else is in it.
const MODEL_CONFIG_NAME: &str = "config.json";

/// The safetensors name of a file that loaders look for, with its variant; `None` if none looks for it.
fn loader_target(unsharded_name: &str) -> Option<String> {
    let LoaderName { stem, variant } = LoaderName::parse(unsharded_name)?;
    Some(format!("{stem}{variant}.safetensors"))
}

/// The safetensors name of a file of any name.
fn target_from_stem(unsharded_name: &str) -> String {
    let stem = unsharded_name.rsplit_once('.').map(|(stem, _)| stem);
    let stem = stem.filter(|stem| !stem.is_empty()).unwrap_or(unsharded_name);
    format!("{stem}.safetensors")
}

/// The safetensors name that a view gives a file.
fn target_of(unsharded_name: &str) -> String {
    loader_target(unsharded_name).unwrap_or_else(|| target_from_stem(unsharded_name))
}

/// The name that a view gives the virtual file of a checkpoint: its file, its index, or its set by the name of the whole.
pub fn virtual_file_name(checkpoint: &Path) -> String {
    let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
    let unsharded_name = unsharded_name_of_index(&name).unwrap_or_else(|| name.into_owned());
    target_of(&unsharded_name)
}

/// Why a candidate is kept as it is: its own name, that of the unsharded file, or that of any of its files.
fn keep_reason(candidate: &Candidate, keep: &KeepRules) -> Option<String> {
    let own_names = [&candidate.name, &candidate.unsharded_name];
    if let Some(reason) = own_names.into_iter().find_map(|name| keep.reason(name)) {
        return Some(reason);
    }
    if let CandidateFiles::Ranks(_) = candidate.files {
        // Training state belongs to what the ranks saved.
        return None;
    }
    let originals = candidate.original_names();
    originals.iter().find_map(|name| Some(format!("{name} is {}", keep.reason(name)?)))
}

/// Decides for the candidates of a directory that has these names, of whatever kind.
pub fn plan_names(names: &[String], candidates: Vec<Candidate>, keep: &KeepRules) -> NamePlan {
    let real: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    // What is kept is no candidate, and marks the folder all the same.
    let unsharded = candidates.iter().map(|c| c.unsharded_name.as_str());
    let loader_names = real.iter().copied().chain(unsharded);
    let loader_names: Vec<&str> =
        loader_names.filter(|name| loader_target(name).is_some()).collect();
    let is_model = real.contains(MODEL_CONFIG_NAME) || !loader_names.is_empty();
    let model_safetensors = loader_names.into_iter().find(|name| name.ends_with(".safetensors"));
    let model_safetensors = model_safetensors.map(str::to_owned);
    let mut plan = NamePlan::default();
    let mut by_target: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
    for candidate in candidates {
        let target = match is_model {
            true => loader_target(&candidate.unsharded_name),
            false => Some(target_of(&candidate.unsharded_name)),
        };
        if candidate.is_safetensors_file() {
            let note = lone_shard_note(&candidate.name);
            plan.skipped.extend(note.map(|note| (candidate.name, note)));
            continue;
        }
        if let Some(reason) = keep_reason(&candidate, keep) {
            plan.skipped.push((candidate.name, reason));
            continue;
        }
        match target {
            Some(target) if target.len() > MAX_NAME_BYTES => {
                plan.skipped.push((candidate.name, "its name would be too long".to_owned()));
            }
            Some(target) => by_target.entry(target).or_default().push(candidate),
            None => {
                let reason = "not a name that loaders look for, in a model's folder";
                plan.skipped.push((candidate.name, reason.to_owned()));
            }
        }
    }
    for (target, mut candidates) in by_target {
        if real.contains(target.as_str()) {
            let reason = format!("a real {target} lies beside it");
            plan.skipped.extend(candidates.into_iter().map(|c| (c.name, reason.clone())));
            continue;
        }
        if let Some(first) = &model_safetensors {
            let reason = format!("would be a second .safetensors beside the model's {first}");
            let (torch, others): (Vec<_>, _) = candidates.into_iter().partition(|c| c.is_torch());
            plan.skipped.extend(torch.into_iter().map(|c| (c.name, reason.clone())));
            candidates = others;
        }
        candidates.sort_by_key(Candidate::loader_rank);
        let is_tie = candidates.len() > 1
            && (!is_model || candidates[0].loader_rank() == candidates[1].loader_rank());
        if is_tie {
            let reason = |other: &str| format!("{other} would be {target} as well");
            for (n, candidate) in candidates.iter().enumerate() {
                let other = &candidates[usize::from(n == 0)].name;
                plan.skipped.push((candidate.name.clone(), reason(other)));
            }
            continue;
        }
        let mut candidates = candidates.into_iter();
        if let Some(candidate) = candidates.next() {
            let reason = format!("{target} is made of {}", candidate.name);
            plan.skipped.extend(candidates.map(|c| (c.name, reason.clone())));
            let source = PlanSource::Candidate(candidate);
            plan.files.push(VirtualFilePlan { source, name: target });
        }
    }
    plan.skipped.sort();
    plan
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
