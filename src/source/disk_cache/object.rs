//! The blocks of one version of an object, as one process sees them.
//!
//! Blocks are the ranges that were read, which mostly end at tensors. Other processes add and remove blocks at any time.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::source::scatter::has_targets;
use crate::threads::lock_holding_forks;

use super::block::{BLOCK_OVERHEAD_BYTES, BlockError, BlockName, BlockWriter, MAX_BLOCK_BYTES};
use super::checksums::ObjectChecksums;
use super::folder::DiskCache;
use super::ledger::SpaceReservation;
use super::usage::covered_bytes;
use super::{CachedVersion, ObjectId};

/// The time before a miss lists the blocks of other processes again: a miss costs a request, and a listing is faster.
const RELIST_INTERVAL: Duration = Duration::from_secs(1);

/// Blocks that are tried for one position. They overlap where two processes read differently.
const MAX_CANDIDATES: usize = 4;

/// The blocks of an object.
#[derive(Debug)]
pub struct CachedObject {
    cache: Arc<DiskCache>,
    id: ObjectId,
    version: CachedVersion,
    folder: PathBuf,
    checksums: ObjectChecksums,
    blocks: Mutex<KnownBlocks>,
    has_manifest: AtomicBool,
    /// Whether new blocks are dropped from the page cache after their writeback.
    keeps_out_of_page_cache: AtomicBool,
}

/// The blocks of the last listing, by their start, and those that were written since.
#[derive(Debug, Default)]
struct KnownBlocks {
    by_start: BTreeMap<u64, BlockName>,
    listed_at: Option<Instant>,
}

impl CachedObject {
    /// The blocks of a version of an object in a cache.
    pub fn new(cache: Arc<DiskCache>, version: CachedVersion) -> CachedObject {
        let id = version.id();
        let folder = cache.object_folder(&id);
        let checksums = ObjectChecksums::new(id, &folder);
        let (blocks, has_manifest, keeps_out_of_page_cache) = Default::default();
        CachedObject {
            cache,
            id,
            version,
            folder,
            checksums,
            blocks,
            has_manifest,
            keeps_out_of_page_cache,
        }
    }

    /// Drops new blocks from the page cache after their writeback.
    pub fn keep_out_of_page_cache(&self) {
        self.keeps_out_of_page_cache.store(true, Relaxed);
    }

