//! Filling a block: by one thread, for all who wait for it.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::Error;
use super::block_table::{Block, BlockId, Of};
use super::cached_file::Served;
use super::reply::Waiter;
use super::scratch::with_scratch;

/// A block that is to be filled. Dropped without it, those who wait are told.
struct Fill {
    served: Arc<Served>,
    id: BlockId,
    why: Why,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Somebody waits for it.
    Now,
    /// Somebody asked for it, and waits for something else first.
    Soon,
    /// Somebody may come to want it.
    Ahead,
    /// The same, because the load before did.
    Remembered,
}

impl Why {
    fn is_ahead(self) -> bool {
        matches!(self, Why::Ahead | Why::Remembered)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    /// By this one and no other.
    Begun,
    /// Nobody waits for this one any more: those who come to want the block have another.
    Over,
}

/// Has a block filled.
pub fn start(served: &Arc<Served>, id: BlockId, why: Why) {
    let fill = Fill { served: Arc::clone(served), id, why, state: State::Waiting };
    let (lane, job) = (&served.origin_of(id).lane, Box::new(move || fill.run()));
    match why {
        Why::Now => lane.run_now(job),
        Why::Soon => lane.run_soon(job),
        Why::Ahead | Why::Remembered => lane.run_ahead(job),
    }
}

impl Fill {
    fn run(mut self) {
        let (served, id) = (Arc::clone(&self.served), self.id);
        let store = &served.cache.store;
        let (size, range) = (served.size_of(id.of), id.start..id.end);
        if self.why.is_ahead() {
            // What the page cache has is answered from there.
            let cached = matches!(id.of, Of::File(_))
                && !store.is_wanted(id)
                && served.origin_of(id).is_cached(&served.reader, &range);
            if cached {
                return;
            }
        }
        if !store.begin(id) {
            self.state = State::Over;
            return;
        }
        self.state = State::Begun;
        let Some(mut buffer) = store.buffer(size) else {
            return self.without_a_buffer();
        };
        let filled = {
            let fetch = || served.fetch(id, &range, &mut buffer);
            catch_unwind(AssertUnwindSafe(fetch)).unwrap_or_else(|_| Err(served.panicked(id)))
        };
        match filled {
            Ok(bytes) => {
                let block = Arc::new(Block::new(buffer, bytes));
                self.finish(Some(&block), Ok(block.bytes()));
                drop(block);
                store.shrink();
            }
            Err(error) => {
                let error = served.failed(error);
                drop(buffer);
                self.finish(None, Err(&error));
            }
        }
    }

    fn finish(&mut self, block: Option<&Arc<Block>>, bytes: Result<&[u8], &Error>) {
        self.state = State::Over;
        let cache = &self.served.cache;
        let waiters = cache.store.finish(self.id, block);
        if self.why == Why::Remembered && block.is_some() && waiters.is_empty() {
            cache.counting.replayed.one();
        }
        for waiter in waiters {
            waiter.answer(bytes);
        }
    }

    /// Everything is being read or copied just now: what is fetched ahead can do without, and those
    /// who wait get their own bytes and no more.
    fn without_a_buffer(&mut self) {
        self.state = State::Over;
        let (served, id) = (&self.served, self.id);
        for waiter in served.cache.store.finish(id, None) {
            let read = || waiter_alone(served, id, waiter);
            // Its answer was given as it was dropped.
            drop(catch_unwind(AssertUnwindSafe(read)));
        }
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        let store = &self.served.cache.store;
        let waiters = match self.state {
            State::Waiting => store.abandon(self.id, self.why.is_ahead()),
            State::Begun => store.finish(self.id, None),
            State::Over => return,
        };
        drop(waiters);
    }
}

/// Reads what one waiter wants of a block, and answers it.
fn waiter_alone(served: &Served, id: BlockId, waiter: Waiter) {
    with_scratch(waiter.wanted() as usize, |scratch| {
        let mut read = Ok(());
        let waiter = waiter.moved(|bytes, at| {
            let out = &mut scratch[at..at + bytes.len()];
            if read.is_ok() {
                read = served.fetch_part(id, id.start + bytes.start as u64, out);
            }
        });
        match read {
            Ok(()) => waiter.answer(Ok(scratch)),
            Err(error) => waiter.answer(Err(&served.failed(error))),
        }
    });
}

impl Served {
    /// Reads a block's bytes, and makes sure that they are those that were parsed; where they are in `out`.
    fn fetch(
        &self,
        id: BlockId,
        range: &Range<u64>,
        out: &mut [u8],
    ) -> Result<Range<usize>, Error> {
        match id.of {
            Of::File(_) => {
                let counting = &self.cache.counting;
                Ok(self.origin_of(id).read(&self.reader, out, range, counting)?)
            }
            Of::Tensor(_) => {
                let len = (range.end - range.start) as usize;
                self.fetch_part(id, range.start, &mut out[..len])?;
                Ok(0..len)
            }
        }
    }

    /// The same for any bytes of its file or tensor, through the page cache.
    fn fetch_part(&self, id: BlockId, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.cache.counting.buffered_bytes.add(out.len() as u64);
        match id.of {
            Of::File(_) => Ok(self.origin_of(id).read_passing(&self.reader, out, offset)?),
            Of::Tensor(place) => {
                let start = self.image().tensor_range(place as usize).start;
                let _kept = self.keep_tensor(place as usize);
                self.reader.read_at(out, start + offset)?;
                Ok(())
            }
        }
    }

    fn panicked(&self, id: BlockId) -> Error {
        Error::Failed { path: self.origin_of(id).path.clone().unwrap_or_default() }
    }
}
