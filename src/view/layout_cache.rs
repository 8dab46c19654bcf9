//! Images that nobody has open, kept while there is room: opening one again then parses nothing.

use std::sync::{Arc, Mutex};

use lru::LruCache;

use crate::image::{Hash, Image};
use crate::threads::lock;

/// The images that were used last, by their identity.
#[derive(Debug)]
pub struct Images {
    limit: u64,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    images: LruCache<Hash, Arc<Image>>,
    bytes: u64,
}

impl Images {
    pub fn new(limit: u64) -> Images {
        Images { limit, kept: Mutex::new(Kept { images: LruCache::unbounded(), bytes: 0 }) }
    }

    pub fn get(&self, identity: Hash) -> Option<Arc<Image>> {
        lock(&self.kept).images.get(&identity).cloned()
    }

    pub fn keep(&self, image: &Arc<Image>) {
        let weight = image.weight();
        if weight > self.limit {
            return;
        }
        let mut kept = lock(&self.kept);
        if kept.images.put(image.identity(), Arc::clone(image)).is_none() {
            kept.bytes += weight;
        }
        let mut gone = Vec::new();
        while kept.bytes > self.limit {
            let Some((_, oldest)) = kept.images.pop_lru() else { break };
            kept.bytes -= oldest.weight();
            gone.push(oldest);
        }
        // A large image takes a while to free.
        drop(kept);
    }

    pub fn bytes(&self) -> u64 {
        lock(&self.kept).bytes
    }
}
