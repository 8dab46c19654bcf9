//! Opens what the user named: a file, an index, a numbered set, or a directory that holds one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::source::{self, Links, OpenFile, ReadAt, Root};
use crate::threads::{another, joined, together};

use super::group::{Candidate, Members, candidates, indexed, note_of_one};
use super::index::{self, Index};
use super::listed::Listed;
use super::{Checkpoint, Error, IndexFault, MAX_TENSORS, Options, Tensor, single};

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
        Members::Index { shards, beside } => {
            let mut checkpoint = open_index(root, directory, &candidate.name, shards, options)?;
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
            let parts = read_shards(root, directory, &path, shards, options);
            let parts = parts.map_err(|(_, error)| error)?;
            put_together(parts, path, None)
        }
    }
}

fn open_one(file: &OpenFile, name: &str, options: &Options) -> Result<Checkpoint, Error> {
    let mut checkpoint = single::read(file, options)?;
    checkpoint.notes.extend(note_of_one(name));
    Ok(checkpoint)
}

/// Reads an index and its shards. They are most likely those that it named a moment ago, and so they are
/// read while it is.
fn open_index(
    root: &Arc<Root>,
    directory: &Path,
    name: &str,
    likely: &[String],
    options: &Options,
) -> Result<Checkpoint, Error> {
    let file = root.open(&directory.join(name))?;
    let path = file.file().path();
    let fault = |fault| Error::Index { path: path.clone(), fault };
    let size = file.size();
    if size > index::MAX_INDEX {
        return Err(fault(IndexFault::TooLarge { size }));
    }
    let json = file.read_whole()?;
    let may_leave = options.follow_symlinks;
    let read = |shards: &[String]| read_shards(root, directory, &path, shards, options);
    let read = &read;
    let (index, parts) = std::thread::scope(|scope| {
        let are_inside = may_leave || !likely.iter().any(|shard| index::leaves(shard));
        let likely = are_inside.then(|| another(scope, || read(likely))).flatten();
        (index::parse(&json, may_leave), likely.map(joined))
    });
    let index = index.map_err(fault)?;
    let parts = match parts {
        Some(parts) if index.shards() == likely => parts,
        _ => read(index.shards()),
    };
    let parts = parts.map_err(|(shard, error)| match error {
        Error::Source(source::Error::Missing { .. }) => fault(IndexFault::Missing { shard }),
        error => error,
    })?;
    let mut checkpoint = put_together(parts, path.clone(), Some(&index))?;
    checkpoint.index = Some(Arc::clone(file.file()));
    file.check_unchanged()?;
    Ok(checkpoint)
}

/// Reads each shard by itself, in order; an error is that of the shard that is named.
fn read_shards(
    root: &Arc<Root>,
    directory: &Path,
    path: &Path,
    shards: &[String],
    options: &Options,
) -> Result<Vec<Checkpoint>, (String, Error)> {
    // Once one is refused none behind it is read.
    let (tensors, refused) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let read = |shard: &String| {
        let part = single::read(&root.open(&directory.join(shard))?, options)?;
        let all = tensors.fetch_add(part.tensors.len(), Relaxed) + part.tensors.len();
        let too_many = || Error::TooMany { path: path.to_path_buf(), limit: MAX_TENSORS };
        if all > MAX_TENSORS { Err(too_many()) } else { Ok(part) }
    };
    let numbered: Vec<(usize, &String)> = shards.iter().enumerate().collect();
    let parts = together(&numbered, READERS, |&(number, shard)| {
        let wanted = number < refused.load(Relaxed);
        let part = wanted.then(|| read(shard).map_err(|error| (shard.clone(), error)))?;
        if part.is_err() {
            refused.fetch_min(number, Relaxed);
        }
        Some(part)
    });
    parts.into_iter().flatten().collect()
}

/// Threads that read shards: most of it is waiting for a cold disk, the rest is for every core.
const READERS: usize = 8;

