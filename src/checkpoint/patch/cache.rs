//! The decoded patches of all tensors of this process, within a memory limit.
//!
//! One thread decodes a patch, and others that need it wait. The least recently used patches are evicted, and decoded again
//! when they are needed. No lock is held while a patch is decoded.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};

use lru::LruCache;

use crate::checkpoint::tensor::PatchId;
use crate::threads::lock;

use super::pages::Patch;

/// The default limit. Changes of 2 % of 1 GiB take some 60 MiB.
const DEFAULT_LIMIT_BYTES: u64 = 128 << 20;

static PATCH_CACHE: LazyLock<PatchCache> = LazyLock::new(|| PatchCache::new(DEFAULT_LIMIT_BYTES));

/// The cache that all checkpoints of this process share.
pub fn patch_cache() -> &'static PatchCache {
    &PATCH_CACHE
}

/// Sets the limit for the decoded changes of all tensors of this process.
pub fn set_patch_limit(bytes: u64) {
    PATCH_CACHE.set_limit(|_| bytes);
}

/// Lowers the limit to at most so many bytes.
pub fn lower_patch_limit(bytes: u64) {
    PATCH_CACHE.set_limit(|limit| limit.min(bytes));
}

/// Decoded patches within a limit.
#[derive(Debug)]
pub struct PatchCache {
    state: Mutex<CacheState>,
    /// Signalled when a thread has decoded a patch, or failed to.
    decoded: Condvar,
}

#[derive(Debug)]
struct CacheState {
    limit_bytes: u64,
    /// Bytes of the entries, and of what is being decoded.
    used_bytes: u64,
    entries: LruCache<PatchId, Arc<Patch>>,
    /// Patches that are being decoded, each with the process that does it: a forked child must not wait for threads
    /// that it does not have.
    decoding: HashMap<PatchId, u32>,
}

impl CacheState {
    /// Evicts entries until so many bytes more fit into the limit. Returns whether they fit.
    fn make_room(&mut self, bytes: u64) -> bool {
        while self.used_bytes + bytes > self.limit_bytes {
            let Some((_, oldest)) = self.entries.pop_lru() else { return false };
            self.used_bytes -= oldest.memory_bytes();
        }
        true
    }
}

impl PatchCache {
    pub fn new(limit_bytes: u64) -> PatchCache {
        let (entries, decoding) = (LruCache::unbounded(), HashMap::new());
        let state = CacheState { limit_bytes, used_bytes: 0, entries, decoding };
        PatchCache { state: Mutex::new(state), decoded: Condvar::new() }
    }

    /// Sets the limit, and evicts entries above it. The memory of a patch in use is freed by its last reader.
    fn set_limit(&self, new_limit: impl FnOnce(u64) -> u64) {
        let mut state = lock(&self.state);
        state.limit_bytes = new_limit(state.limit_bytes);
        state.make_room(0);
    }

    /// The changes of a tensor around a byte: those that are kept, or those that `decode` gives.
    pub fn get_or_decode<E>(
        &self,
        id: PatchId,
        at: u64,
        decode: impl FnOnce(&mut PatchAllowance<'_>) -> Result<Patch, E>,
    ) -> Result<Arc<Patch>, E> {
        let process = std::process::id();
        let mut state = lock(&self.state);
        loop {
            if let Some(patch) = state.entries.get(&id).filter(|patch| patch.range().contains(&at))
            {
                return Ok(Arc::clone(patch));
            }
            if state.decoding.get(&id) != Some(&process) {
                break;
            }
            state = self.decoded.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.decoding.insert(id, process);
        drop(state);
        let mut turn = DecodingTurn { id, allowance: PatchAllowance { cache: self, bytes: 0 } };
        let patch = Arc::new(decode(&mut turn.allowance)?);
        turn.keep(&patch);
        Ok(patch)
    }
}

/// The exclusive right of a thread to decode a patch.
struct DecodingTurn<'a> {
    id: PatchId,
    allowance: PatchAllowance<'a>,
}

impl DecodingTurn<'_> {
    fn keep(&mut self, patch: &Arc<Patch>) {
        let bytes = patch.memory_bytes();
        let mut state = lock(&self.allowance.cache.state);
        state.used_bytes -= std::mem::take(&mut self.allowance.bytes);
        if let Some(former) = state.entries.pop(&self.id) {
            state.used_bytes -= former.memory_bytes();
        }
        if state.make_room(bytes) {
            state.used_bytes += bytes;
            state.entries.put(self.id, Arc::clone(patch));
        }
    }
}

impl Drop for DecodingTurn<'_> {
    fn drop(&mut self) {
        let cache = self.allowance.cache;
        lock(&cache.state).decoding.remove(&self.id);
        cache.decoded.notify_all();
    }
}

/// The memory that a patch takes while it is decoded, counted against the limit.
#[derive(Debug)]
pub struct PatchAllowance<'a> {
    cache: &'a PatchCache,
    bytes: u64,
}

impl PatchAllowance<'_> {
    /// Changes the allowance to so many bytes, if the limit permits. Returns whether it did.
    pub fn resize(&mut self, bytes: u64) -> bool {
        if bytes <= self.bytes {
            self.force(bytes);
            return true;
        }
        let mut state = lock(&self.cache.state);
        let more = bytes - self.bytes;
        let has_room = state.make_room(more);
        if has_room {
            state.used_bytes += more;
            self.bytes = bytes;
        }
        has_room
    }

    /// Changes the allowance to so many bytes, whatever the limit.
    pub fn force(&mut self, bytes: u64) {
        if bytes != self.bytes {
            let mut state = lock(&self.cache.state);
            state.used_bytes = state.used_bytes - self.bytes + bytes;
            self.bytes = bytes;
        }
    }
}

impl Drop for PatchAllowance<'_> {
    fn drop(&mut self) {
        lock(&self.cache.state).used_bytes -= self.bytes;
    }
}
