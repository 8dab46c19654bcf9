//! What a mount has done so far.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters that are read at any time; each is right by itself.
#[derive(Debug, Default)]
pub struct MountCounters {
    bytes: AtomicU64,
    reads: AtomicU64,
    errors: AtomicU64,
}

impl MountCounters {
    pub fn count_read(&self, bytes: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn count_error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }
}
