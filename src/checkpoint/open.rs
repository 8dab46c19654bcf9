//! Opens what the user named: a file, an index, a numbered set, or a directory that holds one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::source::{self, Links, OpenFile, ReadAt, Root};
use crate::threads::together;

use super::group::{Candidate, Members, candidates, indexed, note_of_one};
use super::listed::Listed;
use super::{Checkpoint, Error, IndexFault, MAX_TENSORS, Options, Tensor, index, single};

/// Reads the checkpoint at a path that the user typed.
///
/// A directory must hold just one; where it holds several, the path of one of them tells which.
pub fn open(path: &Path, options: &Options) -> Result<Checkpoint, Error> {
    let links = if options.follow_symlinks { Links::Anywhere } else { Links::Inside };
    match source::is_directory(path) {
        Ok(true) => {
            let (root, directory) = Root::around(path, links)?;
            let mut found = candidates(&root, &directory)?;
            match found.pop() {
                None => Err(Error::None { path: path.to_path_buf() }),
                Some(candidate) if found.is_empty() => {
                    open_candidate(&root, &directory, &candidate, options)
                }
                Some(last) => {
                    found.push(last);
                    let names = found.into_iter().map(|c| c.name).collect();
                    Err(Error::Several { path: path.to_path_buf(), names })
                }
            }
        }
        // A numbered set is called by a name that no file has.
        Ok(false) | Err(source::Error::Missing { .. }) => {
            let missing = || source::Error::Missing { path: path.to_path_buf() };
            let name = path.file_name().ok_or_else(missing)?;
            let parent = path.parent().unwrap_or(Path::new(""));
            let (root, directory) = Root::around(parent, links).map_err(|error| match error {
                source::Error::Missing { .. } => missing(),
                error => error,
            })?;
            open_in(&root, &directory, name, options)
        }
        Err(error) => Err(error.into()),
    }
}

/// Reads the checkpoint that a name in a directory stands for: a file, an index, or a numbered set by
/// the name of the whole.
pub fn open_in(
    root: &Arc<Root>,
    directory: &Path,
    name: &OsStr,
    options: &Options,
) -> Result<Checkpoint, Error> {
    let known = name.to_str().unwrap_or_default();
    let set = || -> Result<Option<Candidate>, Error> {
        Ok(candidates(root, directory)?.into_iter().find(|c| *c.name == *name))
    };
    if indexed(known).is_some()
        && let Some(candidate) = set()?
    {
        return open_candidate(root, directory, &candidate, options);
    }
    match root.open_typed(&directory.join(name)) {
        Ok(file) => open_one(&file, known, options),
        Err(missing @ source::Error::Missing { .. }) => {
            open_candidate(root, directory, &set()?.ok_or(missing)?, options)
        }
        Err(error) => Err(error.into()),
    }
}

/// Reads a candidate of a directory.
pub fn open_candidate(
    root: &Arc<Root>,
    directory: &Path,
    candidate: &Candidate,
    options: &Options,
) -> Result<Checkpoint, Error> {
    match &candidate.members {
        Members::File => {
            let file = root.open(&directory.join(&candidate.name))?;
            open_one(&file, &candidate.name, options)
        }
        Members::Index { beside, .. } => {
            let mut checkpoint = open_index(root, directory, &candidate.name, options)?;
            if !beside.is_empty() {
                let note = format!("not named by the index and left out: {}", Listed::of(beside));
                checkpoint.notes.push(note);
            }
            Ok(checkpoint)
        }
        Members::Numbered { shards, of, missing: Some(first) } => Err(Error::Incomplete {
            path: root.path().join(directory),
            missing: of.saturating_sub(shards.len() as u64),
            of: *of,
            first: first.clone(),
        }),
        Members::Numbered { shards, .. } => {
            let path = root.path().join(directory).join(&candidate.name);
            let shards = shards.iter().map(|shard| (shard.clone(), None)).collect();
            open_shards(root, directory, path, shards, options)
        }
    }
}

fn open_one(file: &OpenFile, name: &str, options: &Options) -> Result<Checkpoint, Error> {
    let mut checkpoint = single::read(file, options)?;
    checkpoint.notes.extend(note_of_one(name));
    Ok(checkpoint)
}

