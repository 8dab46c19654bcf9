//! Finds the chain of a version: its deltas, back to the full version that they begin with.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::delta_error::DeltaError;
use crate::checkpoint::delta_index::{DeltaMetadata, VERSION_INDEX_NAME, parse_delta_metadata};
use crate::checkpoint::directory::{MAX_CHAIN_DELTAS, VersionPlace, read_index, version_name};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::shard_index::IndexError;
use crate::source::{FileBytes, OpenFile, ReadAt, Root, SourceError};

/// The index of a delta, read and still open.
#[derive(Debug)]
pub struct DeltaVersion {
    pub file: OpenFile,
    pub json: FileBytes,
    pub metadata: DeltaMetadata,
}

impl DeltaVersion {
    /// Parses the index in a file; `None` if it is that of a full version.
    pub fn parse(file: OpenFile, json: FileBytes) -> Result<Option<DeltaVersion>, CheckpointError> {
        let path = file.file().path();
        let metadata = parse_delta_metadata(&json).map_err(|error| error_at(path, error))?;
        Ok(metadata.map(|metadata| DeltaVersion { file, json, metadata }))
    }

    fn path(&self) -> PathBuf {
        self.file.file().path()
    }
}

/// The deltas of a version, and where their base lies.
#[derive(Debug)]
pub struct DeltaChain {
    /// The root in which all versions lie.
    pub root: Arc<Root>,
    /// The latest first.
    pub deltas: Vec<DeltaVersion>,
    /// The folder of each delta.
    pub folders: Vec<PathBuf>,
    pub base: BasePlace,
}

/// Where the base of a chain lies.
#[derive(Debug)]
pub enum BasePlace {
    /// A folder in the root of the versions.
    Folder(PathBuf),
    /// The path that the user gave.
    Named(PathBuf),
}

pub fn error_at(path: PathBuf, error: DeltaError) -> CheckpointError {
    CheckpointError::Delta { path, error: Box::new(error) }
}

/// Finds the chain of the version whose index was read. `named_base` is the model that training began with.
pub fn find_chain(
    root: &Arc<Root>,
    directory: &Path,
    index: DeltaVersion,
    named_base: Option<&Path>,
) -> Result<DeltaChain, CheckpointError> {
    let path = index.path();
    if path.file_name().is_none_or(|name| name != VERSION_INDEX_NAME) {
        return Err(error_at(path, DeltaError::IndexName));
    }
    let version = index.metadata.version;
    let place = VersionPlace::locate(root, directory).filter(|place| place.version == version);
    let Some(place) = place else {
        let error = DeltaError::FolderName { version, folder: version_name(version) };
        return Err(error_at(path, error));
    };
    let mut folders = vec![place.folder(version)];
    let mut deltas = vec![index];
    loop {
        let last = &deltas[deltas.len() - 1];
        let DeltaMetadata { version, base_version, .. } = last.metadata;
        if base_version.checked_add(1) != Some(version) {
            return Err(error_at(last.path(), DeltaError::OutOfOrder { version, base_version }));
        }
        if deltas.len() > MAX_CHAIN_DELTAS {
            return Err(error_at(path, DeltaError::TooLong { limit: MAX_CHAIN_DELTAS }));
        }
        let named_base = named_base.filter(|_| base_version == 0);
        let folder = place.folder(base_version);
        let base = match named_base {
            Some(base) => BasePlace::Named(base.to_path_buf()),
            None => match read_version_index(&place.root, &folder)? {
                VersionIndex::Delta(delta) if delta.metadata.version == base_version => {
                    deltas.push(delta);
                    folders.push(folder);
                    continue;
                }
                VersionIndex::Delta(delta) => {
                    let version = delta.metadata.version;
                    let error = DeltaError::FolderName { version, folder: version_name(version) };
                    return Err(error_at(delta.path(), error));
                }
                VersionIndex::Full => BasePlace::Folder(folder),
                VersionIndex::Missing => {
                    let folder = place.root.shown_path(&folder);
                    let error = match base_version {
                        0 => DeltaError::MissingBase { folder },
                        _ => DeltaError::MissingVersion { version, folder },
                    };
                    return Err(error_at(last.path(), error));
                }
            },
        };
        return Ok(DeltaChain { root: place.root, deltas, folders, base });
    }
}

enum VersionIndex {
    Delta(DeltaVersion),
    /// A folder without the index of a delta.
    Full,
    Missing,
}

fn read_version_index(root: &Arc<Root>, folder: &Path) -> Result<VersionIndex, CheckpointError> {
    let file = match OpenFile::open_in_root(root, &folder.join(VERSION_INDEX_NAME)) {
        Ok(file) => file,
        Err(SourceError::Missing { .. }) => {
            return match root.metadata(folder) {
                Ok(_) => Ok(VersionIndex::Full),
                Err(SourceError::Missing { .. }) => Ok(VersionIndex::Missing),
                Err(error) => Err(error.into()),
            };
        }
        Err(error) => return Err(error.into()),
    };
    let Some(json) = read_index(&file)? else {
        let (path, size) = (file.file().path(), file.size());
        return Err(CheckpointError::Index { path, error: IndexError::TooLarge { size } });
    };
    Ok(DeltaVersion::parse(file, json)?.map_or(VersionIndex::Full, VersionIndex::Delta))
}
