//! The folder of the cache: room for new blocks, eviction of the least recently used, and open blocks.

use std::collections::HashMap;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lru::LruCache;
use rustix::fs::Mode;
use rustix::io::Errno;

use crate::private_folder::{create_private, open_private};
use crate::temp_file::TempFile;
use crate::threads::{lock, lock_holding_forks};

use super::block::{BLOCK_OVERHEAD_BYTES, BlockError, BlockName};
use super::block_reader::BlockReader;
use super::checksums::{CHECKSUMS_NAME, ObjectChecksums};
use super::ledger::{RoomDecision, SpaceLedger, SpaceReservation};
use super::limits::{CacheOptions, CacheShortage, DiskLimits, SpaceUse};
use super::manifest::{CachedVersion, MANIFEST_NAME, ObjectId};
use super::page_dropper::PageDropper;
use super::usage::{BlockFile, ObjectFolder, object_folders};

/// Maximum blocks that stay open for random readers. Each takes one or two descriptors.
const MAX_OPEN_BLOCKS: NonZeroUsize = NonZeroUsize::new(256).expect("is not zero");

/// The pause of writes after a failure, so that a full disk is not tried for each block.
const WRITE_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// The path of a block, and the process that opened it: a forked child may lack the thread that fills a slot.
type BlockKey = (u32, PathBuf);

/// A block, empty until it is open. Other readers wait for the one that opens it.
type BlockSlot = Arc<Mutex<Option<Arc<BlockReader>>>>;

/// The cache of a folder.
#[derive(Debug)]
pub struct DiskCache {
    folder: PathBuf,
    limits: DiskLimits,
    open_blocks: Mutex<LruCache<BlockKey, BlockSlot>>,
    ledger: SpaceLedger,
    paused_until: Mutex<Option<Instant>>,
    pub(super) page_dropper: PageDropper,
}

/// An object, and its cached bytes.
#[derive(Debug)]
pub struct CacheReport {
    /// The object and its version.
    pub version: CachedVersion,
    /// Bytes of the object in the cache.
    pub cached_bytes: u64,
    /// Bytes that its blocks take on the disk.
    pub disk_bytes: u64,
    /// Seconds since 1970 of its last use.
    pub used: i64,
}

/// Blocks that were removed.
#[derive(Debug, Default)]
pub struct RemovedBlocks {
    /// The number of blocks.
    pub count: usize,
    /// Bytes that they took on the disk.
    pub bytes: u64,
    /// The first block that could not be removed, and why.
    pub failure: Option<(PathBuf, io::Error)>,
}

/// The caches of this process.
static CACHES: Mutex<Option<HashMap<CacheOptions, Option<Arc<DiskCache>>>>> = Mutex::new(None);

impl DiskCache {
    /// The cache of these options, one in a process; `None` if they disable it. A failure to open it is logged, and gives
    /// `None`, too.
    pub fn shared(options: &CacheOptions) -> Option<Arc<DiskCache>> {
        let folder = options.folder.as_ref()?;
        if let Some(known) = lock_holding_forks(&CACHES).get_or_insert_default().get(options) {
            return known.clone();
        }
        let opened = DiskCache::open(options, folder);
        if let Err(error) = &opened {
            let folder = folder.display();
            tracing::warn!(%folder, %error, "the cache on disk cannot be used, and every read goes to the store: set CKPTFS_CACHE_DIR to another folder, or CKPTFS_NO_CACHE=1");
        }
        let opened = opened.ok().map(Arc::new);
        // Another thread may have been faster. All must use one ledger.
        let mut caches = lock_holding_forks(&CACHES);
        caches.get_or_insert_default().entry(options.clone()).or_insert(opened).clone()
    }

