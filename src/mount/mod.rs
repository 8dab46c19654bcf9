//! The mount: a checkpoint, or a directory of them, as files that any program reads.
//!
//! In: [`Options`]. Out: a [`Mounted`] that answers the kernel from threads of its own until it is
//! unmounted. Around it: [`attach`]ing to the tree, asking a mount whether it
//! lives ([`liveness`], [`stuck_paths`]), taking dead ones away ([`stale_mounts`]), and the numbers of a mount ([`stats`]).

pub mod attach;
mod attr;
mod blocking_pool;
mod counters;
pub mod daemon;
mod denied_ops;
pub mod descriptors;
pub(crate) mod error;
mod filesystem;
pub mod fusermount;
mod handles;
mod inodes;
pub mod liveness;
mod mountpoint;
mod node_path;
mod open_images;
mod read_reply;
mod readdir;
pub mod respawn;
mod retries;
mod session;
mod source_removed;
pub mod stale_mounts;
pub mod stats;
pub mod stuck_paths;
pub mod superblock;
mod xattrs;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub use error::Error;
pub use session::{Mounted, Numbers};
pub use stats::Stats;

use crate::cache::{Cache, Limits};
use crate::checkpoint;
use crate::log_throttle::Said;
use crate::view::{self, Keep, View};
use counters::Counters;
use filesystem::Filesystem;
use handles::OpenedFiles;
use readdir::Listings;
use source_removed::Standing;

/// What to mount, where, and how.
#[derive(Clone, Debug)]
pub struct Options {
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
    /// What all caches together may hold, in bytes, [`LEAST_MEMORY`] at the least; `None` is the
    /// default budget.
    pub memory: Option<u64>,
    /// Threads that answer the kernel; [`MOST_THREADS`] at the most.
    pub threads: Option<usize>,
    /// The largest window that is read ahead of one reader, in bytes: 0 for none, or
    /// [`LEAST_READAHEAD`] at the least.
    pub readahead: Option<u64>,
    /// Leave reading of unchanged files to the kernel itself, where it can.
    pub passthrough: bool,
    /// The folder where the order of each load is remembered, to read the next one ahead; `None`
    /// remembers nothing. What this user may not write, or others may, is not used.
    pub orders: Option<PathBuf>,
    /// Mount over what is in the mountpoint.
    pub nonempty: bool,
    /// Show the files that images are made of beside them.
    pub show_originals: bool,
    /// Names (globs) that are never shown as images.
    pub keep: Keep,
    /// How checkpoints are read.
    pub checkpoint: checkpoint::Options,
}

impl Options {
    /// The defaults for a source and a mountpoint.
    pub fn new(source: PathBuf, mountpoint: PathBuf) -> Options {
        Options {
            source,
            mountpoint,
            allow_other: false,
            uid: None,
            gid: None,
            memory: None,
            threads: None,
            readahead: None,
            passthrough: true,
            orders: None,
            nonempty: false,
            show_originals: false,
            keep: Keep::default(),
            checkpoint: checkpoint::Options::default(),
        }
    }
}

/// What the answers of a mount are made from, and its numbers.
struct Context {
    view: Arc<View>,
    source: PathBuf,
    counters: Arc<Counters>,
    standing: Arc<Standing>,
    /// What was logged of files that cannot be looked up or opened.
    said: Said,
    numbers: Numbers,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("source", &self.source).finish_non_exhaustive()
    }
}

/// More threads than processors only take turns, and no machine of today has more of those for one mount.
pub const MOST_THREADS: u16 = 256;

/// Threads that take requests from the kernel unless said otherwise: they wait for nothing, and two
/// were the fastest (docs/performance.md).
const THREADS: usize = 2;

/// The largest window that is read ahead of one reader, unless said otherwise.
const READAHEAD: u64 = 32 << 20;

/// The least that can be read ahead, but for nothing: a block, for sources are read by these.
pub const LEAST_READAHEAD: u64 = 1 << 20;

/// How far the kernel itself reads ahead, where it lets us say: with its own 128 KiB a program that
/// copies out of a mapping backwards reads page by page, and loads took up to twice as long; beyond
/// this nothing is gained (docs/performance.md).
const KERNEL_READAHEAD: u64 = 4 << 20;

/// Of the budget, one part in so many is for images that nobody has open; the rest is for blocks.
const FOR_IMAGES: u64 = 4;

/// Names of directories that are being listed take at most one part in so many of the budget, in addition to it.
const FOR_LISTINGS: u64 = 4;

/// Room for the names of six directories of 100,000: one that is evicted is read anew for each reply.
const LEAST_FOR_LISTINGS: u64 = 16 << 20;

/// The least budget: a buffer for tensors that are gathered is 8 MiB, and images want a part besides.
/// With less every read would wait for the only buffer.
pub const LEAST_MEMORY: u64 = 16 << 20;

/// The default budget is a part of the memory that nobody misses, and what no reader needs more of.
const MEMORY_PART: u64 = 20;
const MEMORY_MOST: u64 = 1 << 30;

/// The memory of this machine.
pub fn machine_memory() -> u64 {
    let info = rustix::system::sysinfo();
    let all: u64 = info.totalram;
    all.saturating_mul(info.mem_unit.into())
}

