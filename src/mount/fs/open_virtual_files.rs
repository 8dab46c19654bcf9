//! Open virtual files, each once, with the descriptors and the memory that they hold.
//!
//! An open virtual file keeps its sources open and its tensors known. If that takes more descriptors than the system
//! allows, or more memory than the budget has, the least recently read virtual file is evicted. Its next read opens
//! and parses its sources again, and verifies that they are the same.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::cache::{Cache, CachedFile};
use crate::threads::lock;
use crate::view::{ShownFile, View, ViewError};
use crate::virtual_file::{VirtualFile, VirtualFileReader};

/// A virtual file that is open at least once.
pub struct OpenVirtualFile {
    shown: Arc<ShownFile>,
    /// The device of its first source, which a reopening waits for.
    pub device: u64,
    /// Serves the reads of all its handles; `None` if it was evicted.
    reader: Mutex<Option<OpenReader>>,
    /// Held while it is reopened after an eviction: its other readers need the same sources.
    reopening: Mutex<()>,
    /// The memory that it took when it was first opened.
    bytes: u64,
    /// The time of its latest read, on the clock of all virtual files.
    last_read: AtomicU64,
}

#[derive(Clone)]
struct OpenReader {
    cached_file: Arc<CachedFile>,
    footprint: Footprint,
}

/// Descriptors and bytes of memory.
#[derive(Clone, Copy, Default)]
struct Footprint {
    descriptors: u64,
    bytes: u64,
}

impl Footprint {
    fn of(file: &VirtualFile) -> Footprint {
        Footprint {
            descriptors: (file.source_files().len() * DESCRIPTORS_PER_FILE) as u64,
            bytes: file.memory_bytes(),
        }
    }

    fn fits(&self, limit: &Footprint) -> bool {
        self.descriptors <= limit.descriptors && self.bytes <= limit.bytes
    }
}

impl std::ops::AddAssign for Footprint {
    fn add_assign(&mut self, other: Footprint) {
        self.descriptors += other.descriptors;
        self.bytes += other.bytes;
    }
}

impl std::ops::SubAssign for Footprint {
    fn sub_assign(&mut self, other: Footprint) {
        self.descriptors -= other.descriptors;
        self.bytes -= other.bytes;
    }
}

/// The open virtual files of a mount.
pub struct OpenVirtualFiles {
    view: Arc<View>,
    cache: Arc<Cache>,
    /// By inode number, with the number of handles of each.
    open: Mutex<HashMap<u64, (Arc<OpenVirtualFile>, usize)>>,
    /// The limit for all together.
    limit: Footprint,
    clock: AtomicU64,
    /// The memory of virtual files that are being reopened now.
    parsing: Mutex<u64>,
    parsed: Condvar,
}

/// How long a parse waits for others to give memory back. Longer would let a source that hangs block others.
const PARSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Descriptors for everything else: directories, files passed through, /dev/fuse.
const RESERVED_DESCRIPTORS: u64 = 128;

/// Opens of each source: through the page cache, past it, through it without the kernel's readahead, and two for leases.
const DESCRIPTORS_PER_FILE: usize = 5;

/// Counts a parse among those that are running.
struct ParseTicket<'a> {
    files: &'a OpenVirtualFiles,
    bytes: u64,
}

impl Drop for ParseTicket<'_> {
    fn drop(&mut self) {
        *lock(&self.files.parsing) -= self.bytes;
        self.files.parsed.notify_all();
    }
}

impl OpenVirtualFiles {
    /// Open virtual files may take `bytes` of memory together; a single one may take more.
    pub fn new(view: Arc<View>, cache: Arc<Cache>, bytes: u64) -> OpenVirtualFiles {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let descriptors = limit
            .current
            .unwrap_or(u64::MAX)
            .saturating_sub(RESERVED_DESCRIPTORS)
            .max(RESERVED_DESCRIPTORS);
        let limit = Footprint { descriptors, bytes };
        OpenVirtualFiles {
            view,
            cache,
            open: Mutex::default(),
            limit,
            clock: AtomicU64::new(0),
            parsing: Mutex::default(),
            parsed: Condvar::new(),
        }
    }