/// One checkpoint of shards, of which an index says what they hold, where there is one.
fn put_together(
    parts: Vec<Checkpoint>,
    path: PathBuf,
    index: Option<&Index<'_>>,
) -> Result<Checkpoint, Error> {
    let unnamed = agree(&parts, &path, index)?;
    let mut parts = parts.into_iter();
    let Some(mut whole) = parts.next() else {
        return Err(Error::Index { path, fault: IndexFault::Empty });
    };
    whole.tensors.reserve_exact(parts.as_slice().iter().map(|part| part.tensors.len()).sum());
    parts.for_each(|part| join(&mut whole, part));
    whole.sharded = true;
    whole.path = path;
    if !unnamed.is_empty() {
        let n = unnamed.len();
        whole.notes.push(format!(
            "in the shards and not in the index, kept ({n}): {}",
            Listed::of(&unnamed)
        ));
    }
    Ok(whole)
}

/// Makes sure that every name stands in one shard, and that all are there of which an index says so. Gives
/// the names of the tensors that it does not name.
fn agree(
    parts: &[Checkpoint],
    path: &Path,
    index: Option<&Index<'_>>,
) -> Result<Vec<String>, Error> {
    let holder = |name: &str| index.and_then(|index| index.holder(name));
    let places: Vec<usize> = (0..parts.len()).collect();
    // What lies where no index says it does: of each part the tensors, and what is refused.
    let others = together(&places, READERS, |&place| {
        let is_other = |name: &&str| holder(name) != Some(place);
        let (tensors, refused) = names_of(&parts[place]);
        let others: Others<'_> =
            (tensors.filter(is_other).collect(), refused.filter(is_other).collect());
        others
    });
    if let Some(index) = index {
        all_are_there(index, parts, &others)
            .map_err(|fault| Error::Index { path: path.to_path_buf(), fault })?;
    }
    let unnamed = others.iter().filter(|_| index.is_some()).flat_map(|(tensors, _)| tensors);
    let unnamed = unnamed.map(|&name| name.to_owned()).collect();
    let others = (0..).zip(others).flat_map(|(place, (tensors, refused))| {
        tensors.into_iter().chain(refused).map(move |name| (name, place))
    });
    let mut found = ByName::default();
    for (name, place) in others {
        let other = holder(name).unwrap_or_else(|| *found.entry(name).or_insert(place));
        if other != place {
            return Err(Error::Twice {
                path: parts[place.max(other)].path.clone(),
                tensor: name.to_owned(),
                other: parts[place.min(other)].path.clone(),
            });
        }
    }
    Ok(unnamed)
}

/// The names in a part that stand in another, or nowhere, by the index: tensors, and what is refused.
type Others<'a> = (Vec<&'a str>, Vec<&'a str>);

fn all_are_there(
    index: &Index<'_>,
    parts: &[Checkpoint],
    others: &[Others<'_>],
) -> Result<(), IndexFault> {
    for (place, (part, (tensors, refused))) in parts.iter().zip(others).enumerate() {
        let named = part.tensors.len() - tensors.len() + part.refused.len() - refused.len();
        if named < index.held_by(place) {
            let (tensors, refused) = names_of(part);
            let there: HashSet<&str> = tensors.chain(refused).collect();
            let missing = index.tensors_of(place).filter(|name| !there.contains(name)).min();
            return Err(IndexFault::NotThere {
                tensor: missing.unwrap_or_default().to_owned(),
                shard: index.shards()[place].clone(),
            });
        }
    }
    Ok(())
}

/// The names of a part's tensors, and of what of it is refused.
fn names_of(part: &Checkpoint) -> (impl Iterator<Item = &str>, impl Iterator<Item = &str>) {
    let tensors = part.tensors.iter().map(|tensor| &*tensor.name);
    (tensors, part.refused.iter().map(|refused| refused.name.as_str()))
}

/// By name, the place of its part.
type ByName<'a> = HashMap<&'a str, usize, foldhash::fast::RandomState>;

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
