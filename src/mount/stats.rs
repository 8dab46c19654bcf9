//! The numbers of a mount, as its root's attribute `user.ckptfs.stats` gives them in JSON.
//!
//! Out: [`MountStats`]: for `ckptfs status`, the metrics page, and the loader. Fields are added, never
//! changed in meaning; a reader ignores what it does not know.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Gives the statistics of a mount at any time, without waiting.
pub type StatsReporter = Arc<dyn Fn() -> MountStats + Send + Sync>;

/// The attribute of a mount's root.
pub const STATS_ATTRIBUTE: &str = "user.ckptfs.stats";

/// The kernel takes no larger attribute.
pub const MAX_STATS_BYTES: usize = 64 * 1024;

/// The version of this form.
pub const STATS_VERSION: u32 = 1;

/// What a mount is and what it did so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountStats {
    /// The version of this form.
    pub version: u32,
    /// The version of the program that serves the mount.
    pub ckptfs: String,
    /// The process that serves the mount.
    pub pid: u32,
    /// What it shows.
    pub source: PathBuf,
    /// Whether the directory that it shows was removed: nothing is in it any more, whatever was made
    /// under its name since.
    pub source_removed: bool,
    /// Where it was mounted.
    pub mountpoint: PathBuf,
    /// When, in seconds since 1970.
    pub started: u64,
    /// Seconds since then.
    pub uptime_s: u64,
    /// Whether unchanged files are served by the kernel itself.
    pub passthrough: bool,
    /// Bytes given to readers.
    pub bytes_served: u64,
    /// Reads answered.
    pub reads: u64,
    /// Reads answered with an error.
    pub errors: u64,
    /// The checkpoints.
    pub virtual_files: VirtualFileStats,
    /// All memory of the mount.
    pub memory: MemoryStats,
    /// The cache.
    pub cache: CacheStats,
    /// Reading ahead.
    pub prefetch: PrefetchStats,
}

/// How many checkpoints there are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VirtualFileStats {
    /// Shown, as far as directories were looked at.
    pub known: u64,
    /// Held open now.
    pub open: u64,
    /// Not shown, because they were refused.
    pub refused: u64,
}

/// Memory, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryStats {
    /// What may be held.
    pub budget: u64,
    /// What is held now.
    pub held: u64,
}

/// The cache's counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheStats {
    /// Reads answered from memory.
    pub hits: u64,
    /// Reads that waited for a disk.
    pub misses: u64,
    /// What it may hold.
    pub budget_bytes: u64,
    /// What it holds now.
    pub held_bytes: u64,
}

/// Blocks read before they were asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefetchStats {
    /// Read.
    pub fetched: u64,
    /// Of these, given to a reader.
    pub used: u64,
    /// Of these, dropped unused.
    pub wasted: u64,
    /// Of those read, because a load before is remembered to have read them next.
    pub replayed: u64,
}

impl MountStats {
    /// As the attribute holds it. Paths that are not UTF-8 are shown as near as can be.
    pub fn to_json(&self) -> Vec<u8> {
        let text = |path: &PathBuf| PathBuf::from(path.to_string_lossy().into_owned());
        let shown = MountStats {
            source: text(&self.source),
            mountpoint: text(&self.mountpoint),
            ..self.clone()
        };
        // A value of numbers and valid text is always written.
        serde_json::to_vec(&shown).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn the_largest_fits_the_attribute_and_any_path_is_written() {
        let path = PathBuf::from(std::ffi::OsString::from_vec(vec![0xff; 4096]));
        let stats = MountStats { source: path.clone(), mountpoint: path, ..MountStats::default() };
        let json = stats.to_json();
        assert!(json.len() > 4096 && json.len() < MAX_STATS_BYTES, "{}", json.len());
        assert!(serde_json::from_slice::<MountStats>(&json).is_ok());
    }

    #[test]
    fn later_versions_can_be_read() {
        let later = br#"{"version": 2, "pid": 7, "cache": {"hits": 3, "new": {}}, "more": []}"#;
        let stats: MountStats = serde_json::from_slice(later).unwrap();
        assert_eq!((stats.version, stats.pid, stats.cache.hits), (2, 7, 3));
    }
}
