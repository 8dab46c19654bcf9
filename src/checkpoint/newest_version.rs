//! Finds the newest version of a chain: a base, and the deltas beside it or in a list, as far as they can be applied.
//!
//! A delta that does not follow, cannot be parsed, or failed a checksum of this process ends the chain. The version before
//! it is the newest one then. Tensors are not read for the choice.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::source::{OpenFile, Root, SourceError};

use super::contents::Checkpoint;
use super::damaged_deltas::find_damage;
use super::delta_error::DeltaError;
use super::delta_index::{VERSION_INDEX_NAME, parse_delta_metadata};
use super::directory::{MAX_CHAIN_DELTAS, parse_version_name, read_index, version_name};
use super::error::CheckpointError;
use super::open::open_by_name;
use super::options::ParseOptions;
use super::shard_index::shard_names;

/// A small full version is this file alone, without an index. Deltas have numbered files.
const FULL_FILE_NAME: &str = "model.safetensors";

/// A base, and the versions that may follow it. Paths are from the root.
#[derive(Clone, Copy, Debug)]
pub struct DeltaVersions<'a> {
    /// A version, or the model that training began with, which is version 0.
    pub base: &'a Path,
    /// The folders of the versions, in order; `None` for all beside the base.
    pub listed: Option<&'a [PathBuf]>,
}

/// The newest version, and why there is no newer one.
#[derive(Debug)]
pub struct NewestVersion {
    /// The version, or the base itself if none follows it.
    pub checkpoint: Checkpoint,
    /// Why a newer version is not shown.
    pub withheld: Option<CheckpointError>,
}

/// The version in the name of a folder; 0 if it is the model that training began with.
pub fn version_of_folder(folder: &Path) -> u64 {
    let name = folder.file_name().and_then(|name| name.to_str());
    name.and_then(parse_version_name).unwrap_or(0)
}

/// The folder of a version, and what its index is.
struct FollowingVersion {
    folder: PathBuf,
    index: FollowingIndex,
}

enum FollowingIndex {
    /// That of a delta, with the names of its files.
    Delta(Vec<String>),
    /// That of a full version.
    Full,
    /// It is not written yet.
    Missing,
}