    /// Opens a virtual file once more. One that is open already is verified to match its sources.
    ///
    /// Unless the cache is valid, the sources are read anew, and all handles use that from now on.
    pub fn open(
        &self,
        number: u64,
        shown: &Arc<ShownFile>,
        is_cache_valid: bool,
    ) -> Result<Arc<OpenVirtualFile>, ViewError> {
        let shared = || lock(&self.open).get(&number).map(|(file, _)| Arc::clone(file));
        let (file, reader) = match is_cache_valid.then(shared).flatten() {
            Some(file) => {
                let cached_file = self.resident_or_reopened(&file)?;
                (
                    file,
                    OpenReader {
                        footprint: Footprint::of(cached_file.virtual_file()),
                        cached_file,
                    },
                )
            }
            None => {
                let reader = self.open_reader(shown)?;
                let sources = reader.cached_file.virtual_file().source_files();
                let file = OpenVirtualFile {
                    shown: Arc::clone(shown),
                    device: sources.first().map_or(0, |file| file.identity().dev),
                    reader: Mutex::new(Some(reader.clone())),
                    reopening: Mutex::default(),
                    bytes: reader.footprint.bytes,
                    last_read: AtomicU64::new(self.tick()),
                };
                (Arc::new(file), reader)
            }
        };
        reader.cached_file.reader().check_all_states_unchanged().map_err(ViewError::from)?;
        let mut open = lock(&self.open);
        let (shared, count) = open.entry(number).or_insert_with(|| (Arc::clone(&file), 0));
        *count += 1;
        let shared = Arc::clone(shared);
        drop(open);
        if !is_cache_valid && !Arc::ptr_eq(&shared, &file) {
            let old = lock(&shared.reader).replace(reader);
            // Its blocks are dropped and its sources closed outside of the lock.
            drop(old);
        }
        Ok(shared)
    }

    pub fn close(&self, number: u64) {
        let mut open = lock(&self.open);
        let Some((_, count)) = open.get_mut(&number) else { return };
        *count -= 1;
        if *count == 0 {
            let closed = open.remove(&number);
            drop(open);
            // Closing the sources can take time.
            drop(closed);
        }
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// The reader of a virtual file, unless it was evicted.
    pub fn resident(&self, file: &OpenVirtualFile) -> Option<Arc<CachedFile>> {
        file.last_read.store(self.tick(), Ordering::Relaxed);
        lock(&file.reader).as_ref().map(|reader| Arc::clone(&reader.cached_file))
    }

    /// The reader of a virtual file. After an eviction it is reopened, which may wait for the sources.
    pub fn resident_or_reopened(
        &self,
        file: &OpenVirtualFile,
    ) -> Result<Arc<CachedFile>, ViewError> {
        if let Some(cached_file) = self.resident(file) {
            return Ok(cached_file);
        }
        let _reopening = lock(&file.reopening);
        // Another thread may have reopened it in between.
        if let Some(cached_file) = self.resident(file) {
            return Ok(cached_file);
        }
        let _ticket = self.wait_to_parse(file.bytes);
        let new = self.open_reader(&file.shown)?;
        let mut reader = lock(&file.reader);
        Ok(Arc::clone(&reader.get_or_insert(new).cached_file))
    }

    /// Waits until the virtual files that are being reopened leave room for one more in the budget.
    fn wait_to_parse(&self, bytes: u64) -> ParseTicket<'_> {
        let is_full = |parsing: &mut u64| *parsing > 0 && *parsing + bytes > self.limit.bytes;
        let waited = self.parsed.wait_timeout_while(lock(&self.parsing), PARSE_TIMEOUT, is_full);
        let (mut parsing, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *parsing += bytes;
        ParseTicket { files: self, bytes }
    }

    fn open_reader(&self, shown: &ShownFile) -> Result<OpenReader, ViewError> {
        let virtual_file = self.view.virtual_file(shown)?;
        let footprint = Footprint::of(&virtual_file);
        self.make_room(footprint);
        let reader = Arc::new(VirtualFileReader::open(&virtual_file)?);
        Ok(OpenReader { cached_file: self.cache.open(reader), footprint })
    }

    /// Evicts readers, least recently read first, until there is room for a new one.
    fn make_room(&self, new: Footprint) {
        let mut others: Vec<(Arc<OpenVirtualFile>, Footprint)> = lock(&self.open)
            .values()
            .filter_map(|(open, _)| {
                Some((Arc::clone(open), lock(&open.reader).as_ref()?.footprint))
            })
            .collect();
        let mut total = new;
        others.iter().for_each(|(_, footprint)| total += *footprint);
        if total.fits(&self.limit) {
            return;
        }
        others.sort_by_key(|(open, _)| open.last_read.load(Ordering::Relaxed));
        for (open, footprint) in others {
            if total.fits(&self.limit) {
                break;
            }
            total -= footprint;
            let evicted = lock(&open.reader).take();
            drop(evicted);
        }
    }

    /// How many are open, and how much memory they hold in bytes.
    pub fn usage(&self) -> (u64, u64) {
        let open = lock(&self.open);
        let bytes = |open: &OpenVirtualFile| Some(lock(&open.reader).as_ref()?.footprint.bytes);
        let held = open.values().filter_map(|(open, _)| bytes(open));
        (open.len() as u64, held.sum())
    }
}
