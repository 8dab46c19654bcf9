//! A bounded pool of chunks. A chunk that comes back stays busy until the copies out of it are over, and only then
//! is handed out again.
//!
//! The chunk itself decides whether it is idle. `proofs/ring` tries every interleaving of threads here.

use std::collections::VecDeque;

use super::sync::{Condvar, Mutex, lock, wait};

/// From so many busy chunks on, the first of them is awaited for a moment before another is allocated.
const BUSY_CHUNKS_TO_AWAIT: usize = 2;

/// A resource that stays busy for a while after it was given back.
pub trait Chunk {
    /// The error where it is unknown whether the chunk is busy.
    type Fault;
    /// Whether it is idle. Never waits.
    fn is_idle(&self) -> Result<bool, Self::Fault>;
    /// Waits until it is idle.
    fn wait(&self) -> Result<(), Self::Fault>;
    /// Waits until it is idle, but no longer than it takes to allocate another. Returns whether it is idle.
    fn wait_briefly(&self) -> Result<bool, Self::Fault>;
}

/// A bounded pool of chunks.
#[derive(Debug)]
pub struct Ring<C> {
    state: Mutex<RingState<C>>,
    available: Condvar,
}

#[derive(Debug)]
struct RingState<C> {
    /// The number of chunks that the ring may have.
    limit: usize,
    /// The number that it can have: less than the limit after an allocation failed.
    capacity: usize,
    /// Chunks that were given back, in that order, which is the order in which they become idle.
    returned: VecDeque<C>,
    /// Chunks that exist, those that are handed out among them.
    allocated: usize,
}

impl<C: Chunk> Ring<C> {
    /// A ring of at most `limit` chunks, and of at least one.
    pub fn new(limit: usize) -> Ring<C> {
        let limit = limit.max(1);
        let state = RingState { limit, capacity: limit, returned: VecDeque::new(), allocated: 0 };
        Ring { state: Mutex::new(state), available: Condvar::new() }
    }

    /// Takes an idle chunk, or allocates one. At capacity, waits for the chunk that was given back first. If an
    /// allocation fails and there are other chunks, their number is the capacity until the ring is shrunk.
    pub fn take<E: From<C::Fault>>(
        &self,
        mut allocate: impl FnMut() -> Result<C, E>,
    ) -> Result<C, E> {
        let mut state = lock(&self.state);
        let mut has_awaited = false;
        loop {
            let is_idle = match state.returned.front().map(C::is_idle).transpose() {
                Ok(is_idle) => is_idle,
                Err(fault) => {
                    // It will never be known: drop the chunk, so that other callers need not fail because of it.
                    let unknown = state.returned.pop_front();
                    drop(state);
                    drop(unknown);
                    self.note_lost();
                    return Err(fault.into());
                }
            };
            let can_allocate = state.allocated < state.capacity;
            let may_await = !has_awaited && state.returned.len() >= BUSY_CHUNKS_TO_AWAIT;
            if is_idle == Some(true) || (is_idle.is_some() && (!can_allocate || may_await)) {
                let Some(first) = state.returned.pop_front() else { continue };
                drop(state);
                // Without the lock: other threads take and give back chunks meanwhile.
                let waited = match can_allocate {
                    true => first.wait_briefly(),
                    false => first.wait().map(|()| true),
                };
                match waited {
                    Ok(true) => return Ok(first),
                    Ok(false) => {
                        // Its stream may wait for long: the load goes on with another chunk.
                        has_awaited = true;
                        state = lock(&self.state);
                        state.returned.push_front(first);
                        self.available.notify_one();
                        continue;
                    }
                    Err(fault) => {
                        self.note_lost();
                        return Err(fault.into());
                    }
                }
            }
            if can_allocate {
                state.allocated += 1;
                drop(state);
                let error = match allocate() {
                    Ok(chunk) => return Ok(chunk),
                    Err(error) => error,
                };
                // In one step: else two callers that fail could each keep trying because of the other.
                state = lock(&self.state);
                state.allocated -= 1;
                self.available.notify_all();
                if state.allocated == 0 {
                    return Err(error);
                }
                state.capacity = state.allocated;
                continue;
            }
            state = wait(&self.available, state);
        }
    }

    /// Returns a chunk to the ring.
    pub fn give_back(&self, chunk: C) {
        lock(&self.state).returned.push_back(chunk);
        self.available.notify_one();
    }

    /// Frees idle chunks until at most `keep` exist. A chunk counts until `free` has returned, so that no other is
    /// allocated in its place before.
    pub fn shrink(&self, keep: usize, mut free: impl FnMut(C)) {
        let mut state = lock(&self.state);
        while state.allocated > keep
            && matches!(state.returned.front().map(C::is_idle), Some(Ok(true)))
        {
            let Some(first) = state.returned.pop_front() else { break };
            drop(state);
            // Without the lock: other threads take and give back chunks meanwhile.
            free(first);
            state = lock(&self.state);
            state.allocated -= 1;
        }
        state.capacity = state.limit;
        self.available.notify_all();
    }

    /// Whether any chunk exists, handed out or not.
    pub fn has_any(&self) -> bool {
        lock(&self.state).allocated > 0
    }

    /// Notes that a chunk which was taken does not come back.
    pub fn note_lost(&self) {
        lock(&self.state).allocated -= 1;
        self.available.notify_all();
    }
}
