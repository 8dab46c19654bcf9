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

/// An eviction removes a twentieth of the limit more than it must.
const MARGIN_DIVISOR: u64 = 20;

/// Bytes that all blocks take, and bytes that are free on their disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceUse {
    pub used: u64,
    pub free: u64,
}

/// What the cache lacks to keep some bytes at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheShortage {
    /// The limit is too small.
    Limit {
        /// The limit, in bytes.
        max_bytes: u64,
        /// The smallest limit that is enough.
        needed_bytes: u64,
    },
    /// The disk has too little free space.
    Disk {
        /// Bytes that must become free.
        missing_bytes: u64,
    },
}

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
            max_bytes: max_bytes.unwrap_or(disk_bytes / DEFAULT_SHARE).min(disk_bytes),
            min_free_bytes: disk_bytes / 100 * u64::from(min_free_percent),
        }
    }
}

impl DiskLimits {
    /// What is lacking for `missing` more bytes, if `kept` of the used bytes must not be evicted.
    pub fn find_shortage(
        &self,
        SpaceUse { used, free }: SpaceUse,
        kept: u64,
        missing: u64,
    ) -> Option<CacheShortage> {
        let evictable = used.saturating_sub(kept);
        let lacks = |shortage: u64| match shortage {
            0 => 0,
            // An eviction removes more than it must.
            shortage => (shortage + self.eviction_margin()).saturating_sub(evictable),
        };
        let disk_lacks = lacks(self.disk_shortage(free, missing));
        if disk_lacks > 0 {
            return Some(CacheShortage::Disk { missing_bytes: disk_lacks });
        }
        if lacks(self.limit_excess(used, missing)) == 0 {
            return None;
        }
        let needed_bytes = kept.saturating_add(missing);
        let needed_limit = needed_bytes.saturating_add(needed_bytes / (MARGIN_DIVISOR - 1) + 1);
        Some(CacheShortage::Limit { max_bytes: self.max_bytes, needed_bytes: needed_limit })
    }

    /// Whether `needed` more bytes have room.
    pub fn has_room(&self, used: u64, free: u64, needed: u64) -> bool {
        self.shortage(used, free, needed) == 0
    }

    /// Bytes to remove so that `needed` more have room, and a margin on top.
    pub fn excess(&self, used: u64, free: u64, needed: u64) -> u64 {
        self.shortage(used, free, needed).saturating_add(self.eviction_margin())
    }

    fn shortage(&self, used: u64, free: u64, needed: u64) -> u64 {
        self.limit_excess(used, needed).max(self.disk_shortage(free, needed))
    }

    /// Bytes by which `needed` more exceed the limit.
    fn limit_excess(&self, used: u64, needed: u64) -> u64 {
        used.saturating_add(needed).saturating_sub(self.max_bytes)
    }

    /// Bytes that the disk lacks for `needed` more.
    fn disk_shortage(&self, free: u64, needed: u64) -> u64 {
        self.min_free_bytes.saturating_add(needed).saturating_sub(free)
    }

    /// Bytes that an eviction removes beyond the shortage, so that not every block begins one.
    fn eviction_margin(&self) -> u64 {
        self.max_bytes / MARGIN_DIVISOR
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
        // A limit above the disk would make the margin of evictions larger than all blocks.
        let options = CacheOptions::new(None, Some(1 << 40), None);
        assert_eq!(options.limits(1000), DiskLimits { max_bytes: 1000, min_free_bytes: 50 });
    }

    #[test]
    fn bytes_that_would_evict_each_other_lack_room() {
        let limits = DiskLimits { max_bytes: 1000, min_free_bytes: 100 };
        let shortage = |used, free, kept, missing| {
            limits.find_shortage(SpaceUse { used, free }, kept, missing)
        };
        let limit = |needed_bytes| Some(CacheShortage::Limit { max_bytes: 1000, needed_bytes });
        // No eviction is needed, or one of other blocks suffices.
        assert_eq!(shortage(0, 9000, 0, 1000), None);
        assert_eq!(shortage(400, 9000, 0, 950), None);
        assert_eq!(shortage(600, 9000, 300, 650), None);
        assert_eq!(shortage(400, 9000, 0, 951), limit(1002));
        assert_eq!(shortage(600, 9000, 300, 700), limit(1053));
        assert_eq!(shortage(0, 9000, 0, 1900), limit(2001));
        // The limit that is named is enough.
        let larger = DiskLimits { max_bytes: 2001, ..limits };
        assert_eq!(larger.find_shortage(SpaceUse { used: 2001, free: 9000 }, 0, 1900), None);
        assert_eq!(shortage(0, 500, 0, 400), None);
        assert_eq!(shortage(0, 500, 0, 401), Some(CacheShortage::Disk { missing_bytes: 51 }));
        assert_eq!(shortage(60, 500, 0, 401), None);
        assert_eq!(shortage(60, 500, 40, 401), Some(CacheShortage::Disk { missing_bytes: 31 }));
    }
}
