//! The statistics of a mount: the JSON of its root's attribute `user.ckptfs.stats`.
//!
//! `ckptfs status` and the metrics page read them. Fields may be added but never change their meaning, and readers
//! ignore fields that they do not know.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::source::RequestCounters;

/// Gives the statistics of a mount at any time, without waiting.
pub type StatsReporter = Arc<dyn Fn() -> MountStats + Send + Sync>;

/// The attribute of a mount's root that holds the statistics.
pub const STATS_ATTRIBUTE: &str = "user.ckptfs.stats";

/// The largest attribute that the kernel allows.
pub const MAX_STATS_BYTES: usize = 64 * 1024;

/// The version of the JSON format.
pub const STATS_VERSION: u32 = 1;

/// The state of a mount, and its counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountStats {
    /// The version of the JSON format.
    pub version: u32,
    /// The version of the program that serves the mount.
    pub ckptfs: String,
    /// The process that serves the mount.
    pub pid: u32,
    /// The file or directory that it shows.
    pub source: PathBuf,
    /// Whether the source directory was removed. The mount stays empty even if another one is created at its path.
    pub source_removed: bool,
    /// The path that it was mounted at.
    pub mountpoint: PathBuf,
    /// The time when it was mounted, in seconds since 1970.
    pub started: u64,
    /// Seconds since it was mounted.
    pub uptime_s: u64,
    /// Whether the kernel reads unchanged files by itself.
    pub passthrough: bool,
    /// Bytes that reads returned.
    pub bytes_served: u64,
    /// Reads that returned bytes.
    pub reads: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Why the last of them failed, the newest first.
    pub last_errors: Vec<RecentError>,
    /// Why files of the recipe are not shown.
    pub refused_views: Vec<String>,
    /// Where the daemon logs.
    pub log: LogStats,
    /// Counts of virtual files.
    pub virtual_files: VirtualFileStats,
    /// The memory of the whole mount.
    pub memory: MemoryStats,
    /// Counters of the cache.
    pub cache: CacheStats,
    /// Counters of prefetched blocks.
    pub prefetch: PrefetchStats,
    /// Counters of requests to the store that it shows.
    pub store: RequestCounters,
}

/// An error that programs got from a mount, and how often.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RecentError {
    /// The time of the last one, in seconds since 1970.
    pub time: u64,
    /// How often it happened.
    pub count: u64,
    /// The path in the mount.
    pub path: String,
    /// The name of the error that the program got, such as EIO.
    pub errno: String,
    /// What happened, to which file.
    pub message: String,
    /// What the user can do about it.
    pub remedy: String,
}

/// Where the daemon of a mount logs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogStats {
    /// `journal`, `syslog`, `file`, `stderr` or `none`; empty if the program does not say.
    pub target: String,
    /// The path of the file; of any other target `None`.
    pub path: Option<PathBuf>,
}

/// Counts of virtual files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VirtualFileStats {
    /// Shown in the directories that were listed or looked up so far.
    pub known: u64,
    /// Open at present.
    pub open: u64,
    /// Checkpoints that are refused, and not shown.
    pub refused: u64,
}

/// The memory of a mount in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryStats {
    /// The memory that it may take.
    pub budget: u64,
    /// The memory that it takes now.
    pub held: u64,
}

/// Counters of the cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheStats {
    /// Reads that were served from memory.
    pub hits: u64,
    /// Reads that waited for a disk.
    pub misses: u64,
    /// The memory that blocks may take.
    pub budget_bytes: u64,
    /// The memory that blocks take now.
    pub held_bytes: u64,
}

/// Counters of blocks that were prefetched.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefetchStats {
    /// Blocks that were prefetched.
    pub fetched: u64,
    /// Prefetched blocks that a read used.
    pub used: u64,
    /// Prefetched blocks that were dropped unused.
    pub wasted: u64,
    /// Prefetched blocks that an access trace named.
    pub replayed: u64,
}

impl MountStats {
    /// The JSON of the attribute. Bytes of paths that are not UTF-8 are replaced. The oldest errors, then the last refused
    /// views, and then the path of the log, are left out if the whole would not fit.
    pub fn to_json(&self) -> Vec<u8> {
        let text = |path: &PathBuf| PathBuf::from(path.to_string_lossy().into_owned());
        let mut printable = MountStats {
            source: text(&self.source),
            mountpoint: text(&self.mountpoint),
            ..self.clone()
        };
        printable.log.path = printable.log.path.as_ref().map(text);
        loop {
            // Numbers and valid text always serialise.
            let json = serde_json::to_vec(&printable).unwrap_or_default();
            if json.len() <= MAX_STATS_BYTES
                || printable.last_errors.pop().is_none()
                    && printable.refused_views.pop().is_none()
                    && printable.log.path.take().is_none()
            {
                return json;
            }
        }
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
    fn the_oldest_errors_are_left_out_where_all_do_not_fit() {
        let error = |n: u64| RecentError {
            time: n,
            path: "\u{1}".repeat(1_025),
            message: "\u{1}".repeat(1_025),
            ..RecentError::default()
        };
        let path = PathBuf::from("\u{1}".repeat(4_095));
        let log = LogStats { target: "file".to_owned(), path: Some(path.clone()) };
        let last_errors = (0..16).rev().map(error).collect();
        let stats = MountStats { last_errors, log, ..MountStats::default() };
        let found = serde_json::from_slice::<MountStats>(&stats.to_json()).unwrap();
        let times: Vec<u64> = found.last_errors.iter().map(|error| error.time).collect();
        assert_eq!(times, [15, 14, 13]);
        assert!(found.log.path.is_some());
        let stats = MountStats { source: path.clone(), mountpoint: path, ..stats };
        let json = stats.to_json();
        assert!(json.len() <= MAX_STATS_BYTES, "{}", json.len());
        let found = serde_json::from_slice::<MountStats>(&json).unwrap();
        assert_eq!(
            (found.last_errors.len(), found.log.path, &*found.log.target),
            (0, None, "file")
        );
    }

    #[test]
    fn later_versions_can_be_read() {
        let later = br#"{"version": 2, "pid": 7, "cache": {"hits": 3, "new": {}}, "more": []}"#;
        let stats: MountStats = serde_json::from_slice(later).unwrap();
        assert_eq!((stats.version, stats.pid, stats.cache.hits), (2, 7, 3));
    }
}
