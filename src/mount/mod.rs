//! The mount: a checkpoint, or a directory of them, as files that any program reads.
//!
//! In: [`MountOptions`]. Out: a [`MountSession`] that answers the kernel from threads of its own until it is
//! unmounted. Around it: [`lifecycle::attach`]ing to the tree, asking a mount whether it
//! lives ([`lifecycle::liveness`], [`lifecycle::stuck_paths`]), taking dead ones away ([`lifecycle::stale_mounts`]), and the numbers of a mount ([`stats`]).

pub(crate) mod error;
mod fs;
pub mod lifecycle;
pub mod stats;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub use error::MountError;
pub use lifecycle::session::{MountSession, StatsReporter};
pub use stats::MountStats;

use crate::cache::{Cache, CacheLimits};
use crate::checkpoint;
use crate::log_throttle::LogThrottle;
use crate::view::{self, KeepRules, View};
use fs::{FuseFilesystem, HandleTable, Listings, MountCounters, OwnerOverride, SourceWatch};
use lifecycle::{attach, descriptors, mountpoint, session, stale_mounts};

/// What to mount, where, and how.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// A checkpoint file, or a directory.
    pub source: PathBuf,
    /// A directory: empty, or the source itself.
    pub mountpoint: PathBuf,
    /// Let other users use the mount.
    pub allow_other: bool,
    /// The owner that files show, instead of their own. Root only.
    pub uid: Option<u32>,
    /// The group that files show, instead of their own. Root only.
    pub gid: Option<u32>,
    /// What all caches together may hold, in bytes, [`MIN_MEMORY_BYTES`] at the least; `None` is the
    /// default budget.
    pub memory: Option<u64>,
    /// Threads that answer the kernel; [`MAX_THREADS`] at the most.
    pub threads: Option<usize>,
    /// The largest window that is read ahead of one reader, in bytes: 0 for none, or
    /// [`MIN_READAHEAD_BYTES`] at the least.
    pub readahead: Option<u64>,
    /// Leave reading of unchanged files to the kernel itself, where it can.
    pub passthrough: bool,
    /// The folder where the order of each load is remembered, to read the next one ahead; `None`
    /// remembers nothing. What this user may not write, or others may, is not used.
    pub trace_dir: Option<PathBuf>,
    /// Mount over what is in the mountpoint.
    pub nonempty: bool,
    /// Show the files that virtual files are made of beside them.
    pub show_originals: bool,
    /// Names (globs) that are never shown as virtual files.
    pub keep: KeepRules,
    /// How checkpoints are read.
    pub checkpoint: checkpoint::ParseOptions,
}

impl MountOptions {
    /// The defaults for a source and a mountpoint.
    pub fn new(source: PathBuf, mountpoint: PathBuf) -> MountOptions {
        MountOptions {
            source,
            mountpoint,
            allow_other: false,
            uid: None,
            gid: None,
            memory: None,
            threads: None,
            readahead: None,
            passthrough: true,
            trace_dir: None,
            nonempty: false,
            show_originals: false,
            keep: KeepRules::default(),
            checkpoint: checkpoint::ParseOptions::default(),
        }
    }
}

/// What the answers of a mount are made from, and its numbers.
struct MountContext {
    view: Arc<View>,
    source: PathBuf,
    counters: Arc<MountCounters>,
    source_watch: Arc<SourceWatch>,
    /// What was logged of files that cannot be looked up or opened.
    log_throttle: LogThrottle,
    stats: StatsReporter,
}

impl fmt::Debug for MountContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("source", &self.source).finish_non_exhaustive()
    }
}

/// More threads than processors only take turns, and no machine of today has more of those for one mount.
pub const MAX_THREADS: u16 = 256;

/// Threads that take requests from the kernel unless said otherwise: they wait for nothing, and two
/// were the fastest (docs/performance.md).
const DEFAULT_THREADS: usize = 2;

/// The largest window that is read ahead of one reader, unless said otherwise.
const DEFAULT_READAHEAD_BYTES: u64 = 32 << 20;

/// The least that can be read ahead, but for nothing: a block, for sources are read by these.
pub const MIN_READAHEAD_BYTES: u64 = 1 << 20;

/// How far the kernel itself reads ahead, where it lets us say: with its own 128 KiB a program that
/// copies out of a mapping backwards reads page by page, and loads took up to twice as long; beyond
/// this nothing is gained (docs/performance.md).
const KERNEL_READAHEAD_BYTES: u64 = 4 << 20;

/// Of the budget, one part in so many is for virtual files that nobody has open; the rest is for blocks.
const CLOSED_FILES_DIVISOR: u64 = 4;

/// Names of directories that are being listed take at most one part in so many of the budget, in addition to it.
const LISTINGS_DIVISOR: u64 = 4;

/// Room for the names of six directories of 100,000: one that is evicted is read anew for each reply.
const MIN_LISTINGS_BYTES: u64 = 16 << 20;

/// The least budget: a buffer for tensors that are gathered is 8 MiB, and virtual files want a part besides.
/// With less every read would wait for the only buffer.
pub const MIN_MEMORY_BYTES: u64 = 16 << 20;

/// The default budget is a part of the memory that nobody misses, and what no reader needs more of.
const DEFAULT_MEMORY_DIVISOR: u64 = 20;
const MAX_DEFAULT_MEMORY_BYTES: u64 = 1 << 30;

/// The memory of this machine.
pub fn machine_memory() -> u64 {
    let info = rustix::system::sysinfo();
    let all: u64 = info.totalram;
    all.saturating_mul(info.mem_unit.into())
}

/// What a mount may hold if nothing else was said.
pub fn default_memory() -> u64 {
    memory_budget(machine_memory())
}

