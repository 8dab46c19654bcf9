//! The blocks of one version of an object, as one process sees them.
//!
//! Blocks are the ranges that were read, so they end where the rooms above end their reads: at tensors. Other processes
//! add and remove blocks at any time.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::source::scatter::has_targets;
use crate::threads::lock;

use super::block::{BlockError, BlockWriter, MAX_BLOCK_BYTES, block_name, parse_block_name};
use super::folder::DiskCache;
use super::{CachedVersion, ObjectId};

/// How often a miss looks for blocks of other processes. A miss costs a request, and reading names is shorter.
const RELIST_INTERVAL: Duration = Duration::from_secs(1);

/// Blocks that overlap a position and are tried. Two processes that read differently make them overlap.
const MAX_CANDIDATES: usize = 4;

/// The blocks of an object.
#[derive(Debug)]
pub struct CachedObject {
    cache: Arc<DiskCache>,
    id: ObjectId,
    version: CachedVersion,
    folder: PathBuf,
    blocks: Mutex<KnownBlocks>,
    has_manifest: AtomicBool,
}

/// The blocks that were there when their names were read, by their start, and those written since.
#[derive(Debug, Default)]
struct KnownBlocks {
    ends: BTreeMap<u64, u64>,
    listed_at: Option<Instant>,
}

impl CachedObject {
    pub(super) fn new(cache: Arc<DiskCache>, version: CachedVersion) -> CachedObject {
        let id = version.id();
        let folder = cache.object_folder(&id);
        let (blocks, has_manifest) = Default::default();
        CachedObject { cache, id, version, folder, blocks, has_manifest }
    }

    /// Fills the targets from the cached blocks of a range. Returns the missing ranges in which targets lie.
    pub fn read(&self, range: &Range<u64>, targets: &mut [(u64, &mut [u8])]) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let block = self.find(at);
            let next = match &block {
                Some(block) => block.end,
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

    /// Bytes of the object that the cache has.
    pub fn covered_bytes(&self) -> u64 {
        let mut blocks = lock(&self.blocks);
        if blocks.listed_at.is_none() {
            blocks.list(&self.folder);
        }
        covered_bytes(blocks.ends.iter().map(|(&start, &end)| start..end))
    }

    /// The block that has a position and reaches furthest.
    fn find(&self, at: u64) -> Option<Range<u64>> {
        let mut blocks = lock(&self.blocks);
        let find = |blocks: &KnownBlocks| {
            let before = blocks.ends.range(..=at).rev().take(MAX_CANDIDATES);
            let has_it = before.map(|(&start, &end)| start..end).filter(|block| at < block.end);
            has_it.max_by_key(|block| block.end)
        };
        let found = find(&blocks);
        let is_old = blocks.listed_at.is_none_or(|listed| listed.elapsed() >= RELIST_INTERVAL);
        if found.is_none() && is_old {
            blocks.list(&self.folder);
            return find(&blocks);
        }
        found
    }

    /// The start of the first block behind a position.
    fn next_start(&self, at: u64) -> Option<u64> {
        lock(&self.blocks).ends.range(at..).next().map(|(&start, _)| start)
    }

    /// Fills the targets from a block. False if it is gone or corrupt: it is forgotten then.
    fn read_block(
        &self,
        block: &Range<u64>,
        part: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
    ) -> bool {
        let path = self.folder.join(block_name(block));
        let Err(error) = self.cache.read_block(&path, &self.id, block, part, targets) else {
            // A cache that was filled before may be read-only.
            let _ = self.keep_manifest();
            return true;
        };
        lock(&self.blocks).ends.remove(&block.start);
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

    /// Begins to keep the bytes of a range; `None` if the cache takes none now.
    pub fn write(&self, range: &Range<u64>) -> Option<BlockFill<'_>> {
        let writer = self.begin(range.start, range.end)?;
        Some(BlockFill { object: self, end: range.end, writer: Some(writer) })
    }

    fn begin(&self, start: u64, end: u64) -> Option<BlockWriter> {
        if !self.cache.make_room((end - start).min(MAX_BLOCK_BYTES)) {
            return None;
        }
        let create = || {
            self.keep_manifest()?;
            BlockWriter::create(&self.folder, start)
        };
        let created = create().or_else(|error| match error.kind() {
            // The folder was removed in between.
            io::ErrorKind::NotFound => {
                self.has_manifest.store(false, Relaxed);
                create()
            }
            _ => Err(error),
        });
        created.map_err(|error| self.cache.pause_writes(&error)).ok()
    }

    fn finish(&self, writer: BlockWriter) {
        let len = writer.len();
        match writer.finish(&self.folder, &self.id) {
            Ok(range) => {
                self.cache.add_usage(len);
                lock(&self.blocks).ends.insert(range.start, range.end);
            }
            // The folder was removed in between: this block is lost, and the next one creates it anew.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.has_manifest.store(false, Relaxed);
            }
            Err(error) => self.cache.pause_writes(&error),
        }
    }

    /// Writes the manifest, whose time says that this version was seen now: once for each open object.
    fn keep_manifest(&self) -> io::Result<()> {
        if !self.has_manifest.load(Relaxed) {
            self.cache.write_manifest(&self.folder, &self.version)?;
            self.has_manifest.store(true, Relaxed);
        }
        Ok(())
    }
}

/// Bytes in ranges that are in order, overlaps counted once.
pub(super) fn covered_bytes(ranges: impl Iterator<Item = Range<u64>>) -> u64 {
    let (mut covered, mut end) = (0, 0);
    for range in ranges {
        covered += range.end.saturating_sub(range.start.max(end));
        end = end.max(range.end);
    }
    covered
}

impl KnownBlocks {
    fn list(&mut self, folder: &std::path::Path) {
        self.listed_at = Some(Instant::now());
        self.ends = match std::fs::read_dir(folder) {
            Ok(entries) => {
                let names = entries.flatten().map(|entry| entry.file_name());
                names
                    .filter_map(|name| parse_block_name(name.to_str()?))
                    .map(|range| (range.start, range.end))
                    .collect()
            }
            Err(_) => BTreeMap::new(),
        };
    }
}

/// Bytes that come from the store and are kept: one block after the other. Dropped before its end, the last one is
/// not kept.
pub struct BlockFill<'a> {
    object: &'a CachedObject,
    end: u64,
    /// `None` after a failure.
    writer: Option<BlockWriter>,
}

impl BlockFill<'_> {
    /// Appends bytes. After a failure, none are kept, and reads continue.
    pub fn append(&mut self, mut bytes: &[u8]) {
        while let Some(writer) = &mut self.writer
            && !bytes.is_empty()
        {
            let room = (MAX_BLOCK_BYTES - writer.len()).min(bytes.len() as u64) as usize;
            if let Err(error) = writer.append(&bytes[..room]) {
                self.object.cache.pause_writes(&error);
                self.writer = None;
                return;
            }
            bytes = &bytes[room..];
            if writer.len() == MAX_BLOCK_BYTES {
                let next = writer.start() + MAX_BLOCK_BYTES;
                if let Some(full) = self.writer.take() {
                    self.object.finish(full);
                }
                self.writer =
                    if next < self.end { self.object.begin(next, self.end) } else { None };
            }
        }
    }

    /// Keeps what was appended.
    pub fn finish(mut self) {
        if let Some(writer) = self.writer.take().filter(|writer| writer.len() > 0) {
            self.object.finish(writer);
        }
    }
}
