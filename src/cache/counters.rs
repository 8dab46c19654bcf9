//! Counts what the cache did, and what it holds.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

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
    /// Those of them that the kernel itself copied from there.
    pub lent_bytes: u64,
}

/// The counts of [`CacheCounters`], which any thread may increment.
#[derive(Debug, Default)]
pub(super) struct AtomicCounters {
    pub reads: AtomicU64,
    pub hits: AtomicU64,
    pub misses: AtomicU64,
    pub cached: AtomicU64,
    pub refused: AtomicU64,
    pub errors: AtomicU64,
    pub prefetched: AtomicU64,
    pub prefetch_used: AtomicU64,
    pub prefetch_wasted: AtomicU64,
    pub replayed: AtomicU64,
    pub direct_bytes: AtomicU64,
    pub buffered_bytes: AtomicU64,
    pub cached_bytes: AtomicU64,
    pub lent_bytes: AtomicU64,
}

impl AtomicCounters {
    /// The counts now, without `held_bytes` and `budget_bytes`.
    pub fn snapshot(&self) -> CacheCounters {
        CacheCounters {
            reads: self.reads.load(Relaxed),
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
            cached: self.cached.load(Relaxed),
            refused: self.refused.load(Relaxed),
            errors: self.errors.load(Relaxed),
            prefetched: self.prefetched.load(Relaxed),
            prefetch_used: self.prefetch_used.load(Relaxed),
            prefetch_wasted: self.prefetch_wasted.load(Relaxed),
            replayed: self.replayed.load(Relaxed),
            held_bytes: 0,
            budget_bytes: 0,
            direct_bytes: self.direct_bytes.load(Relaxed),
            buffered_bytes: self.buffered_bytes.load(Relaxed),
            cached_bytes: self.cached_bytes.load(Relaxed),
            lent_bytes: self.lent_bytes.load(Relaxed),
        }
    }
}
