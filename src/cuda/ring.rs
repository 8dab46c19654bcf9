//! Chunks that are handed to who fills them, and that are filled again only when what they were filled with has
//! got to where it belongs.
//!
//! In: how many there may be, and how to make one. Out: chunks, each to one at a time. Pure: what it means for a
//! chunk to be idle is the chunk's. `proofs/ring` tries every order in which threads can meet here.

use std::collections::VecDeque;

use super::sync::{Condvar, Mutex, lock, wait};

/// Something that is busy for a while after it was given back.
pub trait Chunk {
    /// Why it is not known whether it is still busy.
    type Fault;
    /// Whether it is not busy any more. Waits for nothing.
    fn is_idle(&self) -> Result<bool, Self::Fault>;
    /// Waits until it is not.
    fn wait(&self) -> Result<(), Self::Fault>;
}

/// Chunks, used over and over.
#[derive(Debug)]
pub struct Ring<C> {
    state: Mutex<RingState<C>>,
    available: Condvar,
}

#[derive(Debug)]
struct RingState<C> {
    /// How many there may be, and how many it turned out that there can be.
    limit: usize,
    capacity: usize,
    /// Those that nobody has, in the order in which they came back, which is the one in which they become idle.
    returned: VecDeque<C>,
    /// Those that there are.
    allocated: usize,
}

impl<C: Chunk> Ring<C> {
    /// Of so many at the most; one at the least.
    pub fn new(most: usize) -> Ring<C> {
        let limit = most.max(1);
        let chunks = RingState { limit, capacity: limit, returned: VecDeque::new(), allocated: 0 };
        Ring { state: Mutex::new(chunks), available: Condvar::new() }
    }

    /// A chunk that is idle: one that came back, or a new one; or, where there may be no more, the one that came
    /// back first, as soon as it is idle. If none can be made but there are some, there are to be no more than
    /// those until some are let go of.
    pub fn take<E: From<C::Fault>>(&self, mut make: impl FnMut() -> Result<C, E>) -> Result<C, E> {
        let mut chunks = lock(&self.state);
        loop {
            let is_idle = match chunks.returned.front().map(C::is_idle).transpose() {
                Ok(is_idle) => is_idle,
                Err(fault) => {
                    // Nobody will ever know: it is none any more, and others need not fail because of it.
                    let unknown = chunks.returned.pop_front();
                    drop(chunks);
                    drop(unknown);
                    self.note_lost();
                    return Err(fault.into());
                }
            };
            let may_make = chunks.allocated < chunks.capacity;
            if is_idle == Some(true) || (is_idle.is_some() && !may_make) {
                let Some(first) = chunks.returned.pop_front() else { continue };
                drop(chunks);
                // Outside the lock: others come and go meanwhile.
                return first.wait().map(|()| first).map_err(|fault| {
                    self.note_lost();
                    fault.into()
                });
            }
            if may_make {
                chunks.allocated += 1;
                drop(chunks);
                let fault = match make() {
                    Ok(made) => return Ok(made),
                    Err(fault) => fault,
                };
                // In one step, or two who fail could each go on trying because of the other.
                chunks = lock(&self.state);
                chunks.allocated -= 1;
                self.available.notify_all();
                if chunks.allocated == 0 {
                    return Err(fault);
                }
                chunks.capacity = chunks.allocated;
                continue;
            }
            chunks = wait(&self.available, chunks);
        }
    }

    /// Takes a chunk back.
    pub fn give_back(&self, chunk: C) {
        lock(&self.state).returned.push_back(chunk);
        self.available.notify_one();
    }

    /// Lets go of those that nobody has and that are idle, until there are no more than `keep`. Each counts until
    /// it has been ended: no other is made in its place before.
    pub fn shrink(&self, keep: usize, mut end: impl FnMut(C)) {
        let mut chunks = lock(&self.state);
        while chunks.allocated > keep
            && matches!(chunks.returned.front().map(C::is_idle), Some(Ok(true)))
        {
            let Some(first) = chunks.returned.pop_front() else { break };
            drop(chunks);
            // Outside the lock: others come and go meanwhile.
            end(first);
            chunks = lock(&self.state);
            chunks.allocated -= 1;
        }
        chunks.capacity = chunks.limit;
        self.available.notify_all();
    }

    /// Whether there are any, whoever has them.
    pub fn has_any(&self) -> bool {
        lock(&self.state).allocated > 0
    }

    /// One that was taken, or was to be made, is no more.
    pub fn note_lost(&self) {
        lock(&self.state).allocated -= 1;
        self.available.notify_all();
    }
}