/// Opens the newest version that follows a base. `open_base` opens the base itself.
pub fn open_newest(
    root: &Arc<Root>,
    versions: DeltaVersions<'_>,
    options: &ParseOptions,
    open_base: &dyn Fn() -> Result<Checkpoint, CheckpointError>,
) -> Result<NewestVersion, CheckpointError> {
    let found = find_versions(root, versions)?;
    let is_delta = |version: &&FollowingVersion| matches!(version.index, FollowingIndex::Delta(_));
    let mut count = found.iter().take_while(is_delta).count();
    let mut withheld = find_gap(root, &found, count);
    let mut options = options.clone();
    if version_of_folder(versions.base) == 0 {
        options.delta_base = Some(root.real_path().join(versions.base));
    }
    while let Some(newest) = count.checked_sub(1).and_then(|last| found.get(last)) {
        let opened = open_by_name(root, &newest.folder, VERSION_INDEX_NAME.as_ref(), &options);
        let opened = opened.and_then(|checkpoint| match find_damage(&checkpoint) {
            Some(damage) => Err(damage.into()),
            None => Ok(checkpoint),
        });
        match opened {
            Ok(checkpoint) => return Ok(NewestVersion { checkpoint, withheld }),
            Err(error) if is_of_version(&error) => {
                count = match version_at_fault(root, &found[..count], error.path()) {
                    Some(version) => version,
                    None => {
                        // The base may be at fault, and then no version can be shown.
                        open_base()?;
                        count - 1
                    }
                };
                withheld = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(NewestVersion { checkpoint: open_base()?, withheld })
}

/// The paths from the root whose state decides which version is the newest, and what it holds. Those of the base are not
/// among them.
pub fn newest_version_paths(root: &Arc<Root>, versions: DeltaVersions<'_>) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    if versions.listed.is_none() {
        paths.push(folder_of_versions(versions.base));
    }
    for FollowingVersion { folder, index } in find_versions(root, versions).unwrap_or_default() {
        paths.push(folder.join(VERSION_INDEX_NAME));
        if let FollowingIndex::Delta(files) = index {
            paths.extend(files.into_iter().map(|file| folder.join(file)));
        }
        paths.push(folder);
    }
    paths
}

/// Whether an error lies in a version, rather than in the machine or the store.
fn is_of_version(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::Source(error) => {
            matches!(error, SourceError::Missing { .. }) || error.is_refusal() && !error.may_pass()
        }
        error => error.is_refusal(),
    }
}

/// The version that a path lies in.
fn version_at_fault(root: &Root, versions: &[FollowingVersion], path: &Path) -> Option<usize> {
    let is_at_fault =
        |version: &FollowingVersion| path.starts_with(root.shown_path(&version.folder));
    versions.iter().position(is_at_fault)
}

/// Why the version after the first `count` does not follow them, if there is one.
fn find_gap(root: &Root, found: &[FollowingVersion], count: usize) -> Option<CheckpointError> {
    let next = found.get(count)?;
    let (path, version) = (root.shown_path(&next.folder), version_of_folder(&next.folder));
    let error = match next.index {
        FollowingIndex::Full => DeltaError::FullVersion { version, folder: version_name(version) },
        _ => {
            // A version that is being written is no error, unless a later one is there already.
            let is_later =
                |later: &&FollowingVersion| !matches!(later.index, FollowingIndex::Missing);
            let later = found[count..].iter().find(is_later)?;
            let version = version_of_folder(&later.folder);
            let index = root.shown_path(&later.folder.join(VERSION_INDEX_NAME));
            let error = DeltaError::MissingVersion { version, folder: path };
            return Some(CheckpointError::Delta { path: index, error: Box::new(error) });
        }
    };
    let path = path.join(VERSION_INDEX_NAME);
    Some(CheckpointError::Delta { path, error: Box::new(error) })
}

/// The versions that may follow a base, in order. Beside the base, a missing version counts only before a later one.
fn find_versions(
    root: &Arc<Root>,
    versions: DeltaVersions<'_>,
) -> Result<Vec<FollowingVersion>, CheckpointError> {
    let folders = match versions.listed {
        Some(folders) => folders.to_vec(),
        None => folders_beside(root, versions.base)?,
    };
    // A longer chain is refused when it is opened.
    let folders = folders.into_iter().take(MAX_CHAIN_DELTAS + 1);
    let find = |folder: PathBuf| {
        let index = read_following(root, &folder)?;
        Ok(FollowingVersion { folder, index })
    };
    folders.map(find).collect()
}

fn folder_of_versions(base: &Path) -> PathBuf {
    base.parent().map(Path::to_path_buf).unwrap_or_default()
}

/// The folders of all versions from the one after a base to the last that lies beside it.
fn folders_beside(root: &Root, base: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let (parent, first) = (folder_of_versions(base), version_of_folder(base).saturating_add(1));
    let entries = root.entries(&parent)?;
    let numbers = entries.iter().filter_map(|entry| parse_version_name(entry.name.to_str()?));
    let Some(last) = numbers.filter(|&version| version >= first).max() else {
        return Ok(Vec::new());
    };
    let mut versions: Vec<u64> = (first..=last).take(MAX_CHAIN_DELTAS).collect();
    // The last one tells that those before it are missing.
    if versions.last() != Some(&last) {
        versions.push(last);
    }
    Ok(versions.into_iter().map(|version| parent.join(version_name(version))).collect())
}

fn read_following(root: &Arc<Root>, folder: &Path) -> Result<FollowingIndex, CheckpointError> {
    let file = match OpenFile::open_in_root(root, &folder.join(VERSION_INDEX_NAME)) {
        Ok(file) => file,
        Err(error) if error.may_pass() => return Err(error.into()),
        Err(SourceError::Missing { .. }) => {
            let is_full = OpenFile::open_in_root(root, &folder.join(FULL_FILE_NAME)).is_ok();
            return Ok(if is_full { FollowingIndex::Full } else { FollowingIndex::Missing });
        }
        // What is wrong with an index is found when it is opened.
        Err(_) => return Ok(FollowingIndex::Delta(Vec::new())),
    };
    let Some(json) = read_index(&file)? else { return Ok(FollowingIndex::Delta(Vec::new())) };
    match parse_delta_metadata(&json) {
        Ok(None) => Ok(FollowingIndex::Full),
        // What is wrong with an index is found when it is opened.
        Ok(Some(_)) | Err(_) => Ok(FollowingIndex::Delta(shard_names(&json).unwrap_or_default())),
    }
}
