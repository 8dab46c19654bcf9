//! The options of a mount, their bounds and defaults, and how its memory is divided.

use std::path::PathBuf;

use crate::cache::TraceOptions;
use crate::view::ViewOptions;

use super::memory_limit::{cgroup_limit, machine_memory};
use super::stats::LogStats;

/// What to mount, where, and how.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// A checkpoint file, or a directory.
    pub source: PathBuf,
    /// An empty directory, or the source itself.
    pub mountpoint: PathBuf,
    /// Let other users use the mount.
    pub allow_other: bool,
    /// The owner that files show instead of their own. Root only.
    pub uid: Option<u32>,
    /// The group that files show instead of their own. Root only.
    pub gid: Option<u32>,
    /// The memory for all caches together in bytes, at least [`MIN_MEMORY_BYTES`]; `None` is
    /// [`default_memory`].
    pub memory: Option<u64>,
    /// Threads that take requests from the kernel, at most [`MAX_THREADS`].
    pub threads: Option<usize>,
    /// The maximum readahead per stream in bytes: 0 for none, or at least [`MIN_READAHEAD_BYTES`].
    pub readahead: Option<u64>,
    /// Let the kernel read unchanged files by itself, where it can.
    pub passthrough: bool,
    /// The access traces that the next load replays; `None` records nothing.
    pub traces: Option<TraceOptions>,
    /// Mount over a directory that is not empty.
    pub nonempty: bool,
    /// What is shown, and how checkpoints are parsed.
    pub view: ViewOptions,
    /// Where this process logs, which the statistics tell.
    pub log: LogStats,
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
            traces: None,
            nonempty: false,
            view: ViewOptions::default(),
            log: LogStats::default(),
        }
    }
}

/// More threads than processors only take turns, and no machine of today has more processors for one mount.
pub const MAX_THREADS: u16 = 256;

/// The threads never wait, and two were the fastest of those measured.
pub const DEFAULT_THREADS: usize = 2;

/// The smallest readahead: a block, because sources are read in blocks.
pub const MIN_READAHEAD_BYTES: u64 = 1 << 20;

/// The kernel's own readahead, where it lets us set it.
///
/// With the kernel's default of 128 KiB, a program that copies out of a mapping backwards reads page by page. Loads
/// took up to twice as long. More than this gains nothing (docs/experiments.md).
pub const KERNEL_READAHEAD_BYTES: u64 = 4 << 20;

/// The part of the budget for virtual files that are not open; the rest is for blocks.
pub const CLOSED_FILES_DIVISOR: u64 = 4;

/// The part of the budget that names of directories being listed may take, in addition to it.
pub const LISTINGS_DIVISOR: u64 = 4;

/// Room for the names of six directories of 100,000. A listing that is evicted is read anew for each reply.
pub const MIN_LISTINGS_BYTES: u64 = 16 << 20;

/// The smallest budget: a buffer for gathered tensors is 8 MiB, and virtual files need a part besides. With less,
/// every read would wait for the only buffer.
pub const MIN_MEMORY_BYTES: u64 = 16 << 20;

/// The part of the usable memory that is the default budget. It is small enough that no program misses it.
const DEFAULT_MEMORY_DIVISOR: u64 = 20;

/// No reader needs a larger budget.
const MAX_DEFAULT_MEMORY_BYTES: u64 = 1 << 30;

/// The default memory budget of a mount in bytes.
pub fn default_memory() -> u64 {
    memory_budget(cgroup_limit().unwrap_or_else(machine_memory))
}

fn memory_budget(memory: u64) -> u64 {
    (memory / DEFAULT_MEMORY_DIVISOR).clamp(MIN_MEMORY_BYTES, MAX_DEFAULT_MEMORY_BYTES)
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