    /// Fills the targets from the cached blocks of a range. Returns the missing ranges in which targets lie.
    pub fn read(&self, range: &Range<u64>, targets: &mut [(u64, &mut [u8])]) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let block = self.find(at);
            let next = match &block {
                Some(block) => block.range.end,
                None => self.next_start(at).unwrap_or(range.end),
            };
            let part = at..next.min(range.end);
            at = part.end;
            let is_read = block.is_some_and(|block| self.read_block(&block, &part, targets));
            if !is_read && (targets.is_empty() || has_targets(&part, targets)) {
                missing.push(part);
            }
        }
        missing
    }

    /// Bytes of the object that the folder has blocks of.
    pub fn covered_bytes(&self) -> u64 {
        covered_bytes(self.list().into_iter().map(|block| block.range))
    }

    /// Bytes of ranges that the folder has no blocks of. The blocks are not opened.
    pub fn missing_bytes(&self, ranges: &[Range<u64>]) -> u64 {
        let blocks: Vec<_> = self.list().into_iter().map(|block| block.range).collect();
        ranges.iter().map(|range| range.end - range.start - bytes_within(&blocks, range)).sum()
    }

    /// The block that has a position and reaches furthest. A miss lists the folder again if the listing is old.
    fn find(&self, at: u64) -> Option<BlockName> {
        let (found, is_old) = {
            let blocks = lock_holding_forks(&self.blocks);
            (blocks.find(at), blocks.listed_at.is_none_or(|at| at.elapsed() >= RELIST_INTERVAL))
        };
        if found.is_some() || !is_old {
            return found;
        }
        // Without the lock. A block that is gone meanwhile is forgotten when it is opened.
        let listed = self.list();
        let mut blocks = lock_holding_forks(&self.blocks);
        blocks.by_start.extend(listed.into_iter().map(|block| (block.range.start, block)));
        blocks.listed_at = Some(Instant::now());
        blocks.find(at)
    }

    /// The blocks that the folder has now, by their start.
    fn list(&self) -> Vec<BlockName> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let block = |entry: std::fs::DirEntry| BlockName::parse(entry.file_name().to_str()?);
        let mut blocks: Vec<_> = entries.filter_map(block).collect();
        blocks.sort_unstable_by_key(|block| (block.range.start, block.range.end));
        blocks
    }

    /// The start of the first block behind a position.
    fn next_start(&self, at: u64) -> Option<u64> {
        lock_holding_forks(&self.blocks).by_start.range(at..).next().map(|(&start, _)| start)
    }

    /// Fills the targets from a block. False if it is gone or corrupt: it is forgotten then.
    fn read_block(
        &self,
        block: &BlockName,
        part: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
    ) -> bool {
        let read = self.cache.read_block(&self.folder, block, part, targets, &self.checksums);
        let Err(error) = read else {
            // A cache that was filled before may be read-only.
            let _ = self.keep_manifest();
            return true;
        };
        let path = self.folder.join(block.to_string());
        lock_holding_forks(&self.blocks).by_start.remove(&block.range.start);
        self.cache.forget_block(&path);
        match error {
            BlockError::Corrupt => {
                tracing::warn!(path = %path.display(), "a block of the cache is corrupt, and is fetched anew");
                let _ = std::fs::remove_file(&path);
            }
            BlockError::Io(error) => tracing::debug!(path = %path.display(), %error, "no block"),
        }
        false
    }

    /// Begins to write the bytes of a range; `None` if the cache takes none now.
    pub fn write(&self, range: &Range<u64>) -> Option<BlockFill<'_>> {
        let block = self.begin(range.start, range.end)?;
        Some(BlockFill { object: self, end: range.end, block: Some(block) })
    }

    fn begin(&self, start: u64, end: u64) -> Option<UnfinishedBlock<'_>> {
        let room =
            self.cache.make_room((end - start).min(MAX_BLOCK_BYTES) + BLOCK_OVERHEAD_BYTES)?;
        let create = || {
            self.keep_manifest()?;
            BlockWriter::create(&self.folder, &self.id, start)
        };
        let created = create().or_else(|error| match error.kind() {
            // The folder was removed in between.
            io::ErrorKind::NotFound => {
                self.has_manifest.store(false, Relaxed);
                create()
            }
            _ => Err(error),
        });
        let writer = created.map_err(|error| self.cache.pause_writes(&error)).ok()?;
        Some(UnfinishedBlock { writer, room })
    }

    fn finish(&self, UnfinishedBlock { writer, room }: UnfinishedBlock<'_>) {
        room.commit(writer.len() + BLOCK_OVERHEAD_BYTES);
        match writer.finish(&self.folder, &self.checksums) {
            Ok(block) => {
                let path = self.folder.join(block.to_string());
                // An older file of this name may be open.
                self.cache.forget_block(&path);
                lock_holding_forks(&self.blocks).by_start.insert(block.range.start, block);
                if self.keeps_out_of_page_cache.load(Relaxed) {
                    self.cache.page_dropper.queue(path);
                }
            }
            // The folder was removed in between: this block is lost, and the next one creates it anew.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.has_manifest.store(false, Relaxed);
            }
            Err(error) => self.cache.pause_writes(&error),
        }
    }

    /// Writes the manifest once for each open object. Its time records that this version was seen now.
    fn keep_manifest(&self) -> io::Result<()> {
        if !self.has_manifest.load(Relaxed) {
            self.cache.write_manifest(&self.folder, &self.version)?;
            self.has_manifest.store(true, Relaxed);
        }
        Ok(())
    }
}

/// Bytes of a range that sorted blocks cover. Blocks are short, so all that start far before it are skipped.
fn bytes_within(blocks: &[Range<u64>], range: &Range<u64>) -> u64 {
    let first = range.start.saturating_sub(MAX_BLOCK_BYTES);
    let first = blocks.partition_point(|block| block.start < first);
    let before_end = blocks[first..].iter().take_while(|block| block.start < range.end);
    covered_bytes(before_end.map(|block| block.start.max(range.start)..block.end.min(range.end)))
}

