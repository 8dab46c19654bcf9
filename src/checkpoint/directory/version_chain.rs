//! Versions of a model that a trainer writes one after the other, into folders `weight_v000001` and on. Each is full, or
//! a delta on the version before it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::delta_index::{VERSION_INDEX_NAME, parse_delta_metadata};
use crate::checkpoint::json::replace_python_numbers;
use crate::checkpoint::shard_index::{MAX_INDEX_BYTES, shard_names};
use crate::source::{FileBytes, OpenFile, ReadAt, Root, SourceError, split_parent};

use super::candidate::BaseVersion;
use super::shard_name::{has_checkpoint_extension, unsharded_name_of_index};

/// Maximum deltas of a chain. Each keeps at least one file open, and adds to each read of a tensor that it changes.
pub const MAX_CHAIN_DELTAS: usize = 256;

const VERSION_PREFIX: &str = "weight_v";

/// The name of the folder of a version.
pub fn version_name(version: u64) -> String {
    format!("{VERSION_PREFIX}{version:06}")
}

/// The version in the name of a folder.
pub fn parse_version_name(name: &str) -> Option<u64> {
    let version = name.strip_prefix(VERSION_PREFIX)?.parse().ok()?;
    (version_name(version) == name).then_some(version)
}

/// The place of a version's folder, beside which the others lie.
#[derive(Clone, Debug)]
pub struct VersionPlace {
    /// The root in which all versions lie.
    pub root: Arc<Root>,
    /// The path from the root to the folder of all versions.
    pub parent: PathBuf,
    /// The version in the name of the folder.
    pub version: u64,
}

impl VersionPlace {
    /// The place of a folder in a root; `None` if its name is not that of a version. The root may be the folder itself:
    /// then the root of all versions is the directory above it.
    pub fn locate(root: &Arc<Root>, directory: &Path) -> Option<VersionPlace> {
        let resolved = root.resolve_by_name(directory)?.path;
        let number = |path: &Path| parse_version_name(path.file_name()?.to_str()?);
        if let Some(parent) = resolved.parent() {
            let (root, parent) = (Arc::clone(root), parent.to_path_buf());
            return Some(VersionPlace { root, parent, version: number(&resolved)? });
        }
        let (parent, name) = split_parent(root.real_path()).ok()?;
        let version = number(Path::new(&*name))?;
        let (root, parent) = Root::for_directory(&parent, root.link_policy()).ok()?;
        Some(VersionPlace { root, parent, version })
    }

    /// The path from the root to the folder of a version.
    pub fn folder(&self, version: u64) -> PathBuf {
        self.parent.join(version_name(version))
    }
}

/// Finds the paths from the root whose state decides what a delta is made of: those of the versions before it, back to its
/// base. Returns the base, too.
pub fn find_chain_paths(root: &Arc<Root>, directory: &Path) -> (Vec<PathBuf>, Option<BaseVersion>) {
    let mut paths = Vec::new();
    // The paths of another root cannot be watched.
    let place =
        VersionPlace::locate(root, directory).filter(|place| Arc::ptr_eq(&place.root, root));
    let Some(place) = place else { return (paths, None) };
    for version in (0..place.version).rev().take(MAX_CHAIN_DELTAS) {
        let folder = place.folder(version);
        let index = folder.join(VERSION_INDEX_NAME);
        let shards = delta_shards(root, &index);
        paths.push(index);
        let Some(shards) = shards else {
            paths.extend(base_paths(root, folder.clone()));
            return (paths, Some(BaseVersion { version, folder }));
        };
        paths.extend(shards.iter().map(|shard| folder.join(shard)));
    }
    (paths, None)
}

/// The shards of a delta; `None` if the index is not that of a delta, or cannot be read.
fn delta_shards(root: &Arc<Root>, index: &Path) -> Option<Vec<String>> {
    let json = read_index(&OpenFile::open_in_root(root, index).ok()?).ok()??;
    parse_delta_metadata(&json).ok()??;
    shard_names(&json).ok()
}

/// The text of an index; `None` if it is too large for one.
pub fn read_index(file: &OpenFile) -> Result<Option<FileBytes>, SourceError> {
    if file.size() > MAX_INDEX_BYTES {
        return Ok(None);
    }
    let mut json = file.read_whole()?;
    replace_python_numbers(&mut json);
    Ok(Some(json))
}

/// The folder of a full version, and its files that may be of the checkpoint.
fn base_paths(root: &Arc<Root>, folder: PathBuf) -> Vec<PathBuf> {
    let names = root.file_names(&folder).unwrap_or_default();
    let is_part =
        |name: &String| has_checkpoint_extension(name) || unsharded_name_of_index(name).is_some();
    let files = names.into_iter().filter(is_part).map(|name| folder.join(name));
    let files: Vec<PathBuf> = files.collect();
    std::iter::once(folder).chain(files).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_versions_are_those_that_trainers_write() {
        assert_eq!(version_name(7), "weight_v000007");
        assert_eq!(version_name(1_234_567), "weight_v1234567");
        for name in ["weight_v000007", "weight_v1234567", "weight_v000000"] {
            assert_eq!(parse_version_name(name).map(version_name).as_deref(), Some(name));
        }
        for name in ["weight_v7", "weight_v0000007", "weight_v", "weight_v+00007", "v000007"] {
            assert_eq!(parse_version_name(name), None, "{name}");
        }
    }
}