    /// Opens the cache of a folder, and creates it if it is not there.
    pub fn open(options: &CacheOptions, folder: &Path) -> io::Result<DiskCache> {
        // A cache that was filled before may be read-only.
        let opened =
            create_private(folder).or_else(|error| open_private(folder).map_err(|_| error))?;
        if rustix::fs::fstat(&opened)?.st_mode & 0o077 != 0 {
            // Models may be secret. Without the right to change it, it stays as it is.
            let _ = rustix::fs::fchmod(&opened, Mode::RWXU);
        }
        let disk = rustix::fs::fstatvfs(&opened)?;
        let limits = options.limits(disk.f_blocks.saturating_mul(disk.f_frsize));
        Ok(DiskCache {
            folder: folder.to_path_buf(),
            limits,
            ledger: SpaceLedger::new(limits),
            open_blocks: Mutex::new(LruCache::new(MAX_OPEN_BLOCKS)),
            paused_until: Mutex::default(),
            page_dropper: PageDropper::default(),
        })
    }

    pub(super) fn object_folder(&self, id: &ObjectId) -> PathBuf {
        self.folder.join(id.to_string())
    }

    /// Fills the targets in a part of a block. Without targets, only looks for missing checksums.
    pub(super) fn read_block(
        &self,
        folder: &Path,
        block: &BlockName,
        part: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
        checksums: &ObjectChecksums,
    ) -> Result<(), BlockError> {
        let reader = self.open_block(folder, block)?;
        match reader.read(part, targets, checksums) {
            // The folder may have been removed or moved meanwhile, and created anew.
            Err(BlockError::Corrupt) => {
                checksums.close();
                reader.read(part, targets, checksums)
            }
            read => read,
        }
    }

    fn open_block(&self, folder: &Path, block: &BlockName) -> Result<Arc<BlockReader>, BlockError> {
        let key = block_key(&folder.join(block.to_string()));
        let slot =
            lock_holding_forks(&self.open_blocks).get_or_insert(key, Default::default).clone();
        let mut opened = lock(&slot);
        if let Some(reader) = opened.as_ref().filter(|reader| reader.is_current()) {
            return Ok(Arc::clone(reader));
        }
        // First it is closed, if it was open and evicted.
        *opened = None;
        let reader = BlockReader::open(folder, block)?;
        Ok(Arc::clone(opened.insert(Arc::new(reader))))
    }

    pub(super) fn forget_block(&self, path: &Path) {
        let key = block_key(path);
        lock_holding_forks(&self.open_blocks).pop(&key);
    }

    /// Writes the manifest of an object, in a folder that is created with it.
    pub(super) fn write_manifest(&self, folder: &Path, version: &CachedVersion) -> io::Result<()> {
        create_private(folder)?;
        let text = serde_json::to_vec_pretty(version)?;
        let file = TempFile::create(folder, Some(MANIFEST_NAME.as_ref()), Mode::RUSR | Mode::WUSR)?;
        file.file().write_all(&text)?;
        file.take(&folder.join(MANIFEST_NAME), true)
    }

    /// Pauses writes. Reads go on.
    pub(super) fn pause_writes(&self, error: &io::Error) {
        let paused =
            lock_holding_forks(&self.paused_until).replace(Instant::now() + WRITE_RETRY_INTERVAL);
        if paused.is_none() {
            let folder = self.folder.display();
            tracing::warn!(%folder, %error, "nothing more is kept in the cache on disk for now: make room, or change CKPTFS_CACHE_DIR, CKPTFS_CACHE_SIZE or CKPTFS_CACHE_MIN_FREE");
        }
    }

