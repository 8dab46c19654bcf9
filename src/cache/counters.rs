//! Counts what the cache did, and what it holds.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the start, but for `held_bytes` and `budget_bytes`, which are of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct CacheCounters {
    /// Reads that were not empty: hits, misses, cached and refused together.
    pub reads: u64,
    /// Reads answered from blocks, or from memory that the virtual file holds.
    pub hits: u64,
    /// Reads that had to wait for a disk.
    pub misses: u64,
    /// Reads answered from the sources' own page cache.
    pub cached: u64,
    /// Reads of a virtual file whose sources are known to have changed.
    pub refused: u64,
    /// Reads answered with an error, those refused among them.
    pub errors: u64,
    /// Blocks filled before any read requested them.
    pub prefetched: u64,
    /// Prefetched blocks that a read then requested.
    pub prefetch_used: u64,
    /// Prefetched blocks that were evicted before any read requested them.
    pub prefetch_wasted: u64,
    /// Prefetched blocks that the access trace of an earlier load had next.
    pub replayed: u64,
    /// Bytes of buffers held now.
    pub held_bytes: u64,
    /// The limit of `held_bytes`.
    pub budget_bytes: u64,
    /// Bytes read past the page cache.
    pub direct_bytes: u64,
    /// Bytes read through the page cache, from disk or not.
    pub buffered_bytes: u64,
    /// Bytes answered from the sources' own page cache.
    pub cached_bytes: u64,
}

/// The counts of [`CacheCounters`], which any thread may increment.
#[derive(Debug, Default)]
pub(super) struct AtomicCounters {
    pub reads: Counter,
    pub hits: Counter,
    pub misses: Counter,
    pub cached: Counter,
    pub refused: Counter,
    pub errors: Counter,
    pub prefetched: Counter,
    pub prefetch_used: Counter,
    pub prefetch_wasted: Counter,
    pub replayed: Counter,
    pub direct_bytes: Counter,
    pub buffered_bytes: Counter,
    pub cached_bytes: Counter,
}

#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn increment(&self) {
        self.add(1);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl AtomicCounters {
    /// The counts now, without `held_bytes` and `budget_bytes`.
    pub fn snapshot(&self) -> CacheCounters {
        CacheCounters {
            reads: self.reads.get(),
            hits: self.hits.get(),
            misses: self.misses.get(),
            cached: self.cached.get(),
            refused: self.refused.get(),
            errors: self.errors.get(),
            prefetched: self.prefetched.get(),
            prefetch_used: self.prefetch_used.get(),
            prefetch_wasted: self.prefetch_wasted.get(),
            replayed: self.replayed.get(),
            held_bytes: 0,
            budget_bytes: 0,
            direct_bytes: self.direct_bytes.get(),
            buffered_bytes: self.buffered_bytes.get(),
            cached_bytes: self.cached_bytes.get(),
        }
    }
}
