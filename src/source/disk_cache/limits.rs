//! How much of a disk the cache may take.

use std::path::{PathBuf, absolute};

use crate::private_folder::xdg_folder;

/// The folder of the cache, and its limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CacheOptions {
    /// The folder of the blocks; `None` without a cache.
    pub folder: Option<PathBuf>,
    /// Bytes of all blocks; by default a fifth of the disk.
    pub max_bytes: Option<u64>,
    /// The percentage of the disk that stays free.
    pub min_free_percent: u8,
}

/// The share of the disk that blocks may take where the user states none.
const DEFAULT_SHARE: u64 = 5;

/// The percentage of the disk that stays free: other programs need room, and full filesystems are slow.
const DEFAULT_MIN_FREE_PERCENT: u8 = 5;

/// The limits in bytes of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLimits {
    /// Bytes that the blocks may take together.
    pub max_bytes: u64,
    /// Bytes of the disk that stay free.
    pub min_free_bytes: u64,
}

impl CacheOptions {
    /// Options with defaults for those that are `None`.
    pub fn new(
        folder: Option<PathBuf>,
        max_bytes: Option<u64>,
        min_free_percent: Option<u8>,
    ) -> CacheOptions {
        let default_folder = || Some(xdg_folder("XDG_CACHE_HOME", ".cache")?.join("ckptfs/blocks"));
        CacheOptions {
            // A daemon changes its directory.
            folder: folder.map(|path| absolute(&path).unwrap_or(path)).or_else(default_folder),
            max_bytes,
            min_free_percent: min_free_percent.unwrap_or(DEFAULT_MIN_FREE_PERCENT),
        }
    }

    /// Options without a cache.
    pub fn disabled() -> CacheOptions {
        CacheOptions { folder: None, max_bytes: None, min_free_percent: 0 }
    }

    /// The limits on a disk of a size.
    pub fn limits(&self, disk_bytes: u64) -> DiskLimits {
        let CacheOptions { folder: _, max_bytes, min_free_percent } = *self;
        DiskLimits {
            max_bytes: max_bytes.unwrap_or(disk_bytes / DEFAULT_SHARE),
            min_free_bytes: disk_bytes / 100 * u64::from(min_free_percent),
        }
    }
}

impl DiskLimits {
    /// Whether `needed` more bytes have room.
    pub fn has_room(&self, used: u64, free: u64, needed: u64) -> bool {
        self.shortage(used, free, needed) == 0
    }

    /// Bytes to remove so that `needed` more have room, and a twentieth of the limit, so that not every block begins an
    /// eviction.
    pub fn excess(&self, used: u64, free: u64, needed: u64) -> u64 {
        self.shortage(used, free, needed).saturating_add(self.max_bytes / 20)
    }

    fn shortage(&self, used: u64, free: u64, needed: u64) -> u64 {
        let over = used.saturating_add(needed).saturating_sub(self.max_bytes);
        let under = self.min_free_bytes.saturating_add(needed).saturating_sub(free);
        over.max(under)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_removed_where_they_exceed_a_limit_or_the_disk_is_full() {
        let limits = DiskLimits { max_bytes: 1000, min_free_bytes: 100 };
        assert!(limits.has_room(500, 1000, 10) && limits.has_room(990, 110, 10));
        assert!(!limits.has_room(991, 1000, 10) && !limits.has_room(0, 109, 10));
        assert!(!limits.has_room(0, 5000, 1001));
        assert_eq!(limits.excess(1000, 1000, 10), 10 + 50);
        assert_eq!(limits.excess(500, 60, 10), 50 + 50);
        let options = CacheOptions::new(None, None, None);
        assert_eq!(options.limits(1000), DiskLimits { max_bytes: 200, min_free_bytes: 50 });
    }
}
