//! Answers reads of open virtual files: from memory, from the page cache, and ahead of time from the disk.
//!
//! In: a [`VirtualFileReader`], and ranges of its file. Out: their bytes, all of them or an error, given to a callback
//! when they are there; and [`CacheCounters`].
//!
//! Sources are read past the page cache into blocks of at most 1 MiB, whose buffers are used again. A range that the
//! sources' page cache holds is copied from there once, and kept nowhere. Memory has one limit
//! ([`CacheLimits::memory_bytes`]); under pressure reads get slower. Bytes are checked to be those that were parsed
//! after they are read, and again before each reply.
//!
//! [`CachedFile::read`] is the way in. `plan` cuts a read into ranges of sources, `block` has the blocks, `fill`
//! fills them, and `io` reads the sources, on threads of their device. `prefetch` knows what to fetch ahead, and no other
//! room does.

mod ablation;
mod block;
mod counters;
mod error;
mod file;
mod fill;
mod io;
mod plan;
mod prefetch;
mod used_ranges;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::checkpoint;
use crate::log_throttle::LogThrottle;
use crate::virtual_file::VirtualFileReader;

pub use block::reply::ReplyCallback;
pub use counters::CacheCounters;
pub use error::CacheError;
pub use file::CachedFile;

use block::table::BlockTable;
use counters::AtomicCounters;
use fill::BlockFiller;
use io::executor::ExecutorSet;
use io::source::{FileSources, PreferredReadahead};
use prefetch::Prefetcher;
use prefetch::trace_store::TraceStore;

/// How much memory the cache may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Bytes of all buffers, those that replies are put together in among them. Beside it each thread has scratch
    /// memory.
    pub memory_bytes: u64,
    /// Maximum readahead per stream; `None` for the source's preference.
    pub readahead_bytes: Option<u64>,
}

impl Default for CacheLimits {
    fn default() -> Self {
        CacheLimits { memory_bytes: DEFAULT_MEMORY_BYTES, readahead_bytes: None }
    }
}

/// Loading 201 tensors, each touched first, held 350 MiB when no block had to be evicted.
const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;

/// Default of the maximum readahead per stream, for files that lie in no store. A disk of some GB/s reads this in about
/// ten milliseconds, longer than a reader waits for anything else. With this and blocks of 1 MiB loaders beat ext4.
pub(crate) const DEFAULT_READAHEAD_BYTES: u64 = 32 << 20;

/// The first window of a stream is a block: most streams end soon.
const LOCAL_WINDOW_BYTES: PreferredReadahead =
    PreferredReadahead { first: 1 << 20, max: DEFAULT_READAHEAD_BYTES, predicts_tensors: false };

/// Maximum bytes of the memory limit that blocks leave to requests of stores: up to 64 answers of some 400 KB each.
const MAX_STORE_RESERVE_BYTES: u64 = 48 << 20;

/// The part of the memory limit that decoded changes of deltas may take: a quarter. Changes of 2 % of the values of a
/// model take about a fifteenth of its size.
const PATCH_DIVISOR: u64 = 4;

/// The part of a smaller limit that blocks leave to requests of stores: an eighth.
const STORE_RESERVE_DIVISOR: u64 = 8;

/// The order of each load is kept, and prefetched the next time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// The directory of the access traces. It is not used if this user may not write there, or others may.
    pub folder: PathBuf,
    /// Also trace virtual files that lie in no store. On a fast disk they load no sooner for it.
    pub local_files: bool,
}

/// The traces that are kept.
struct Traces {
    store: Arc<TraceStore>,
    /// Whether virtual files that lie in no store have some, too.
    has_local_files: bool,
}

/// The cache of all open virtual files of a program.
pub struct Cache {
    blocks: Arc<BlockTable>,
    counters: Arc<AtomicCounters>,
    readahead_bytes: Option<u64>,
    traces: Option<Traces>,
    executors: Arc<ExecutorSet>,
    file_count: AtomicU64,
    has_store: AtomicBool,
    has_patches: AtomicBool,
    log_throttle: Arc<LogThrottle>,
}

