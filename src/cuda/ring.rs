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
    most: usize,
    chunks: Mutex<Chunks<C>>,
    more: Condvar,
}

#[derive(Debug)]
struct Chunks<C> {
    /// Those that nobody has, in the order in which they came back, which is the one in which they become idle.
    back: VecDeque<C>,
    /// Those that there are.
    made: usize,
}

impl<C: Chunk> Ring<C> {
    /// Of so many at the most; one at the least.
    pub fn new(most: usize) -> Ring<C> {
        let chunks = Chunks { back: VecDeque::new(), made: 0 };
        Ring { most: most.max(1), chunks: Mutex::new(chunks), more: Condvar::new() }
    }

    /// A chunk that is idle: one that came back, or a new one; or, where there may be no more, the one that came
    /// back first, as soon as it is idle.
    pub fn take<E: From<C::Fault>>(&self, make: impl FnOnce() -> Result<C, E>) -> Result<C, E> {
        let mut chunks = lock(&self.chunks);
        loop {
            let is_idle = chunks.back.front().map(C::is_idle).transpose()?;
            let may_make = chunks.made < self.most;
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
                return make().inspect_err(|_| self.lost());
            }
            chunks = wait(&self.more, chunks);
        }
    }

    /// Takes a chunk back.
    pub fn give(&self, chunk: C) {
        lock(&self.chunks).back.push_back(chunk);
        self.more.notify_one();
    }

    /// Lets go of those that nobody has.
    pub fn drain(&self) -> Vec<C> {
        let mut chunks = lock(&self.chunks);
        chunks.made -= chunks.back.len();
        let drained = chunks.back.drain(..).collect();
        self.more.notify_all();
        drained
    }

    /// One that was taken, or was to be made, is no more.
    pub fn lost(&self) {
        lock(&self.chunks).made -= 1;
        self.more.notify_all();
    }
}
