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
    chunks: Mutex<Chunks<C>>,
    more: Condvar,
}

#[derive(Debug)]
struct Chunks<C> {
    /// How many there may be, and how many it turned out that there can be.
    limit: usize,
    most: usize,
    /// Those that nobody has, in the order in which they came back, which is the one in which they become idle.
    back: VecDeque<C>,
    /// Those that there are.
    made: usize,
}

impl<C: Chunk> Ring<C> {
    /// Of so many at the most; one at the least.
    pub fn new(most: usize) -> Ring<C> {
        let limit = most.max(1);
        let chunks = Chunks { limit, most: limit, back: VecDeque::new(), made: 0 };
        Ring { chunks: Mutex::new(chunks), more: Condvar::new() }
    }

    /// A chunk that is idle: one that came back, or a new one; or, where there may be no more, the one that came
    /// back first, as soon as it is idle. If none can be made but there are some, there are to be no more than
    /// those until some are let go of.
    pub fn take<E: From<C::Fault>>(&self, mut make: impl FnMut() -> Result<C, E>) -> Result<C, E> {
        let mut chunks = lock(&self.chunks);
        loop {
            let is_idle = match chunks.back.front().map(C::is_idle).transpose() {
                Ok(is_idle) => is_idle,
                Err(fault) => {
                    // Nobody will ever know: it is none any more, and others need not fail because of it.
                    let unknown = chunks.back.pop_front();
                    drop(chunks);
                    drop(unknown);
                    self.lost();
                    return Err(fault.into());
                }
            };
            let may_make = chunks.made < chunks.most;
            if is_idle == Some(true) || (is_idle.is_some() && !may_make) {
                let Some(first) = chunks.back.pop_front() else { continue };
                drop(chunks);
                // Outside the lock: others come and go meanwhile.
                return first.wait().map(|()| first).map_err(|fault| {
                    self.lost();
                    fault.into()
                });
            }
            if may_make {
                chunks.made += 1;
                drop(chunks);
                let fault = match make() {
                    Ok(made) => return Ok(made),
                    Err(fault) => fault,
                };
                // In one step, or two who fail could each go on trying because of the other.
                chunks = lock(&self.chunks);
                chunks.made -= 1;
                self.more.notify_all();
                if chunks.made == 0 {
                    return Err(fault);
                }
                chunks.most = chunks.made;
                continue;
            }
            chunks = wait(&self.more, chunks);
        }
    }

    /// Takes a chunk back.
    pub fn give(&self, chunk: C) {
        lock(&self.chunks).back.push_back(chunk);
        self.more.notify_one();
    }

    /// Lets go of those that nobody has and that are idle, until there are no more than `keep`. Each counts until
    /// it has been ended: no other is made in its place before.
    pub fn shrink(&self, keep: usize, mut end: impl FnMut(C)) {
        let mut chunks = lock(&self.chunks);
        while chunks.made > keep && matches!(chunks.back.front().map(C::is_idle), Some(Ok(true))) {
            let Some(first) = chunks.back.pop_front() else { break };
            drop(chunks);
            // Outside the lock: others come and go meanwhile.
            end(first);
            chunks = lock(&self.chunks);
            chunks.made -= 1;
        }
        chunks.most = chunks.limit;
        self.more.notify_all();
    }

    /// Whether there are any, whoever has them.
    pub fn has_any(&self) -> bool {
        lock(&self.chunks).made > 0
    }

    /// One that was taken, or was to be made, is no more.
    pub fn lost(&self) {
        lock(&self.chunks).made -= 1;
        self.more.notify_all();
    }
}
