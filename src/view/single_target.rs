//! Finds the files of one checkpoint by its path. The path has its own name, or the name of the virtual file that its
//! directory shows.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{
    self, Candidate, CandidateFiles, Checkpoint, CheckpointError, ParseOptions, candidates_by_name,
    is_training_file,
};
use crate::source::{OpenFile, Root, SourceError, split_parent};

use super::directory_plan::{SingleTarget, plan_directory};
use super::options::KeepRules;
use super::rules::PlanSource;

/// Parses the checkpoint at a path that the user typed, as [`checkpoint::open`] does. Also takes the path of
/// its virtual file, which is in the view of its directory and nowhere on disk.
pub fn open(path: &Path, options: &ParseOptions) -> Result<Checkpoint, CheckpointError> {
    open_file_or_shown(path, options).map_err(|error| match error {
        CheckpointError::Source(error) => error.or_dangling().into(),
        error => error,
    })
}

fn open_file_or_shown(path: &Path, options: &ParseOptions) -> Result<Checkpoint, CheckpointError> {
    match checkpoint::open(path, options) {
        Err(CheckpointError::Source(missing @ SourceError::Missing { .. })) => {
            let Ok((parent, name)) = split_parent(path) else { return Err(missing.into()) };
            let Ok((root, directory)) = Root::for_directory(&parent, options.link_policy()) else {
                return Err(missing.into());
            };
            match find_shown(&root, &directory, &name, &KeepRules::default()) {
                Ok(Some(candidate)) => {
                    checkpoint::open_candidate(&root, &directory, &candidate, options)
                }
                _ => Err(missing.into()),
            }
        }
        opened => opened,
    }
}

/// Resolves a name in a directory. It may be that of a file, of a set (its index, or the name of the whole), or of a
/// virtual file.
pub fn resolve(
    root: &Arc<Root>,
    directory: &Path,
    name: &OsStr,
    keep: &KeepRules,
) -> Result<SingleTarget, SourceError> {
    let files = |candidate: &Candidate| {
        SingleTarget::Files(candidate.original_names().into_iter().map(OsString::from).collect())
    };
    let names = root.file_names(directory)?;
    let candidates = candidates_by_name(root, directory, &names, &is_training_file);
    if let Some(set) =
        candidates.iter().find(|c| c.files != CandidateFiles::Single && *c.name == *name)
    {
        return Ok(files(set));
    }
    match OpenFile::open_user_path_in_root(root, &directory.join(name)) {
        Ok(_) => Ok(SingleTarget::File(name.to_owned())),
        Err(missing @ SourceError::Missing { .. }) => {
            find_shown(root, directory, name, keep)?.as_ref().map(files).ok_or(missing)
        }
        Err(error) => Err(error),
    }
}

/// The checkpoint that the view of a directory shows by a name, if any.
pub fn find_shown(
    root: &Arc<Root>,
    directory: &Path,
    name: &OsStr,
    keep: &KeepRules,
) -> Result<Option<Candidate>, SourceError> {
    let plan = plan_directory(root, directory, keep, None)?;
    let found = plan.files.into_iter().find(|file| *file.name == *name);
    Ok(found.and_then(|file| match file.source {
        PlanSource::Candidate(candidate) => Some(candidate),
        PlanSource::Recipe(_) => None,
    }))
}
