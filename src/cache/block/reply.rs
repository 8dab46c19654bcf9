//! Replies to reads, each sent exactly once, and what waits for blocks to send them.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::cache::block::id::BlockPart;
use crate::cache::block::pool::Buffer;
use crate::cache::counters::AtomicCounters;
use crate::cache::error::CacheError;
use crate::threads::lock;

/// What is called with the bytes of a read, or with its error.
pub type ReplyCallback = Box<dyn FnOnce(Result<&[u8], &CacheError>) + Send>;

/// A reply that is owed. Dropped before it is sent, it is [`CacheError::Stopped`].
pub struct PendingReply {
    callback: Option<ReplyCallback>,
    counters: Arc<AtomicCounters>,
}

impl PendingReply {
    pub fn new(callback: ReplyCallback, counters: Arc<AtomicCounters>) -> PendingReply {
        PendingReply { callback: Some(callback), counters }
    }

    pub fn send(mut self, bytes: Result<&[u8], &CacheError>) {
        self.send_once(bytes);
    }

    fn send_once(&mut self, bytes: Result<&[u8], &CacheError>) {
        if let Some(callback) = self.callback.take() {
            if bytes.is_err() {
                self.counters.errors.fetch_add(1, Relaxed);
            }
            // A callback that panics must not fail the reads that are answered after it.
            drop(catch_unwind(AssertUnwindSafe(|| callback(bytes))));
        }
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        self.send_once(Err(&CacheError::Stopped));
    }
}

/// A reply that is put together from the parts of several blocks.
pub struct PartialReply(Mutex<PartialState>);

struct PartialState {
    /// A buffer of the pool, so that the limit covers replies that wait; `None` once the reply is sent.
    bytes: Option<Buffer>,
    len: usize,
    missing_blocks: usize,
    reply: Option<PendingReply>,
}

impl PartialReply {
    /// Owes the first `len` bytes of a buffer, some of which may be there already.
    pub fn new(
        bytes: Buffer,
        len: usize,
        missing_blocks: usize,
        reply: PendingReply,
    ) -> Arc<PartialReply> {
        let (bytes, reply) = (Some(bytes), Some(reply));
        Arc::new(PartialReply(Mutex::new(PartialState { bytes, len, missing_blocks, reply })))
    }

    /// Copies the parts of one block. The last block sends the reply; an error sends it at once.
    fn add_block(&self, parts: &[BlockPart], block: Result<&[u8], &CacheError>) {
        let mut state = lock(&self.0);
        match block {
            Err(error) => {
                let (reply, bytes) = (state.reply.take(), state.bytes.take());
                drop((state, bytes));
                if let Some(reply) = reply {
                    reply.send(Err(error));
                }
            }
            Ok(block) => {
                let Some(bytes) = state.bytes.as_mut() else { return };
                for part in parts {
                    let end = part.reply_offset + part.bytes.len();
                    bytes[part.reply_offset..end].copy_from_slice(&block[part.bytes.clone()]);
                }
                state.missing_blocks -= 1;
                if state.missing_blocks > 0 {
                    return;
                }
                let (reply, bytes, len) = (state.reply.take(), state.bytes.take(), state.len);
                drop(state);
                if let (Some(reply), Some(bytes)) = (reply, bytes) {
                    reply.send(Ok(&bytes[..len]));
                }
            }
        }
    }
}

/// What waits for a block.
pub enum Waiter {
    /// One range of the block is the whole reply: it is not copied.
    Direct(Range<usize>, PendingReply),
    /// Parts of the block belong to a reply.
    Partial(Vec<BlockPart>, Arc<PartialReply>),
}

impl Waiter {
    pub fn answer(self, block: Result<&[u8], &CacheError>) {
        match self {
            Waiter::Direct(bytes, reply) => reply.send(block.map(|block| &block[bytes])),
            Waiter::Partial(parts, partial) => partial.add_block(&parts, block),
        }
    }

    /// The same waiter for memory that holds its own bytes of the block and no others. `visit` is called for each
    /// range of the block, with its place in that memory.
    pub fn compacted(self, mut visit: impl FnMut(Range<usize>, usize)) -> Waiter {
        let mut end = 0;
        let mut compact = |bytes: Range<usize>| {
            let compacted = end..end + bytes.len();
            end = compacted.end;
            visit(bytes, compacted.start);
            compacted
        };
        match self {
            Waiter::Direct(bytes, reply) => Waiter::Direct(compact(bytes), reply),
            Waiter::Partial(parts, partial) => {
                let compact = |BlockPart { reply_offset, bytes }| {
                    let bytes = compact(bytes);
                    BlockPart { reply_offset, bytes }
                };
                Waiter::Partial(parts.into_iter().map(compact).collect(), partial)
            }
        }
    }

    /// The number of bytes of the block that it needs.
    pub fn byte_count(&self) -> u64 {
        match self {
            Waiter::Direct(bytes, _) => bytes.len() as u64,
            Waiter::Partial(parts, _) => parts.iter().map(|part| part.bytes.len() as u64).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use crate::cache::block::pool::{BlockPool, BufferSize};

    use super::*;

    #[test]
    fn a_reply_is_sent_once_whatever_happens() {
        let (sender, sent) = channel();
        let reply = || {
            let sender = sender.clone();
            let callback: ReplyCallback = Box::new(move |a| sender.send(a.is_ok()).unwrap());
            PendingReply::new(callback, Arc::default())
        };
        reply().send(Ok(b"x"));
        drop(reply());
        let pool = BlockPool::new(3 << 20);
        let size = BufferSize::Small;
        let buffer = || pool.reuse(size).or_else(|| pool.allocate(size)).unwrap();
        let partial = PartialReply::new(buffer(), 2, 2, reply());
        partial.add_block(&[], Err(&CacheError::Stopped));
        partial.add_block(&[BlockPart { reply_offset: 0, bytes: 0..2 }], Ok(b"ab"));
        // Once it is sent it holds no buffer, even while it is referenced.
        drop([buffer(), buffer()]);
        drop(partial);
        drop(PartialReply::new(buffer(), 0, 1, reply()));
        drop(sender);
        assert_eq!(sent.iter().collect::<Vec<_>>(), [true, false, false, false]);
    }
}
