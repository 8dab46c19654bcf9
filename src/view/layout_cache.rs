//! Images that nobody has open, kept while there is room: opening one again then parses nothing.

use std::sync::{Arc, Mutex};

use lru::LruCache;

use crate::threads::lock;
use crate::virtual_file::{Digest, VirtualFile};

/// The images that were used last, by their identity.
#[derive(Debug)]
pub struct VirtualFileCache {
    limit_bytes: u64,
    lru: Mutex<VirtualFileLru>,
}

#[derive(Debug)]
struct VirtualFileLru {
    files: LruCache<Digest, Arc<VirtualFile>>,
    bytes: u64,
}

impl VirtualFileCache {
    pub fn new(limit: u64) -> VirtualFileCache {
        VirtualFileCache {
            limit_bytes: limit,
            lru: Mutex::new(VirtualFileLru { files: LruCache::unbounded(), bytes: 0 }),
        }
    }

    pub fn get(&self, identity: Digest) -> Option<Arc<VirtualFile>> {
        lock(&self.lru).files.get(&identity).cloned()
    }

    pub fn insert(&self, image: &Arc<VirtualFile>) {
        let weight = image.memory_bytes();
        if weight > self.limit_bytes {
            return;
        }
        let mut kept = lock(&self.lru);
        if kept.files.put(image.identity(), Arc::clone(image)).is_none() {
            kept.bytes += weight;
        }
        let mut gone = Vec::new();
        while kept.bytes > self.limit_bytes {
            let Some((_, oldest)) = kept.files.pop_lru() else { break };
            kept.bytes -= oldest.memory_bytes();
            gone.push(oldest);
        }
        // A large image takes a while to free.
        drop(kept);
    }

    pub fn used_bytes(&self) -> u64 {
        lock(&self.lru).bytes
    }
}
