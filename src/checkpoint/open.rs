//! Opens a path: a file, an index, a numbered set, or a directory that has one of them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::source::{
    FileBytes, FileKind, LinkPolicy, OpenFile, ReadAt, Root, SourceError, UserPath, is_source_url,
    split_parent,
};
use crate::threads::{join, try_spawn};

use super::contents::Checkpoint;
use super::delta::{DeltaVersion, holds_changes, read_version, refuse_without_index};
use super::delta_index::parse_delta_metadata;
use super::directory::{
    Candidate, CandidateFiles, DefaultChoice, NumberedSetError, candidates_among, choose_default,
    find_candidates, is_complete_set, lone_shard_note, numbered_shards, sole_index,
    unsharded_name_of_index,
};
use super::error::CheckpointError;
use super::json::replace_python_numbers;
use super::no_choice::{no_choice_error, pointer_error};
use super::options::ParseOptions;
use super::shard_index::{IndexError, MAX_INDEX_BYTES, leads_outside, parse_index};
use super::shards::read_shards;
use super::single_file::read_file;
use super::training::read_training_folder;
use super::truncated_list::TruncatedList;

/// Reads the checkpoint at a path that the user typed.
///
/// A directory must have one checkpoint, or one that loaders prefer ([`choose_default`]). Otherwise the user names one
/// by its own path.
pub fn open(path: &Path, options: &ParseOptions) -> Result<Checkpoint, CheckpointError> {
    let links = options.link_policy();
    match UserPath::open(path) {
        Ok(UserPath::Directory) => {
            let (root, directory) = Root::for_directory(path, links)?;
            let names = root.file_names(&directory)?;
            let found = match open_directory(&root, &directory, &names, options) {
                Ok(opened) => return opened,
                Err(found) => found,
            };
            match find_in_parent(path, links).filter(|_| found.is_empty()) {
                Some((root, directory, candidate)) => {
                    open_candidate(&root, &directory, &candidate, options)
                }
                None => Err(no_choice(&root, &directory, path, &names, found, options)),
            }
        }
        Ok(UserPath::File(file)) if unsharded_name_of_index(&file_name(path)).is_none() => {
            let name = &*file_name(path);
            open_file(file, name, options).map_err(|error| pointer_error(name, error))
        }
        // No file has the name of a numbered set. The shards of an index lie beside it.
        Ok(UserPath::File(_)) | Err(SourceError::Missing { .. }) => {
            let (parent, name) = split_parent(path)?;
            let (root, directory) =
                Root::for_directory(&parent, links).map_err(|error| match error {
                    SourceError::Missing { .. } => {
                        SourceError::Missing { path: path.to_path_buf() }
                    }
                    error => error,
                })?;
            match open_by_name(&root, &directory, &name, options) {
                Err(CheckpointError::Source(error @ SourceError::Missing { .. })) => {
                    let found = find_in_parent(&parent, links);
                    match found.filter(|(.., candidate)| OsStr::new(&*candidate.name) == &*name) {
                        Some((root, directory, candidate)) => {
                            open_candidate(&root, &directory, &candidate, options)
                        }
                        None => Err(error.with_typed_path(path).into()),
                    }
                }
                Err(CheckpointError::Source(error)) => Err(error.with_typed_path(path).into()),
                opened => opened,
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// Reads the checkpoint that a directory stands for, or returns the candidates of which none is the obvious one.
fn open_directory(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
    options: &ParseOptions,
) -> Result<Result<Checkpoint, CheckpointError>, Vec<Candidate>> {
    if let Some(index) = sole_index(names) {
        return Ok(open_numbered_index(root, directory, index, names, options));
    }
    let DefaultChoice { candidate, note } = choose_default(root, directory, names)?;
    let opened = open_candidate(root, directory, &candidate, options);
    Ok(opened.map(|mut checkpoint| {
        checkpoint.notes.extend(note);
        checkpoint
    }))
}

/// Why a directory stands for no checkpoint, given the candidates in it.
fn no_choice(
    root: &Arc<Root>,
    directory: &Path,
    path: &Path,
    names: &[String],
    found: Vec<Candidate>,
    options: &ParseOptions,
) -> CheckpointError {
    let opens = |candidate: &Candidate| {
        open_candidate(root, directory, candidate, options)
            .map(|checkpoint| checkpoint.refused.is_empty())
    };
    no_choice_error(root, directory, path, names, found, &opens)
}

/// The candidate that a directory inside a root stands for.
pub fn choose_in_directory(
    root: &Arc<Root>,
    directory: &Path,
) -> Result<Candidate, CheckpointError> {
    let names = root.file_names(directory)?;
    choose_default(root, directory, &names).map(|choice| choice.candidate).map_err(|found| {
        let opens = |_: &Candidate| Ok(true);
        let path = root.shown_path(directory);
        no_choice_error(root, directory, &path, &names, found, &opens)
    })
}

/// The checkpoint that a directory shows although its files lie in the parent directory, as verl's do. The root is the
/// parent then, as in a mount of it: links stay beneath that.
fn find_in_parent(directory: &Path, links: LinkPolicy) -> Option<(Arc<Root>, PathBuf, Candidate)> {
    let typed = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let real_path = match is_source_url(typed) {
        true => typed.to_path_buf(),
        false => std::fs::canonicalize(typed).ok()?,
    };
    let (parent, name) = split_parent(&real_path).ok()?;
    let (root, parent) = Root::for_directory(&parent, links).ok()?;
    let directory = parent.join(name);
    let is_above = |candidate: &Candidate| match &candidate.files {
        CandidateFiles::Ranks(folder) => folder.is_in_parent(),
        _ => false,
    };
    let mut found = find_candidates(&root, &directory).ok()?.into_iter().filter(is_above);
    let candidate = found.next()?;
    Some((root, directory, candidate))
}

fn file_name(path: &Path) -> String {
    let name = split_parent(path).map(|(_, name)| name.to_string_lossy().into_owned());
    name.unwrap_or_default()
}

/// Reads the checkpoint of a name in a directory: a file, an index, or a numbered set without its numbers.
pub fn open_by_name(
    root: &Arc<Root>,
    directory: &Path,
    name: &OsStr,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let text = name.to_str().unwrap_or_default();
    if unsharded_name_of_index(text).is_some() {
        match root.listed_file_names(directory)? {
            Some(names) if names.iter().any(|name| name == text) => {
                return open_numbered_index(root, directory, text, &names, options);
            }
            // The index alone names its shards.
            None => return open_index(root, directory, text, &[], &[], options),
            Some(_) => {}
        }
    }
    match OpenFile::open_user_path_in_root(root, &directory.join(name)) {
        Ok(file) => open_file(file, text, options),
        Err(missing @ SourceError::Missing { .. }) => {
            let names = root.listed_file_names(directory)?.unwrap_or_default();
            let mut found = candidates_among(root, directory, &names).into_iter();
            let set = found.find(|candidate| *candidate.name == *name).ok_or(missing)?;
            open_candidate(root, directory, &set, options)
        }
        Err(error) => Err(error.into()),
    }
}

/// Reads an index of a directory and its shards, which are most likely the numbered files of its name. If some of those
/// are left over from another set, the shards are not guessed.
fn open_numbered_index(
    root: &Arc<Root>,
    directory: &Path,
    index: &str,
    names: &[String],
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let numbered = numbered_shards(names, &unsharded_name_of_index(index).unwrap_or_default());
    let likely = if is_complete_set(&numbered) { &*numbered } else { &[] };
    open_index(root, directory, index, likely, &numbered, options)
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
        CandidateFiles::Indexed { shards, unindexed } => {
            open_index(root, directory, &candidate.name, shards, unindexed, options)
        }
        CandidateFiles::Delta { .. } => {
            open_index(root, directory, &candidate.name, &[], &[], options)
        }
        CandidateFiles::Numbered { shards, total, error: Some(error) } => {
            let path = root.shown_path(directory);
            let name = |shard: Option<&String>| shard.cloned().unwrap_or_default();
            Err(match error {
                NumberedSetError::MissingShard(first) => CheckpointError::IncompleteSet {
                    path,
                    missing: total.saturating_sub(shards.len() as u64),
                    total: *total,
                    first: first.clone(),
                },
                NumberedSetError::AmbiguousNumbering => CheckpointError::AmbiguousNumbering {
                    path,
                    total: *total,
                    first: name(shards.first()),
                    last: name(shards.last()),
                },
            })
        }
        CandidateFiles::Ranks(folder) => {
            let path = root.shown_path(&directory.join(&candidate.name));
            read_training_folder(root, directory, path, folder, options)
        }
        CandidateFiles::Numbered { shards, .. } => {
            let path = root.shown_path(&directory.join(&candidate.name));
            let shards = read_shards(root, directory, &path, shards, options);
            refuse_without_index(shards.map_err(|(_, error)| error)?.into_checkpoint(path, None)?)
        }
    }
}

fn open_file(
    file: OpenFile,
    name: &str,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let mut checkpoint = read_file(&file, options)?;
    checkpoint.open_file = Some(file);
    checkpoint.notes.extend(lone_shard_note(name));
    if holds_changes(&checkpoint) {
        checkpoint
            .notes
            .push("its tensors are compressed changes of a delta; give its folder".to_owned());
    }
    Ok(checkpoint)
}

/// Reads an index and its shards. The likely shards are read at the same time as the index.
///
/// Numbered files of its name that the index does not name are left out.
fn open_index(
    root: &Arc<Root>,
    directory: &Path,
    name: &str,
    likely: &[String],
    numbered: &[String],
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let file = OpenFile::open_in_root(root, &directory.join(name))?;
    let path = file.file().path();
    let index_error = |error| CheckpointError::Index { path: path.clone(), error };
    let size = file.size();
    if size > MAX_INDEX_BYTES {
        return Err(index_error(IndexError::TooLarge { size }));
    }
    let may_lead_outside = options.follow_symlinks;
    let read_all = |shards: &[String]| read_shards(root, directory, &path, shards, options);
    let read_all = &read_all;
    let read = std::thread::scope(|scope| {
        let are_inside = may_lead_outside || !likely.iter().any(|shard| leads_outside(shard));
        let should_guess = are_inside && !likely.is_empty();
        let guessed = should_guess.then(|| try_spawn(scope, || read_all(likely))).flatten();
        let mut json = file.read_whole()?;
        replace_python_numbers(&mut json);
        if !matches!(parse_delta_metadata(&json), Ok(None)) {
            return Ok(Err(json));
        }
        let index = parse_index(&json, may_lead_outside).map_err(index_error)?;
        let shards = match guessed.map(join) {
            Some(shards) if index.shards() == likely => shards,
            unusable => {
                drop(unusable);
                read_all(index.shards())
            }
        };
        let shards = shards.map_err(|(shard, error)| match error {
            CheckpointError::Source(SourceError::Missing { .. }) => {
                index_error(IndexError::MissingShard { shard })
            }
            error => error,
        })?;
        let mut checkpoint = shards.into_checkpoint(path.clone(), Some(&index))?;
        let unnamed = numbered.iter().filter(|name| index.shards().binary_search(name).is_err());
        let unnamed = TruncatedList::from_names(unnamed);
        if !unnamed.is_empty() {
            checkpoint.notes.push(format!("not named by the index and left out: {unnamed}"));
        }
        Ok::<_, CheckpointError>(Ok(checkpoint))
    })?;
    let mut checkpoint = match read {
        Ok(checkpoint) => checkpoint,
        Err(json) => return open_delta(root, directory, file, json, options),
    };
    checkpoint.index_files = vec![Arc::clone(file.file())];
    file.check_unchanged()?;
    Ok(checkpoint)
}

/// Reads a version that is a delta, by its index.
fn open_delta(
    root: &Arc<Root>,
    directory: &Path,
    file: OpenFile,
    json: FileBytes,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let path = file.file().path();
    let Some(index) = DeltaVersion::parse(file, json)? else {
        return Err(CheckpointError::Index { path, error: IndexError::NoShards });
    };
    // The base of the first delta cannot be a delta on itself.
    let base_options = options.without_delta_base();
    let open_folder = |root: &Arc<Root>, folder: &Path| {
        let names = root.file_names(folder)?;
        open_directory(root, folder, &names, &base_options).unwrap_or_else(|found| {
            let path = root.shown_path(folder);
            Err(no_choice(root, folder, &path, &names, found, &base_options))
        })
    };
    let open_path = |path: &Path| match root.path_inside(path) {
        // A mount may lie over the root: opened by its path, its daemon would ask itself.
        Some(inside)
            if root.metadata(inside).is_ok_and(|found| found.kind == FileKind::Directory) =>
        {
            open_folder(root, inside)
        }
        Some(inside) => {
            let parent = inside.parent().unwrap_or(Path::new(""));
            open_by_name(root, parent, inside.file_name().unwrap_or_default(), &base_options)
        }
        None => open(path, &base_options),
    };
    read_version(root, directory, index, options, &open_folder, &open_path)
}
