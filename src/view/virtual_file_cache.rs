//! Virtual files that nothing has open, kept while there is room. Reopening one parses nothing.

use std::sync::{Arc, Mutex};

use lru::LruCache;

use crate::threads::lock;
use crate::virtual_file::{Digest, VirtualFile};

/// The virtual files that were used last, by identity.
#[derive(Debug)]
pub struct VirtualFileCache {
    limit_bytes: u64,
    lru: Mutex<VirtualFileLru>,
}

#[derive(Debug)]
struct VirtualFileLru {
    files: LruCache<Digest, Arc<VirtualFile>>,
    used_bytes: u64,
}

impl VirtualFileCache {
    pub fn new(limit_bytes: u64) -> VirtualFileCache {
        let lru = VirtualFileLru { files: LruCache::unbounded(), used_bytes: 0 };
        VirtualFileCache { limit_bytes, lru: Mutex::new(lru) }
    }

    pub fn get(&self, identity: Digest) -> Option<Arc<VirtualFile>> {
        lock(&self.lru).files.get(&identity).cloned()
    }

    pub fn insert(&self, file: &Arc<VirtualFile>) {
        let weight = file.memory_bytes();
        if weight > self.limit_bytes {
            return;
        }
        let mut lru = lock(&self.lru);
        if lru.files.put(file.identity(), Arc::clone(file)).is_none() {
            lru.used_bytes += weight;
        }
        let mut evicted = Vec::new();
        while lru.used_bytes > self.limit_bytes {
            let Some((_, oldest)) = lru.files.pop_lru() else { break };
            lru.used_bytes -= oldest.memory_bytes();
            evicted.push(oldest);
        }
        // Freeing a large virtual file takes a while, so the lock goes first.
        drop(lru);
    }

    pub fn used_bytes(&self) -> u64 {
        lock(&self.lru).used_bytes
    }
}
