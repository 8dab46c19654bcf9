//! Answers reads of open virtual files: from memory, from the page cache, and ahead of time from the disk.
//!
//! In: an [`virtual_file::Reader`](Reader), and ranges of its virtual file. Out: their bytes, never fewer, given
//! to whoever asked when they are there; and [`CacheCounters`] of what it took.
//!
//! Source files are read in blocks of a mebibyte past the page cache, into buffers used over and
//! over. A range that the sources' page cache already has is copied from there once, and kept
//! nowhere. Memory has one limit ([`CacheLimits::memory_bytes`]); under pressure reads get slower. Bytes are
//! checked to be those that were parsed after they are read and again before each answer.
//!
//! [`CachedFile::classify`] is the way in; `prefetcher` says what to read ahead, `block_table` what is there, `fill`
//! reads, and `io_executor` has the threads, those of one device apart from those of the others. `access_trace` follows
//! the load before, which `trace_store` keeps on disk as `trace_format` has it.

mod block;
mod counters;
mod error;
mod file;
mod io;

mod plan;
mod prefetch;
mod scratch;
mod uncached_read;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::log_throttle::LogThrottle;
use crate::threads::lock;
use crate::virtual_file::VirtualFileReader;

pub use counters::CacheCounters;
pub use error::CacheError;
pub use file::CachedFile;
pub use io::reply::ReplyCallback;

use block::table::BlockTable;
use counters::AtomicCounters;
use io::executor::IoExecutor;
use prefetch::trace_store::TraceStore;

/// How much the cache may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Bytes of buffers at the most, those that reads are put together in among them. Besides them,
    /// each thread has what it answers from.
    pub memory_bytes: u64,
    /// Bytes read ahead of one stream at the most.
    pub readahead_bytes: u64,
}

impl Default for CacheLimits {
    fn default() -> Self {
        CacheLimits { memory_bytes: DEFAULT_MEMORY_BYTES, readahead_bytes: DEFAULT_READAHEAD_BYTES }
    }
}

/// Loading 201 tensors, each touched first, held 350 MiB when nothing had to be given up.
const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;

/// What a disk of some GB/s reads in about ten milliseconds, which is longer than a reader waits
/// for anything else. With this and blocks of a mebibyte loaders beat ext4.
const DEFAULT_READAHEAD_BYTES: u64 = 32 << 20;

/// What serves all open virtual files of a program.
pub struct Cache {
    blocks: BlockTable,
    counters: Arc<AtomicCounters>,
    readahead_bytes: u64,
    traces: Option<Arc<TraceStore>>,
    executors: Mutex<ExecutorSet>,
    file_count: AtomicU64,
    /// What was logged of files that cannot be read.
    log_throttle: LogThrottle,
}

/// The lanes by device. Memory, which is no device, has one too: gathering takes its time.
#[derive(Default)]
struct ExecutorSet {
    by_device: HashMap<Option<u64>, Arc<IoExecutor>>,
    stopped: bool,
}

impl Cache {
    /// An empty one. Nothing runs until something is opened. `orders` is the folder where the order of each
    /// load is remembered, to be fetched ahead of the next; without one, none is.
    pub fn new(limits: CacheLimits, orders: Option<PathBuf>) -> Arc<Cache> {
        let counting = Arc::new(AtomicCounters::default());
        Arc::new(Cache {
            blocks: BlockTable::new(limits.memory_bytes, Arc::clone(&counting)),
            counters: counting,
            readahead_bytes: limits.readahead_bytes,
            traces: orders.map(TraceStore::new),
            executors: Mutex::default(),
            file_count: AtomicU64::new(0),
            log_throttle: LogThrottle::default(),
        })
    }

    /// Serves an open virtual file until the last holder of the answer drops it.
    pub fn open(self: &Arc<Self>, reader: Arc<VirtualFileReader>) -> Arc<CachedFile> {
        let number = self.file_count.fetch_add(1, Ordering::Relaxed);
        Arc::new(CachedFile::new(Arc::clone(self), reader, number))
    }

    /// What was done so far and is held now.
    pub fn counters(&self) -> CacheCounters {
        let (held_bytes, budget_bytes) = self.blocks.pool.held_and_limit();
        CacheCounters { held_bytes, budget_bytes, ..self.counters.snapshot() }
    }

    /// Sets another limit. What is held above it goes at once, but for what is being read or
    /// copied just then.
    pub fn set_memory_limit(&self, bytes: u64) {
        self.blocks.set_memory_limit(bytes);
    }

    /// Remembers the loads of virtual files that are still open too, and waits a moment until all are written.
    pub fn flush_traces(&self) {
        self.traces.iter().for_each(TraceStore::flush);
    }

    /// Answers all that wait with [`CacheError::Stopped`], and from now on every read that would have
    /// to.
    pub fn stop(&self) {
        let mut lanes = self.lock();
        lanes.stopped = true;
        let all: Vec<Arc<IoExecutor>> = lanes.by_device.values().cloned().collect();
        drop(lanes);
        all.iter().for_each(|lane| lane.stop());
    }

    /// Whether a failure of this file is to be logged, or one was so lately.
    pub(crate) fn should_log(&self, path: Option<&Path>) -> bool {
        path.is_none_or(|path| self.log_throttle.should_log(path))
    }

    fn executor(&self, device: Option<u64>, local: bool) -> Arc<IoExecutor> {
        let mut lanes = self.lock();
        let stopped = lanes.stopped;
        let lane = lanes.by_device.entry(device).or_insert_with(|| IoExecutor::new(local));
        let lane = Arc::clone(lane);
        drop(lanes);
        if stopped {
            lane.stop();
        }
        lane
    }

    fn lock(&self) -> MutexGuard<'_, ExecutorSet> {
        lock(&self.executors)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // No virtual file is served any more: the threads have nothing to wait for.
        self.stop();
    }
}