    /// Makes room for bytes that will be written; `None` if there is none.
    pub(super) fn make_room(&self, bytes: u64) -> Option<SpaceReservation<'_>> {
        if lock_holding_forks(&self.paused_until).is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let decision = match self.ledger.request(bytes) {
            RoomDecision::MeasureDisk => {
                match self.free_bytes() {
                    Ok(bytes) => self.ledger.set_free(bytes),
                    Err(error) => {
                        self.pause_writes(&error);
                        return None;
                    }
                }
                self.ledger.request(bytes)
            }
            decision => decision,
        };
        match decision {
            RoomDecision::Granted(reservation) => Some(reservation),
            RoomDecision::ScanFolder => self.scan_and_evict(bytes),
            // The new measurement is old already: the disk is slow. The next block measures again.
            RoomDecision::MeasureDisk => Some(self.ledger.reserve(bytes)),
        }
    }

    /// Scans the folder, and evicts blocks to make room for bytes. `None` if there is still no room.
    fn scan_and_evict(&self, bytes: u64) -> Option<SpaceReservation<'_>> {
        let folders = object_folders(&self.folder);
        let mut used = folders.iter().map(ObjectFolder::disk_bytes).sum();
        let mut free = self.free_bytes().unwrap_or(0);
        let needed = bytes.saturating_add(self.ledger.reserved_bytes());
        // If the blocks that are being written take the whole limit, removing others would be in vain.
        let can_fit = needed <= self.limits.max_bytes;
        if free > 0 && can_fit && !self.limits.has_room(used, free, needed) {
            let removed = self.evict(folders, self.limits.excess(used, free, needed)).bytes;
            (used, free) = (used - removed, free + removed);
        }
        let reservation = self.ledger.end_scan(used, free, bytes);
        // If room is lacking only because of reserved bytes, this block is not kept, but writes go on.
        if reservation.is_none() && !self.limits.has_room(used, free, bytes) {
            self.pause_writes(&io::Error::other(format!(
                "it may take at most {} bytes, and must leave {} bytes of the disk free",
                self.limits.max_bytes, self.limits.min_free_bytes
            )));
        }
        reservation
    }

    /// What the cache lacks to add `missing` bytes in `block_count` blocks without evicting `kept` bytes that it has;
    /// `None` if there is room.
    pub fn find_shortage(
        &self,
        kept: u64,
        missing: u64,
        block_count: u64,
    ) -> io::Result<Option<CacheShortage>> {
        let used = object_folders(&self.folder).iter().map(ObjectFolder::disk_bytes).sum();
        let space = SpaceUse { used, free: self.free_bytes()? };
        let missing = missing.saturating_add(block_count.saturating_mul(BLOCK_OVERHEAD_BYTES));
        Ok(self.limits.find_shortage(space, kept, missing))
    }

    /// The free bytes of the disk. A folder that was removed while in use is created anew.
    fn free_bytes(&self) -> io::Result<u64> {
        let measured = match rustix::fs::statvfs(&self.folder) {
            Err(Errno::NOENT) => {
                create_private(&self.folder)?;
                rustix::fs::statvfs(&self.folder)
            }
            measured => measured,
        };
        let disk = measured?;
        Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
    }

    /// Removes the least recently used blocks, until these had at least `bytes` on the disk, or none is left.
    fn evict(&self, folders: Vec<ObjectFolder>, bytes: u64) -> RemovedBlocks {
        let mut blocks: Vec<_> = folders.iter().flat_map(|folder| &folder.blocks).collect();
        blocks.sort_unstable_by_key(|block| block.used);
        let mut removed = RemovedBlocks::default();
        for block in blocks {
            if removed.bytes >= bytes {
                break;
            }
            if let Err(error) = remove_block(&block.path) {
                removed.failure.get_or_insert_with(|| (block.path.clone(), error));
                continue;
            }
            // A deleted file takes space while it is open.
            self.forget_block(&block.path);
            removed.bytes += block.disk_bytes;
            removed.count += 1;
        }
        folders.iter().for_each(|folder| self.remove_if_empty(folder));
        tracing::debug!(
            bytes = removed.bytes,
            "the least recently used blocks of the cache are removed"
        );
        removed
    }

    /// Removes the folder of an object that has no blocks. If another process adds one meanwhile, the folder stays, and that
    /// block is fetched again if it lost its checksums.
    fn remove_if_empty(&self, folder: &ObjectFolder) {
        if object_has_blocks(&folder.path) {
            return;
        }
        let version = folder.version();
        for name in [MANIFEST_NAME, CHECKSUMS_NAME] {
            let _ = std::fs::remove_file(folder.path.join(name));
        }
        let is_removed = std::fs::remove_dir(&folder.path).is_ok();
        if let (false, Some((version, _))) = (is_removed, version) {
            let _ = self.write_manifest(&folder.path, &version);
        }
    }

    /// Reports all objects that have blocks, sorted by URL.
    pub fn report(&self) -> Vec<CacheReport> {
        let report = |folder: &ObjectFolder| {
            let (version, _) = folder.version()?;
            Some(CacheReport {
                version,
                cached_bytes: folder.covered_bytes(),
                disk_bytes: folder.disk_bytes(),
                used: folder.blocks.iter().map(|block| block.used.0).max()?,
            })
        };
        let mut reports: Vec<_> = object_folders(&self.folder).iter().filter_map(report).collect();
        reports.sort_by(|a, b| (&a.version.url, a.used).cmp(&(&b.version.url, b.used)));
        reports
    }

    /// The last version of each object of a store.
    pub fn versions(&self, store: &str) -> Vec<CachedVersion> {
        let mut newest = HashMap::<String, ((i64, i64), CachedVersion)>::new();
        for (version, seen) in object_folders(&self.folder).iter().filter_map(ObjectFolder::version)
        {
            if version.store != store {
                continue;
            }
            match newest.get(&version.key) {
                Some((at, _)) if *at >= seen => {}
                _ => drop(newest.insert(version.key.clone(), (seen, version))),
            }
        }
        newest.into_values().map(|(_, version)| version).collect()
    }

    /// Removes blocks of the selected objects, until these take at most `max_bytes`.
    pub fn prune(&self, max_bytes: u64, select: impl Fn(&CachedVersion) -> bool) -> RemovedBlocks {
        let mut folders = object_folders(&self.folder);
        // A folder without a manifest is useless.
        folders.retain(|folder| folder.version().is_none_or(|(version, _)| select(&version)));
        let used: u64 = folders.iter().map(ObjectFolder::disk_bytes).sum();
        self.evict(folders, used.saturating_sub(max_bytes))
    }

    /// Compares the blocks of the selected objects with their checksums, and removes those that differ.
    /// Calls `on_block` with the bytes of each and whether it was whole, until that returns false.
    pub fn verify(
        &self,
        select: &dyn Fn(&CachedVersion) -> bool,
        on_block: &mut dyn FnMut(u64, bool) -> bool,
    ) -> io::Result<()> {
        for folder in object_folders(&self.folder) {
            if !folder.version().is_none_or(|(version, _)| select(&version)) {
                continue;
            }
            let checksums = ObjectChecksums::new(folder.id, &folder.path);
            for BlockFile { path, block, .. } in &folder.blocks {
                let opened = BlockReader::open(&folder.path, block);
                let is_whole = match opened.and_then(|reader| reader.verify(&checksums)) {
                    Ok(()) => true,
                    Err(BlockError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                        continue;
                    }
                    Err(BlockError::Io(error)) => return Err(error),
                    Err(BlockError::Corrupt) => {
                        remove_block(path)?;
                        false
                    }
                };
                if !on_block(block.range.end - block.range.start, is_whole) {
                    return Ok(());
                }
            }
            self.remove_if_empty(&folder);
        }
        Ok(())
    }
}

fn block_key(path: &Path) -> BlockKey {
    (std::process::id(), path.to_path_buf())
}

/// Removes the file of a block, unless another process has done so: its space is free then, too.
fn remove_block(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removal => removal,
    }
}

fn object_has_blocks(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .any(|name| ![MANIFEST_NAME, CHECKSUMS_NAME].contains(&name.as_str()))
}
