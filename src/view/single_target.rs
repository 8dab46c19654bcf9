//! One checkpoint that was named, in the directory that it is in: by its own name, or by that of the
//! image which the view of the directory shows in its place.
//!
//! In: a name in a directory. Out: the names that are looked at, or the checkpoint itself.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{
    self, Candidate, CandidateFiles, Checkpoint, candidates_by_name, is_training_file,
};
use crate::source::{self, Root};

use super::KeepRules;
use super::rules::plan_directory;

/// What is looked at of a directory where one checkpoint in it was named.
#[derive(Debug)]
pub enum SingleTarget {
    /// A file by itself, whatever it is called.
    File(OsString),
    /// The files of a set, or of what the view of the directory shows by the name that was given.
    Files(Vec<OsString>),
}

impl SingleTarget {
    /// Whether a name belongs to it.
    pub fn contains(&self, name: &OsStr) -> bool {
        match self {
            SingleTarget::File(file) => file == name,
            SingleTarget::Files(files) => files.iter().any(|file| file == name),
        }
    }
}

/// What was named in a directory: a set, by its index or the name of the whole; a file; or an image,
/// by the name that the view of the directory gives it.
pub fn resolve(
    root: &Arc<Root>,
    way: &Path,
    name: &OsStr,
    keep: &KeepRules,
) -> Result<SingleTarget, source::SourceError> {
    let files = |candidate: &Candidate| {
        SingleTarget::Files(candidate.original_names().into_iter().map(OsString::from).collect())
    };
    let names = root.file_names(way)?;
    let candidates = candidates_by_name(root, way, &names, &is_training_file);
    if let Some(set) =
        candidates.iter().find(|c| c.files != CandidateFiles::Single && *c.name == *name)
    {
        return Ok(files(set));
    }
    match root.open_user_path(&way.join(name)) {
        Ok(_) => Ok(SingleTarget::File(name.to_owned())),
        Err(missing @ source::SourceError::Missing { .. }) => {
            find_shown(root, way, name, keep)?.as_ref().map(files).ok_or(missing)
        }
        Err(error) => Err(error),
    }
}

/// The checkpoint that the view of a directory shows by that name, if it shows one.
pub fn find_shown(
    root: &Arc<Root>,
    way: &Path,
    name: &OsStr,
    keep: &KeepRules,
) -> Result<Option<Candidate>, source::SourceError> {
    let taken = root.entries(way)?.into_iter().filter_map(|entry| entry.name.into_string().ok());
    let candidates =
        candidates_by_name(root, way, &root.file_names(way)?, &|name| keep.matches(name));
    let plans = plan_directory(&taken.collect::<Vec<_>>(), candidates, keep).files;
    Ok(plans.into_iter().find(|plan| *plan.name == *name).map(|plan| plan.candidate))
}

/// The directory that a path leads to, and the name in it.
pub fn split_parent(path: &Path) -> Result<(&Path, &OsStr), source::SourceError> {
    let missing = || source::SourceError::Missing { path: path.to_path_buf() };
    let name = path.file_name().ok_or_else(missing)?;
    Ok((path.parent().unwrap_or(Path::new("")), name))
}

/// Reads the checkpoint at a path that the user typed, as [`checkpoint::open`] does, and also by the
/// name of its image, which is in the view of its directory and nowhere on disk.
pub fn open(
    path: &Path,
    options: &checkpoint::ParseOptions,
) -> Result<Checkpoint, checkpoint::CheckpointError> {
    open_file_or_shown(path, options).map_err(|error| match error {
        checkpoint::CheckpointError::Source(error) => error.or_dangling().into(),
        error => error,
    })
}

fn open_file_or_shown(
    path: &Path,
    options: &checkpoint::ParseOptions,
) -> Result<Checkpoint, checkpoint::CheckpointError> {
    match checkpoint::open(path, options) {
        Err(checkpoint::CheckpointError::Source(missing @ source::SourceError::Missing { .. })) => {
            let Ok((parent, name)) = split_parent(path) else { return Err(missing.into()) };
            let Ok((root, way)) = Root::for_directory(parent, options.link_policy()) else {
                return Err(missing.into());
            };
            match find_shown(&root, &way, name, &KeepRules::default()) {
                Ok(Some(candidate)) => checkpoint::open_candidate(&root, &way, &candidate, options),
                _ => Err(missing.into()),
            }
        }
        opened => opened,
    }
}
