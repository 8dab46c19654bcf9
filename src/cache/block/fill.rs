//! Filling a block: by one thread, for all who wait for it.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::cache::CacheError;
use crate::cache::block::table::{Block, BlockId, BlockSource};
use crate::cache::file::CachedFile;
use crate::cache::io::reply::Waiter;
use crate::cache::scratch::with_scratch;

/// A block that is to be filled. Dropped without it, those who wait are told.
struct FillJob {
    served: Arc<CachedFile>,
    id: BlockId,
    priority: FillPriority,
    state: FillState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FillPriority {
    /// Somebody waits for it.
    Blocking,
    /// Somebody asked for it, and waits for something else first.
    Deferred,
    /// Somebody may come to want it.
    Prefetch,
    /// The same, because the load before did.
    Replay,
}

impl FillPriority {
    fn is_prefetch(self) -> bool {
        matches!(self, FillPriority::Prefetch | FillPriority::Replay)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FillState {
    Queued,
    /// By this one and no other.
    Claimed,
    /// Nobody waits for this one any more: those who come to want the block have another.
    Done,
}

/// Has a block filled.
pub fn schedule(served: &Arc<CachedFile>, id: BlockId, why: FillPriority) {
    let fill = FillJob { served: Arc::clone(served), id, priority: why, state: FillState::Queued };
    let (lane, job) = (&served.source_of(id).executor, Box::new(move || fill.run()));
    match why {
        FillPriority::Blocking => lane.submit_blocking(job),
        FillPriority::Deferred => lane.submit_deferred(job),
        FillPriority::Prefetch | FillPriority::Replay => lane.submit_prefetch(job),
    }
}

impl FillJob {
    fn run(mut self) {
        let (served, id) = (Arc::clone(&self.served), self.id);
        let store = &served.cache.blocks;
        let (size, range) = (served.block_size(id.source), id.start..id.end);
        if self.priority.is_prefetch() {
            // What the page cache has is answered from there.
            let cached = matches!(id.source, BlockSource::File(_))
                && !store.is_requested(id)
                && served.source_of(id).is_in_page_cache(&served.reader, &range);
            if cached {
                return;
            }
        }
        if !store.claim(id) {
            self.state = FillState::Done;
            return;
        }
        self.state = FillState::Claimed;
        let Some(mut buffer) = store.take_buffer(size) else {
            return self.run_without_buffer();
        };
        let filled = {
            let fetch = || served.read_block(id, &range, &mut buffer);
            catch_unwind(AssertUnwindSafe(fetch)).unwrap_or_else(|_| Err(served.panic_error(id)))
        };
        match filled {
            Ok(bytes) => {
                let block = Arc::new(Block::new(buffer, bytes));
                self.finish(Some(&block), Ok(block.bytes()));
                drop(block);
                store.shrink_to_limit();
            }
            Err(error) => {
                let error = served.record_failure(error);
                drop(buffer);
                self.finish(None, Err(&error));
            }
        }
    }

    fn finish(&mut self, block: Option<&Arc<Block>>, bytes: Result<&[u8], &CacheError>) {
        self.state = FillState::Done;
        let cache = &self.served.cache;
        let waiters = cache.blocks.complete(self.id, block);
        if self.priority == FillPriority::Replay && block.is_some() && waiters.is_empty() {
            cache.counters.replayed.increment();
        }
        for waiter in waiters {
            waiter.complete(bytes);
        }
    }

    /// Everything is being read or copied just now: what is fetched ahead can do without, and those
    /// who wait get their own bytes and no more.
    fn run_without_buffer(&mut self) {
        self.state = FillState::Done;
        let (served, id) = (&self.served, self.id);
        for waiter in served.cache.blocks.complete(id, None) {
            let read = || answer_without_block(served, id, waiter);
            // Its answer was given as it was dropped.
            drop(catch_unwind(AssertUnwindSafe(read)));
        }
    }
}

impl Drop for FillJob {
    fn drop(&mut self) {
        let store = &self.served.cache.blocks;
        let waiters = match self.state {
            FillState::Queued => store.cancel(self.id, self.priority.is_prefetch()),
            FillState::Claimed => store.complete(self.id, None),
            FillState::Done => return,
        };
        drop(waiters);
    }
}

/// Reads what one waiter wants of a block, and answers it.
fn answer_without_block(served: &CachedFile, id: BlockId, waiter: Waiter) {
    with_scratch(waiter.byte_count() as usize, |scratch| {
        let mut read = Ok(());
        let waiter = waiter.compacted(|bytes, at| {
            let out = &mut scratch[at..at + bytes.len()];
            if read.is_ok() {
                read = served.read_block_part(id, id.start + bytes.start as u64, out);
            }
        });
        match read {
            Ok(()) => waiter.complete(Ok(scratch)),
            Err(error) => waiter.complete(Err(&served.record_failure(error))),
        }
    });
}

impl CachedFile {
    /// Reads a block's bytes, and makes sure that they are those that were parsed; where they are in `out`.
    fn read_block(
        &self,
        id: BlockId,
        range: &Range<u64>,
        out: &mut [u8],
    ) -> Result<Range<usize>, CacheError> {
        match id.source {
            BlockSource::File(_) => {
                let counting = &self.cache.counters;
                Ok(self.source_of(id).read(&self.reader, out, range, counting)?)
            }
            BlockSource::Tensor(_) => {
                let len = (range.end - range.start) as usize;
                self.read_block_part(id, range.start, &mut out[..len])?;
                Ok(0..len)
            }
        }
    }

    /// The same for any bytes of its file or tensor, through the page cache.
    fn read_block_part(&self, id: BlockId, offset: u64, out: &mut [u8]) -> Result<(), CacheError> {
        self.cache.counters.buffered_bytes.add(out.len() as u64);
        match id.source {
            BlockSource::File(_) => {
                Ok(self.source_of(id).read_through(&self.reader, out, offset)?)
            }
            BlockSource::Tensor(place) => {
                let start = self.virtual_file().tensor_range(place as usize).start;
                let _kept = self.retain_tensor_pages(place as usize);
                self.reader.read_at(out, start + offset)?;
                Ok(())
            }
        }
    }

    fn panic_error(&self, id: BlockId) -> CacheError {
        CacheError::Internal { path: self.source_of(id).path.clone().unwrap_or_default() }
    }
}