fn memory_budget(memory: u64) -> u64 {
    (memory / DEFAULT_MEMORY_DIVISOR).clamp(MIN_MEMORY_BYTES, MAX_DEFAULT_MEMORY_BYTES)
}

/// Mounts, and returns when the mount answers.
pub fn mount(options: &MountOptions) -> Result<MountSession, MountError> {
    descriptors::require_free(&options.mountpoint)?;
    let place = mountpoint::resolve(options)?;
    let memory = options.memory.unwrap_or_else(default_memory);
    let show = view::ViewOptions {
        parse: options.checkpoint.clone(),
        show_originals: options.show_originals,
        keep: options.keep.clone(),
        cache_bytes: memory / CLOSED_FILES_DIVISOR,
    };
    // Opened before it may be mounted over.
    let view = Arc::new(View::new(&place.source, show)?);
    require_checkpoint(&place.source, &view)?;
    let readahead = options.readahead.unwrap_or(DEFAULT_READAHEAD_BYTES);
    // What is written there by way of the mount itself would wait for the mount.
    let orders = options.trace_dir.clone().filter(|orders| !place.hides(orders));
    let cache =
        Cache::new(CacheLimits { memory_bytes: memory, readahead_bytes: readahead }, orders);
    let opened =
        HandleTable::new(Arc::clone(&view), Arc::clone(&cache), memory, options.passthrough);
    let opened = Arc::new(opened);
    let counters = Arc::new(MountCounters::default());
    let standing = Arc::new(SourceWatch::new(Arc::clone(&view), place.source.clone()));
    let numbers = stats_reporter(&place, &standing, &view, &cache, &opened, &counters, memory);
    let wanted = attach::AttachRequest {
        mountpoint: &place.mountpoint,
        fsname: place.source.as_os_str(),
        allow_other: options.allow_other,
    };
    let source = place.source.clone();
    let root = Arc::clone(view.root());
    let (said, numbers_too) = (LogThrottle::default(), Arc::clone(&numbers));
    let context = MountContext {
        view,
        source,
        counters,
        source_watch: standing,
        log_throttle: said,
        stats: numbers_too,
    };
    let owner = OwnerOverride { uid: options.uid, gid: options.gid };
    let listings = Listings::new((memory / LISTINGS_DIVISOR).max(MIN_LISTINGS_BYTES) as usize);
    let filesystem = FuseFilesystem::new(Arc::new(context), Arc::clone(&opened), owner, listings)?;
    let mut config = fuser::Config::default();
    config.n_threads = Some(options.threads.unwrap_or(DEFAULT_THREADS));
    // A mount that was made and then failed is dead.
    let attached =
        attach::attach(&wanted).inspect_err(|_| drop(stale_mounts::heal(&place.mountpoint)))?;
    root.exclude_device(attached.1.device().to_raw());
    let mut mounted = session::start(filesystem, attached, config, numbers, |kernel| {
        opened.set_notifier(kernel)
    })?;
    // Agreeing with the kernel lowers it to what the kernel offers: it can be raised only now.
    mounted.is_privileged = mounted.attached().raise_readahead(KERNEL_READAHEAD_BYTES);
    Ok(mounted)
}

/// A single file is mounted for its checkpoint. One that is shown as it is was not read for that.
fn require_checkpoint(source: &Path, view: &View) -> Result<(), MountError> {
    if source.is_dir() {
        return Ok(());
    }
    let shown = view.list(Path::new(""))?.entries;
    if !shown.iter().any(|named| matches!(named.entry, view::ViewEntry::VirtualFile(_))) {
        checkpoint::open(source, &view.options().parse)?;
    }
    Ok(())
}

fn stats_reporter(
    place: &mountpoint::MountPaths,
    standing: &Arc<SourceWatch>,
    view: &Arc<View>,
    cache: &Arc<Cache>,
    opened: &Arc<HandleTable>,
    counters: &Arc<MountCounters>,
    budget: u64,
) -> StatsReporter {
    let (source, mountpoint) = (place.source.clone(), place.mountpoint.clone());
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let since = Instant::now();
    let (standing, view, cache) = (Arc::clone(standing), Arc::clone(view), Arc::clone(cache));
    let (opened, counters) = (Arc::clone(opened), Arc::clone(counters));
    Arc::new(move || {
        let known = view.counts();
        let blocks = cache.counters();
        let (open, _) = opened.virtual_file_usage();
        MountStats {
            version: stats::STATS_VERSION,
            ckptfs: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            source: source.clone(),
            source_removed: standing.is_removed(),
            mountpoint: mountpoint.clone(),
            started,
            uptime_s: since.elapsed().as_secs(),
            passthrough: opened.is_passthrough_enabled(),
            bytes_served: counters.bytes(),
            reads: counters.reads(),
            errors: counters.errors(),
            virtual_files: stats::VirtualFileStats {
                known: known.virtual_files,
                open,
                refused: known.refused,
            },
            memory: stats::MemoryStats { budget, held: opened.held_bytes() + blocks.held_bytes },
            cache: stats::CacheStats {
                hits: blocks.hits,
                misses: blocks.misses,
                budget_bytes: blocks.budget_bytes,
                held_bytes: blocks.held_bytes,
            },
            prefetch: stats::PrefetchStats {
                fetched: blocks.prefetched,
                used: blocks.prefetch_used,
                wasted: blocks.prefetch_wasted,
                replayed: blocks.replayed,
            },
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_small_on_small_machines() {
        assert_eq!(memory_budget(64 << 30), 1 << 30);
        assert_eq!(memory_budget(4_000_000_000), 200_000_000);
        assert_eq!(memory_budget(128 << 20), MIN_MEMORY_BYTES);
    }
}
