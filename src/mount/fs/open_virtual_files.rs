//! Open virtual files, each once, with the descriptors and the memory that they hold.
//!
//! While a virtual file is open, so are its sources, and its tensors are known. If that takes more descriptors than
//! the system allows, or more memory than the budget has, the least recently read virtual file is evicted. Its next
//! read opens and parses its sources again, and verifies that they are the same.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::cache::{Cache, CachedFile};
use crate::threads::lock;
use crate::view::{self, ShownFile, View};
use crate::virtual_file::VirtualFile;

/// A virtual file that is open at least once.
pub struct OpenVirtualFile {
    shown: Arc<ShownFile>,
    /// The device of its first source, for which a read waits.
    pub device: u64,
    /// Answers the reads of all its handles; `None` if it was evicted.
    reader: Mutex<Option<OpenReader>>,
    /// Held while it is opened again after an eviction: its other readers wait for the same sources.
    reopening: Mutex<()>,
    /// Bytes that it took when it was first opened.
    bytes: u64,
    /// When it was last read, on the clock of all virtual files.
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
    fn of(virtual_file: &VirtualFile) -> Footprint {
        Footprint {
            descriptors: (virtual_file.source_files().len() * DESCRIPTORS_PER_FILE) as u64,
            bytes: virtual_file.memory_bytes(),
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

/// All of them.
pub struct OpenVirtualFiles {
    view: Arc<View>,
    cache: Arc<Cache>,
    /// By number of inode, and how often each is open.
    open: Mutex<HashMap<u64, (Arc<OpenVirtualFile>, usize)>>,
    /// What they may hold together.
    limit: Footprint,
    clock: AtomicU64,
    /// Bytes of virtual files that are being opened again just now.
    parsing: Mutex<u64>,
    parsed: Condvar,
}

/// How long a parse waits for others to give memory back. Longer would let a source that hangs block others.
const PARSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Descriptors for everything else: directories, files passed through, the device.
const RESERVED_DESCRIPTORS: u64 = 128;

/// How often a source is opened: for the page cache, past it, and for reads of which the kernel reads nothing ahead.
const DESCRIPTORS_PER_FILE: usize = 3;

/// A parse that counts among those that are under way.
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
    /// Open virtual files may take `bytes` together; a single one may take more.
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

    /// Opens a virtual file once more. One that is open already is verified to be what its sources are.
    ///
    /// Unless the cache is valid, nothing that was read before is used: the sources are read anew, and all handles
    /// read that from now on.
    pub fn open(
        &self,
        number: u64,
        shown: &Arc<ShownFile>,
        is_cache_valid: bool,
    ) -> Result<Arc<OpenVirtualFile>, view::ViewError> {
        let known = || lock(&self.open).get(&number).map(|(open, _)| Arc::clone(open));
        let known = is_cache_valid.then(known).flatten();
        let (opened, reader) = match known {
            Some(open) => {
                let served = self.resident_or_reopened(&open)?;
                (
                    open,
                    OpenReader {
                        footprint: Footprint::of(served.virtual_file()),
                        cached_file: served,
                    },
                )
            }
            None => {
                let reader = self.open_reader(shown)?;
                let files = reader.cached_file.virtual_file().source_files();
                let device = files.first().map_or(0, |file| file.identity().dev);
                let used = AtomicU64::new(self.tick());
                let shown = Arc::clone(shown);
                let own = Mutex::new(Some(reader.clone()));
                let (reopening, bytes) = (Mutex::default(), reader.footprint.bytes);
                let open = OpenVirtualFile {
                    shown,
                    device,
                    reader: own,
                    reopening,
                    bytes,
                    last_read: used,
                };
                (Arc::new(open), reader)
            }
        };
        reader.cached_file.reader().check_all_states_unchanged().map_err(view::ViewError::from)?;
        let mut open = lock(&self.open);
        let (shared, count) = open.entry(number).or_insert_with(|| (Arc::clone(&opened), 0));
        *count += 1;
        let shared = Arc::clone(shared);
        drop(open);
        if !is_cache_valid && !Arc::ptr_eq(&shared, &opened) {
            let old = lock(&shared.reader).replace(reader);
            // Its blocks are dropped and its files closed outside of the lock.
            drop(old);
        }
        Ok(shared)
    }

    pub fn close(&self, number: u64) {
        let mut open = lock(&self.open);
        let Some((_, count)) = open.get_mut(&number) else { return };
        *count -= 1;
        if *count == 0 {
            let gone = open.remove(&number);
            drop(open);
            // Closing files can take its time.
            drop(gone);
        }
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// The reader of a virtual file, unless it was evicted.
    pub fn resident(&self, open: &OpenVirtualFile) -> Option<Arc<CachedFile>> {
        open.last_read.store(self.tick(), Ordering::Relaxed);
        lock(&open.reader).as_ref().map(|reader| Arc::clone(&reader.cached_file))
    }

    /// The reader of a virtual file. After an eviction it is opened again, which may wait for the sources.
    pub fn resident_or_reopened(
        &self,
        open: &OpenVirtualFile,
    ) -> Result<Arc<CachedFile>, view::ViewError> {
        if let Some(served) = self.resident(open) {
            return Ok(served);
        }
        let _reopening = lock(&open.reopening);
        // Another thread may have opened it in between.
        if let Some(served) = self.resident(open) {
            return Ok(served);
        }
        let _turn = self.wait_to_parse(open.bytes);
        let new = self.open_reader(&open.shown)?;
        let mut reader = lock(&open.reader);
        Ok(Arc::clone(&reader.get_or_insert(new).cached_file))
    }

    /// Waits until the virtual files that are being parsed again leave room for one more in the budget.
    fn wait_to_parse(&self, bytes: u64) -> ParseTicket<'_> {
        let is_full = |parsing: &mut u64| *parsing > 0 && *parsing + bytes > self.limit.bytes;
        let waited = self.parsed.wait_timeout_while(lock(&self.parsing), PARSE_TIMEOUT, is_full);
        let (mut parsing, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *parsing += bytes;
        ParseTicket { files: self, bytes }
    }

    fn open_reader(&self, shown: &ShownFile) -> Result<OpenReader, view::ViewError> {
        let virtual_file = self.view.virtual_file(shown)?;
        let footprint = Footprint::of(&virtual_file);
        self.make_room(footprint);
        let reader = Arc::new(virtual_file.open()?);
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

    /// How many are open, and how many bytes they hold.
    pub fn usage(&self) -> (u64, u64) {
        let open = lock(&self.open);
        let bytes = |open: &OpenVirtualFile| Some(lock(&open.reader).as_ref()?.footprint.bytes);
        let held = open.values().filter_map(|(open, _)| bytes(open));
        (open.len() as u64, held.sum())
    }
}
