//! The objects and blocks in the folder of the cache.

use std::fs::{DirEntry, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::block::BlockName;
use super::checksums::CHECKSUMS_NAME;
use super::manifest::{CachedVersion, MANIFEST_NAME, MAX_MANIFEST_BYTES, ObjectId};

/// The folder of one version of an object.
#[derive(Debug)]
pub struct ObjectFolder {
    pub path: PathBuf,
    pub id: ObjectId,
    pub blocks: Vec<BlockFile>,
    /// Bytes that the checksums of its blocks take on the disk.
    pub checksum_bytes: u64,
}

/// The file of a block.
#[derive(Debug)]
pub struct BlockFile {
    pub path: PathBuf,
    pub block: BlockName,
    /// Bytes that it takes on the disk.
    pub disk_bytes: u64,
    /// The time of its last use: seconds since 1970, and nanoseconds.
    pub used: (i64, i64),
}

/// The folders of all objects. Other files are ignored.
pub fn object_folders(folder: &Path) -> Vec<ObjectFolder> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folder_of = |entry: DirEntry| {
        let id = ObjectId::parse(entry.file_name().to_str()?)?;
        let path = entry.path();
        let blocks = block_files(&path);
        let checksums = std::fs::symlink_metadata(path.join(CHECKSUMS_NAME));
        let checksum_bytes = checksums.map_or(0, |file| disk_bytes(&file));
        Some(ObjectFolder { path, id, blocks, checksum_bytes })
    };
    entries.filter_map(folder_of).collect()
}

fn block_files(folder: &Path) -> Vec<BlockFile> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let block_file = |entry: DirEntry| {
        let block = BlockName::parse(entry.file_name().to_str()?)?;
        let metadata = entry.metadata().ok().filter(Metadata::is_file)?;
        let (disk_bytes, used) = (disk_bytes(&metadata), (metadata.atime(), metadata.atime_nsec()));
        Some(BlockFile { path: entry.path(), block, disk_bytes, used })
    };
    entries.filter_map(block_file).collect()
}

fn disk_bytes(file: &Metadata) -> u64 {
    file.blocks() * 512
}

/// Bytes in ranges that are in order. Overlaps count once.
pub fn covered_bytes(ranges: impl Iterator<Item = std::ops::Range<u64>>) -> u64 {
    let (mut covered, mut end) = (0, 0);
    for range in ranges {
        covered += range.end.saturating_sub(range.start.max(end));
        end = end.max(range.end);
    }
    covered
}

impl ObjectFolder {
    /// Bytes that its blocks and their checksums take on the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.checksum_bytes + self.blocks.iter().map(|block| block.disk_bytes).sum::<u64>()
    }

    /// The version in its manifest, and when it was last seen; `None` without a whole manifest.
    pub fn version(&self) -> Option<(CachedVersion, (i64, i64))> {
        let path = self.path.join(MANIFEST_NAME);
        let metadata = std::fs::symlink_metadata(&path).ok()?;
        if !metadata.is_file() || metadata.len() > MAX_MANIFEST_BYTES {
            return None;
        }
        let version: CachedVersion = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
        (version.id() == self.id).then_some((version, (metadata.mtime(), metadata.mtime_nsec())))
    }

    /// Bytes of the object that its blocks have. Overlaps count once.
    pub fn covered_bytes(&self) -> u64 {
        let mut ranges: Vec<_> = self.blocks.iter().map(|file| file.block.range.clone()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        covered_bytes(ranges.into_iter())
    }
}