/// What a mount may hold if nothing else was said.
pub fn default_memory() -> u64 {
    budget(machine_memory())
}

fn budget(memory: u64) -> u64 {
    (memory / MEMORY_PART).clamp(LEAST_MEMORY, MEMORY_MOST)
}

/// Mounts, and returns when the mount answers.
pub fn mount(options: &Options) -> Result<Mounted, Error> {
    descriptors::require(&options.mountpoint)?;
    let place = mountpoint::check(options)?;
    let memory = options.memory.unwrap_or_else(default_memory);
    let show = view::Options {
        checkpoint: options.checkpoint.clone(),
        show_originals: options.show_originals,
        keep: options.keep.clone(),
        memory: memory / FOR_IMAGES,
    };
    // Opened before it may be mounted over.
    let view = Arc::new(View::new(&place.source, show)?);
    see_that_it_is_one(&place.source, &view)?;
    let readahead = options.readahead.unwrap_or(READAHEAD);
    // What is written there by way of the mount itself would wait for the mount.
    let orders = options.orders.clone().filter(|orders| !place.hides(orders));
    let cache = Cache::new(Limits { memory, readahead }, orders);
    let opened =
        OpenedFiles::new(Arc::clone(&view), Arc::clone(&cache), memory, options.passthrough);
    let opened = Arc::new(opened);
    let counters = Arc::new(Counters::default());
    let standing = Arc::new(Standing::new(Arc::clone(&view), place.source.clone()));
    let numbers = numbers(&place, &standing, &view, &cache, &opened, &counters, memory);
    let wanted = attach::Wanted {
        mountpoint: &place.mountpoint,
        fsname: place.source.as_os_str(),
        allow_other: options.allow_other,
    };
    let source = place.source.clone();
    let root = Arc::clone(view.root());
    let (said, numbers_too) = (Said::default(), Arc::clone(&numbers));
    let context = Context { view, source, counters, standing, said, numbers: numbers_too };
    let owner = attr::Owner { uid: options.uid, gid: options.gid };
    let listings = Listings::new((memory / FOR_LISTINGS).max(LEAST_FOR_LISTINGS) as usize);
    let filesystem = Filesystem::new(Arc::new(context), Arc::clone(&opened), owner, listings)?;
    let mut config = fuser::Config::default();
    config.n_threads = Some(options.threads.unwrap_or(THREADS));
    // A mount that was made and then failed is dead.
    let attached =
        attach::attach(&wanted).inspect_err(|_| drop(stale_mounts::heal(&place.mountpoint)))?;
    root.is_shown_by(attached.1.device().number());
    let mut mounted =
        session::start(filesystem, attached, config, numbers, |kernel| opened.may_tell(kernel))?;
    // Agreeing with the kernel lowers it to what the kernel offers: it can be raised only now.
    mounted.is_privileged = mounted.attached().raise_readahead(KERNEL_READAHEAD);
    Ok(mounted)
}

/// A single file is mounted for its checkpoint. One that is shown as it is was not read for that.
fn see_that_it_is_one(source: &Path, view: &View) -> Result<(), Error> {
    if source.is_dir() {
        return Ok(());
    }
    let shown = view.list(Path::new(""))?.entries;
    if !shown.iter().any(|named| matches!(named.entry, view::Entry::Image(_))) {
        checkpoint::open(source, &view.options().checkpoint)?;
    }
    Ok(())
}

fn numbers(
    place: &mountpoint::Place,
    standing: &Arc<Standing>,
    view: &Arc<View>,
    cache: &Arc<Cache>,
    opened: &Arc<OpenedFiles>,
    counters: &Arc<Counters>,
    budget: u64,
) -> Numbers {
    let (source, mountpoint) = (place.source.clone(), place.mountpoint.clone());
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let since = Instant::now();
    let (standing, view, cache) = (Arc::clone(standing), Arc::clone(view), Arc::clone(cache));
    let (opened, counters) = (Arc::clone(opened), Arc::clone(counters));
    Arc::new(move || {
        let known = view.known();
        let blocks = cache.counters();
        let (open, _) = opened.images();
        Stats {
            version: stats::VERSION,
            ckptfs: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            source: source.clone(),
            source_removed: standing.is_removed(),
            mountpoint: mountpoint.clone(),
            started,
            uptime_s: since.elapsed().as_secs(),
            passthrough: opened.wants_passthrough(),
            bytes_served: counters.bytes(),
            reads: counters.reads(),
            errors: counters.errors(),
            images: stats::Images { known: known.images, open, refused: known.refused },
            memory: stats::Memory { budget, held: opened.weight() + blocks.held_bytes },
            cache: stats::Cache {
                hits: blocks.hits,
                misses: blocks.misses,
                budget_bytes: blocks.budget_bytes,
                held_bytes: blocks.held_bytes,
            },
            prefetch: stats::Prefetch {
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
        assert_eq!(budget(64 << 30), 1 << 30);
        assert_eq!(budget(4_000_000_000), 200_000_000);
        assert_eq!(budget(128 << 20), LEAST_MEMORY);
    }
}