impl KnownBlocks {
    /// The block that has a position and reaches furthest.
    fn find(&self, at: u64) -> Option<BlockName> {
        let before = self.by_start.range(..=at).rev().take(MAX_CANDIDATES);
        let covering = before.map(|(_, block)| block).filter(|block| at < block.range.end);
        covering.max_by_key(|block| block.range.end).cloned()
    }
}

/// A block that is being written, and its room in the cache.
struct UnfinishedBlock<'a> {
    writer: BlockWriter,
    room: SpaceReservation<'a>,
}

/// Writes bytes of the store to one block after the other. A block that is dropped before its end is lost.
pub struct BlockFill<'a> {
    object: &'a CachedObject,
    end: u64,
    /// `None` after a failure.
    block: Option<UnfinishedBlock<'a>>,
}

impl BlockFill<'_> {
    /// Appends bytes. After a failure it drops them, and the read goes on.
    pub fn append(&mut self, mut bytes: &[u8]) {
        while let Some(UnfinishedBlock { writer, .. }) = &mut self.block
            && !bytes.is_empty()
        {
            let room = (MAX_BLOCK_BYTES - writer.len()).min(bytes.len() as u64) as usize;
            if let Err(error) = writer.append(&bytes[..room]) {
                self.object.cache.pause_writes(&error);
                self.block = None;
                return;
            }
            bytes = &bytes[room..];
            if writer.len() == MAX_BLOCK_BYTES {
                let next = writer.start() + MAX_BLOCK_BYTES;
                if let Some(full) = self.block.take() {
                    self.object.finish(full);
                }
                self.block = if next < self.end { self.object.begin(next, self.end) } else { None };
            }
        }
    }

    /// Names the last block.
    pub fn finish(mut self) {
        if let Some(block) = self.block.take().filter(|block| block.writer.len() > 0) {
            self.object.finish(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::CacheOptions;
    use super::*;
    use crate::private_folder::create_private;

    #[test]
    fn a_folder_that_is_moved_away_is_filled_anew() {
        const BLOCK_BYTES: u64 = 100 << 10;
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("blocks");
        let options = CacheOptions::new(Some(folder.clone()), None, Some(0));
        let cache = Arc::new(DiskCache::open(&options, &folder).unwrap());
        let version = CachedVersion {
            url: "s3://bucket/a".into(),
            store: "s3 bucket".into(),
            key: "a".into(),
            size: 3 * BLOCK_BYTES,
            etag: Some("e".into()),
            is_weak: false,
            modified: 7,
        };
        let object = CachedObject::new(cache, version);
        let write = |range: &Range<u64>| {
            let mut fill = object.write(range).unwrap();
            fill.append(&vec![(range.start / BLOCK_BYTES) as u8 + 1; BLOCK_BYTES as usize]);
            fill.finish();
        };
        let is_cached = |range: &Range<u64>| {
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            let missing = object.read(range, &mut [(range.start, &mut bytes)]);
            missing.is_empty()
                && bytes.iter().all(|&byte| byte == (range.start / BLOCK_BYTES) as u8 + 1)
        };
        let (first, second) = (0..BLOCK_BYTES, BLOCK_BYTES..2 * BLOCK_BYTES);
        write(&first);
        assert!(is_cached(&first));
        // The moved file of checksums is open, and has none of the second block's.
        std::fs::rename(&folder, dir.path().join("moved")).unwrap();
        create_private(&folder).unwrap();
        write(&second);
        assert!(is_cached(&second));
        assert!(is_cached(&second));
    }

    #[test]
    fn bytes_of_a_range_are_counted_once_and_to_its_ends() {
        let blocks = [0..10, 5..20, 30..40, 50..60];
        for (range, expected) in
            [(0..60, 40), (8..12, 4), (20..30, 0), (35..55, 10), (60..99, 0), (7..7, 0)]
        {
            assert_eq!(bytes_within(&blocks, &range), expected, "{range:?}");
        }
    }
}