fn open_index(
    root: &Arc<Root>,
    directory: &Path,
    name: &str,
    options: &Options,
) -> Result<Checkpoint, Error> {
    let file = root.open(&directory.join(name))?;
    let path = file.file().path();
    let fault = |fault| Error::Index { path: path.clone(), fault };
    let size = file.size();
    if size > index::MAX_INDEX {
        return Err(fault(IndexFault::TooLarge { size }));
    }
    let mut json = vec![0; size as usize];
    file.read_exact_at(&mut json, 0)?;
    let shards = index::parse(&json, options.follow_symlinks).map_err(fault)?;
    drop(json);
    let shards = shards.into_iter().map(|(shard, tensors)| (shard, Some(tensors))).collect();
    let mut checkpoint = open_shards(root, directory, path.clone(), shards, options)?;
    checkpoint.index = Some(Arc::clone(file.file()));
    file.check_unchanged()?;
    Ok(checkpoint)
}

/// Shards, each with the tensors that an index says it holds, where there is an index.
type Shards = Vec<(String, Option<Vec<String>>)>;

fn open_shards(
    root: &Arc<Root>,
    directory: &Path,
    path: PathBuf,
    shards: Shards,
    options: &Options,
) -> Result<Checkpoint, Error> {
    let index_fault = |fault| Error::Index { path: path.clone(), fault };
    let mut whole: Option<Checkpoint> = None;
    let mut unnamed: Vec<String> = Vec::new();
    // Which file, by its place in `files`, has which name: shown or refused.
    let mut holders: HashMap<Box<str>, u32> = HashMap::new();
    let mut files: Vec<PathBuf> = Vec::new();
    let read = |shard: &str| {
        let file = root.open(&directory.join(shard))?;
        single::read(&file, options)
    };
    let reads =
        shards.chunks(TOGETHER).flat_map(|shards| together(shards, READERS, |(s, _)| read(s)));
    for (number, (read, (shard, expected))) in (0u32..).zip(reads.zip(&shards)) {
        let part = match read {
            Err(Error::Source(source::Error::Missing { .. })) if expected.is_some() => {
                return Err(index_fault(IndexFault::Missing { shard: shard.clone() }));
            }
            read => read?,
        };
        let refused = part.refused.iter().map(|r| r.name.as_str());
        let names: HashSet<&str> = part.tensors.iter().map(|t| &*t.name).chain(refused).collect();
        if let Some(expected) = expected {
            if let Some(tensor) = expected.iter().find(|tensor| !names.contains(tensor.as_str())) {
                let (tensor, shard) = (tensor.clone(), shard.clone());
                return Err(index_fault(IndexFault::NotThere { tensor, shard }));
            }
            if expected.len() < names.len() {
                let expected: HashSet<&str> = expected.iter().map(String::as_str).collect();
                let extra = part.tensors.iter().filter(|t| !expected.contains(&*t.name));
                unnamed.extend(extra.map(|t| t.name.to_string()));
            }
        }
        for name in names {
            if let Some(first) = holders.insert(name.into(), number) {
                let other = files[first as usize].clone();
                let tensor = name.to_owned();
                return Err(Error::Twice { path: part.path, tensor, other });
            }
        }
        files.push(part.path.clone());
        match &mut whole {
            None => whole = Some(part),
            Some(whole) => join(whole, part),
        }
    }
    let mut whole = whole.ok_or_else(|| index_fault(IndexFault::Empty))?;
    whole.sharded = true;
    whole.path = path;
    if whole.tensors.len() > MAX_TENSORS {
        return Err(Error::TooMany { path: whole.path, limit: MAX_TENSORS });
    }
    if !unnamed.is_empty() {
        let n = unnamed.len();
        whole.notes.push(format!(
            "in the shards and not in the index, kept ({n}): {}",
            Listed::of(&unnamed)
        ));
    }
    Ok(whole)
}

/// Shards that are read before the first of them is looked at: a set with a fault in it costs no more
/// than so many too many.
const TOGETHER: usize = 32;

/// Threads that read shards: most of it is waiting for a cold disk, the rest is for every core.
const READERS: usize = 8;

/// Adds a shard to those before it.
fn join(whole: &mut Checkpoint, part: Checkpoint) {
    let by = whole.origins.len() as u32;
    whole.origins.extend(part.origins);
    whole.tensors.extend(part.tensors.into_iter().map(|mut tensor: Tensor| {
        tensor.bytes.shift_origin(by);
        tensor
    }));
    whole.refused.extend(part.refused);
    for note in part.notes {
        if !whole.notes.contains(&note) {
            whole.notes.push(note);
        }
    }
    join_metadata(&mut whole.metadata, part.metadata, &mut whole.notes);
}

fn join_metadata(
    whole: &mut BTreeMap<String, String>,
    part: BTreeMap<String, String>,
    notes: &mut Vec<String>,
) {
    for (key, value) in part {
        match whole.get(&key) {
            None => drop(whole.insert(key, value)),
            Some(first) if *first == value => {}
            Some(_) => {
                let note =
                    format!("metadata `{key}` differs between shards: that of the first is kept");
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
        }
    }
}
