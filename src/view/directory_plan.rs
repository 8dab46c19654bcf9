//! The plan of a directory: its names, and which of them become virtual files.
//!
//! Nothing is parsed for it, except per-rank files whose names do not tell what they hold.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{Candidate, candidates_by_name};
use crate::source::{FileKind, Root, SourceError};

use super::names::SortedNames;
use super::near_misses::near_miss_reason;
use super::options::KeepRules;
use super::rules::{NamePlan, VirtualFilePlan, plan_names};

/// What is looked at of a directory where one checkpoint in it was named.
#[derive(Debug)]
pub enum SingleTarget {
    /// A file by itself, whatever its name.
    File(OsString),
    /// The files of a set, or of what the view of the directory shows by the given name.
    Files(Vec<OsString>),
}

impl SingleTarget {
    /// Whether a name belongs to the target.
    pub fn contains(&self, name: &OsStr) -> bool {
        match self {
            SingleTarget::File(file) => file == name,
            SingleTarget::Files(files) => files.iter().any(|file| file == name),
        }
    }
}

/// The names of a directory, and what is planned for them.
#[derive(Debug, Default)]
pub struct DirectoryPlan {
    pub names: SortedNames,
    /// The kind of each name, in the same order.
    pub kinds: Box<[FileKind]>,
    pub files: Vec<VirtualFilePlan>,
    /// Names that stay as they are although they are like those of checkpoints, and why; sorted.
    pub skipped: Box<[(OsString, String)]>,
}

/// Plans a directory, or only a target in it.
pub fn plan_directory(
    root: &Arc<Root>,
    directory: &Path,
    keep: &KeepRules,
    target: Option<&SingleTarget>,
) -> Result<DirectoryPlan, SourceError> {
    let mut entries = root.entries(directory)?;
    if let Some(target) = target {
        entries.retain(|entry| target.contains(&entry.name));
    }
    // A directory that changes during the reading may return a name twice.
    entries.dedup_by(|a, b| a.name == b.name);
    let names = SortedNames::from_sorted(entries.iter().map(|entry| &*entry.name));
    let kinds: Box<[FileKind]> = entries.iter().map(|entry| entry.kind).collect();
    drop(entries);
    let files = names.iter().zip(&kinds);
    let files = files.filter(|(name, kind)| root.may_be_file(directory, name, **kind));
    let files: Vec<&OsStr> = files.map(|(name, _)| name).collect();
    let to_text = |name: &OsStr| name.to_str().map(str::to_owned);
    let texts: Vec<String> = files.iter().copied().filter_map(to_text).collect();
    let mut candidates = match target {
        // A file that was named is looked at, whatever its name.
        Some(SingleTarget::File(_)) => texts.into_iter().map(Candidate::single).collect(),
        _ => candidates_by_name(root, directory, &texts, &|name| keep.matches(name)),
    };
    if let Some(target) = target {
        // The files of a nested checkpoint lie in another folder, so it is found whatever the names are.
        candidates.retain(|candidate| {
            candidate.original_names().iter().all(|name| target.contains(OsStr::new(name)))
        });
    }
    let mut skipped = near_misses(&files, &candidates, keep);
    let taken: Vec<String> = names.iter().filter_map(to_text).collect();
    let NamePlan { files, skipped: skipped_by_rule } = plan_names(&taken, candidates, keep);
    skipped.extend(skipped_by_rule.into_iter().map(|(name, reason)| (name.into(), reason)));
    skipped.sort();
    Ok(DirectoryPlan { names, kinds, files, skipped: skipped.into() })
}

/// Files of no candidate whose names are like those of checkpoints, and why they stay as they are.
fn near_misses(
    files: &[&OsStr],
    candidates: &[Candidate],
    keep: &KeepRules,
) -> Vec<(OsString, String)> {
    let originals = candidates.iter().flat_map(Candidate::original_names);
    let originals: HashSet<OsString> = originals.map(OsString::from).collect();
    let others = files.iter().filter(|name| !originals.contains(**name));
    others.filter_map(|name| Some(((*name).to_owned(), near_miss_reason(name, keep)?))).collect()
}