impl Cache {
    /// Creates a cache, which starts no thread before a file is opened. Without `traces`, no order is kept.
    pub fn new(limits: CacheLimits, traces: Option<TraceOptions>) -> Arc<Cache> {
        let CacheLimits { memory_bytes, readahead_bytes } = limits;
        let counters = Arc::new(AtomicCounters::default());
        let traces = traces.map(|TraceOptions { folder, local_files }| Traces {
            store: TraceStore::new(folder),
            has_local_files: local_files,
        });
        Arc::new(Cache {
            blocks: Arc::new(BlockTable::new(memory_bytes, Arc::clone(&counters))),
            counters,
            readahead_bytes,
            traces,
            executors: Arc::default(),
            file_count: AtomicU64::new(0),
            has_store: AtomicBool::new(false),
            has_patches: AtomicBool::new(false),
            log_throttle: Arc::default(),
        })
    }

    /// Serves reads of an open virtual file, until the last clone of the result is dropped.
    pub fn open(&self, reader: Arc<VirtualFileReader>) -> Arc<CachedFile> {
        // The bytes are also in this cache, and in the pages of the mounted file.
        reader.origins().files().for_each(|file| file.keep_blocks_out_of_page_cache());
        let file_id = self.file_count.fetch_add(1, Ordering::Relaxed);
        let file = Arc::clone(reader.virtual_file());
        let is_patched = file.origins().iter().any(|origin| origin.patched().is_some());
        self.has_patches.fetch_or(is_patched, Ordering::Relaxed);
        let (executors, counters) = (Arc::clone(&self.executors), Arc::clone(&self.counters));
        let log_throttle = Arc::clone(&self.log_throttle);
        let memory_limit = self.blocks.memory_limit();
        let sources =
            FileSources::new(reader, executors, memory_limit, Arc::clone(&counters), log_throttle);
        let preferred = sources.preferred_readahead();
        let is_store = preferred.is_some();
        self.has_store.fetch_or(is_store, Ordering::Relaxed);
        let traces = self.traces.as_ref().filter(|traces| is_store || traces.has_local_files);
        let traces = traces.map(|traces| &traces.store);
        let preferred = preferred.unwrap_or(LOCAL_WINDOW_BYTES);
        let readahead =
            PreferredReadahead { max: self.readahead_bytes.unwrap_or(preferred.max), ..preferred };
        let prefetcher = Prefetcher::new(&file, traces, readahead);
        let blocks = Arc::clone(&self.blocks);
        let filler = BlockFiller::new(file_id, blocks, sources, counters);
        Arc::new(CachedFile::new(filler, prefetcher))
    }

    /// What was done so far, and is held now.
    pub fn counters(&self) -> CacheCounters {
        let (held_bytes, budget_bytes) = self.blocks.held_and_limit();
        CacheCounters { held_bytes, budget_bytes, ..self.counters.snapshot() }
    }

    /// Sets the memory limit. Once a file of a store was opened, blocks get it less an eighth, at most 48 MiB. Once one
    /// that deltas change was opened, a quarter is for decoded changes. What is held above it is freed at once, but for
    /// buffers in use.
    pub fn set_memory_limit(&self, bytes: u64) {
        let patch_bytes = bytes / PATCH_DIVISOR;
        checkpoint::set_patch_limit(patch_bytes);
        let has_patches = self.has_patches.load(Ordering::Relaxed);
        let bytes = bytes - if has_patches { patch_bytes } else { 0 };
        let has_store = self.has_store.load(Ordering::Relaxed);
        let reserved = if has_store {
            (bytes / STORE_RESERVE_DIVISOR).min(MAX_STORE_RESERVE_BYTES)
        } else {
            0
        };
        self.blocks.set_memory_limit(bytes - reserved);
    }

    /// Writes the access traces of all open files too, and waits up to half a second for all that are being written.
    pub fn flush_traces(&self) {
        self.traces.iter().for_each(|traces| traces.store.flush());
    }

    /// Answers all waiting reads with [`CacheError::Stopped`], and from now on every read that would have to wait.
    pub fn stop(&self) {
        self.executors.stop();
    }
}
