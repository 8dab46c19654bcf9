//! Opens what the user named: a file, an index, a numbered set, or a directory that holds one.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use crate::source::{self, OpenFile, ReadAt, Root, UserPath, split_parent};
use crate::threads::{join, try_spawn};

use super::candidate::{Candidate, CandidateFiles, NumberedSetError};
use super::default_choice::{DefaultChoice, choose_default};
use super::discover::{
    find_candidates, is_complete_set, lone_shard_note, numbered_shards, sole_index,
    unsharded_name_of_index,
};
use super::index;
use super::json::replace_python_numbers;
use super::truncated_list::TruncatedList;
use super::{Checkpoint, CheckpointError, IndexError, ParseOptions, shards, sniff};

/// Reads the checkpoint at a path that the user typed.
///
/// A directory must hold just one, or one that loaders take before the others ([`choose_default`]); where it holds several,
/// the path of one of them tells which.
pub fn open(path: &Path, options: &ParseOptions) -> Result<Checkpoint, CheckpointError> {
    let links = options.link_policy();
    match UserPath::open(path) {
        Ok(UserPath::Directory) => {
            let (root, directory) = Root::for_directory(path, links)?;
            let names = root.file_names(&directory)?;
            if let Some(index) = sole_index(&names) {
                return open_numbered_index(&root, &directory, index, &names, options);
            }
            match choose_default(&root, &directory, &names) {
                Ok(DefaultChoice { candidate, note }) => {
                    let mut checkpoint = open_candidate(&root, &directory, &candidate, options)?;
                    checkpoint.notes.extend(note);
                    Ok(checkpoint)
                }
                Err(found) if found.is_empty() => {
                    Err(CheckpointError::NoCheckpoint { path: path.to_path_buf() })
                }
                Err(found) => {
                    let names = found.into_iter().map(|c| c.name).collect();
                    Err(CheckpointError::SeveralCheckpoints { path: path.to_path_buf(), names })
                }
            }
        }
        Ok(UserPath::File(file)) if unsharded_name_of_index(file_name(path)).is_none() => {
            open_file(file, file_name(path), options)
        }
        // A numbered set is called by a name that no file has, and the shards of an index lie beside it.
        Ok(UserPath::File(_)) | Err(source::SourceError::Missing { .. }) => {
            let (parent, name) = split_parent(path)?;
            let (root, directory) =
                Root::for_directory(parent, links).map_err(|error| match error {
                    source::SourceError::Missing { .. } => {
                        source::SourceError::Missing { path: path.to_path_buf() }
                    }
                    error => error,
                })?;
            open_by_name(&root, &directory, name, options)
        }
        Err(error) => Err(error.into()),
    }
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(OsStr::to_str).unwrap_or_default()
}

/// Reads the checkpoint that a name in a directory stands for: a file, an index, or a numbered set by
/// the name of the whole.
pub fn open_by_name(
    root: &Arc<Root>,
    directory: &Path,
    name: &OsStr,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let known = name.to_str().unwrap_or_default();
    if unsharded_name_of_index(known).is_some() {
        let names = root.file_names(directory)?;
        if names.iter().any(|name| name == known) {
            return open_numbered_index(root, directory, known, &names, options);
        }
    }
    match OpenFile::open_user_path_in_root(root, &directory.join(name)) {
        Ok(file) => open_file(file, known, options),
        Err(missing @ source::SourceError::Missing { .. }) => {
            let mut found = find_candidates(root, directory)?.into_iter();
            let set = found.find(|candidate| *candidate.name == *name).ok_or(missing)?;
            open_candidate(root, directory, &set, options)
        }
        Err(error) => Err(error.into()),
    }
}

/// Reads the set of an index of a directory, whose shards are most likely the files that are numbered so.
/// Where some of these are left over from another set, which of them are is not guessed.
fn open_numbered_index(
    root: &Arc<Root>,
    directory: &Path,
    index: &str,
    names: &[String],
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let set = numbered_shards(names, &unsharded_name_of_index(index).unwrap_or_default());
    let likely = if is_complete_set(&set) { &*set } else { &[] };
    open_index(root, directory, index, likely, &set, options)
}

/// Reads a candidate of a directory.
pub fn open_candidate(
    root: &Arc<Root>,
    directory: &Path,
    candidate: &Candidate,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    match &candidate.files {
        CandidateFiles::Single => {
            let file = OpenFile::open_in_root(root, &directory.join(&candidate.name))?;
            open_file(file, &candidate.name, options)
        }
        CandidateFiles::Indexed { shards, unindexed: beside } => {
            open_index(root, directory, &candidate.name, shards, beside, options)
        }
        CandidateFiles::Numbered { shards, total: of, error: Some(fault) } => {
            let path = root.path().join(directory);
            let name = |shard: Option<&String>| shard.cloned().unwrap_or_default();
            Err(match fault {
                NumberedSetError::MissingShard(first) => CheckpointError::IncompleteSet {
                    path,
                    missing: of.saturating_sub(shards.len() as u64),
                    of: *of,
                    first: first.clone(),
                },
                NumberedSetError::AmbiguousNumbering => CheckpointError::AmbiguousNumbering {
                    path,
                    of: *of,
                    first: name(shards.first()),
                    last: name(shards.last()),
                },
            })
        }
        CandidateFiles::Numbered { shards, .. } => {
            let path = root.path().join(directory).join(&candidate.name);
            let shards = shards::read_shards(root, directory, &path, shards, options);
            shards.map_err(|(_, error)| error)?.into_checkpoint(path, None)
        }
    }
}

fn open_file(
    file: OpenFile,
    name: &str,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let mut checkpoint = sniff::read_file(&file, options)?;
    checkpoint.open_file = Some(file);
    checkpoint.notes.extend(lone_shard_note(name));
    Ok(checkpoint)
}

/// Reads an index and its shards. Those that are likely are read while it is. Files that are of the set
/// by their names, and not by the index, are left out.
fn open_index(
    root: &Arc<Root>,
    directory: &Path,
    name: &str,
    likely: &[String],
    set: &[String],
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let file = OpenFile::open_in_root(root, &directory.join(name))?;
    let path = file.file().path();
    let fault = |fault| CheckpointError::Index { path: path.clone(), fault };
    let size = file.size();
    if size > index::MAX_INDEX_BYTES {
        return Err(fault(IndexError::TooLarge { size }));
    }
    let may_leave = options.follow_symlinks;
    let read = |shards: &[String]| shards::read_shards(root, directory, &path, shards, options);
    let read = &read;
    let mut checkpoint = std::thread::scope(|scope| {
        let are_inside = may_leave || !likely.iter().any(|shard| index::leads_outside(shard));
        let is_worth_it = are_inside && !likely.is_empty();
        let guessed = is_worth_it.then(|| try_spawn(scope, || read(likely))).flatten();
        let mut json = file.read_whole()?;
        replace_python_numbers(&mut json);
        let index = index::parse_index(&json, may_leave).map_err(fault)?;
        let shards = match guessed.map(join) {
            Some(shards) if index.shards() == likely => shards,
            others => {
                drop(others);
                read(index.shards())
            }
        };
        let shards = shards.map_err(|(shard, error)| match error {
            CheckpointError::Source(source::SourceError::Missing { .. }) => {
                fault(IndexError::MissingShard { shard })
            }
            error => error,
        })?;
        let mut checkpoint = shards.into_checkpoint(path.clone(), Some(&index))?;
        let beside = set.iter().filter(|name| index.shards().binary_search(name).is_err());
        let beside = TruncatedList::from_names(beside);
        if !beside.is_empty() {
            checkpoint.notes.push(format!("not named by the index and left out: {beside}"));
        }
        Ok::<_, CheckpointError>(checkpoint)
    })?;
    checkpoint.index_file = Some(Arc::clone(file.file()));
    file.check_unchanged()?;
    Ok(checkpoint)
}
