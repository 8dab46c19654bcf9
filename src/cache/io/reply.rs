//! One read: what it is made of, and its answer, given exactly once.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use crate::threads::lock;

use crate::cache::CacheError;
use crate::cache::block::pool::Buffer;
use crate::cache::counters::AtomicCounters;

/// What is called with the bytes of a read, or with why there are none.
pub type ReplyCallback = Box<dyn FnOnce(Result<&[u8], &CacheError>) + Send>;

/// An answer that is owed. Dropped without one, it says that reading was stopped.
pub struct PendingReply {
    callback: Option<ReplyCallback>,
    counters: Arc<AtomicCounters>,
}

impl PendingReply {
    pub fn new(done: ReplyCallback, counting: Arc<AtomicCounters>) -> PendingReply {
        PendingReply { callback: Some(done), counters: counting }
    }

    pub fn send(mut self, answer: Result<&[u8], &CacheError>) {
        self.send_once(answer);
    }

    fn send_once(&mut self, answer: Result<&[u8], &CacheError>) {
        if let Some(done) = self.callback.take() {
            if answer.is_err() {
                self.counters.errors.increment();
            }
            // A panic of whoever asked must not fail those who are answered after.
            drop(catch_unwind(AssertUnwindSafe(|| done(answer))));
        }
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        self.send_once(Err(&CacheError::Stopped));
    }
}

/// Bytes of a block, and where in the answer they belong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPart {
    /// From which byte of the answer.
    pub reply_offset: usize,
    /// Which bytes of the block.
    pub bytes: Range<usize>,
}

/// An answer that is put together from parts as they come.
pub struct PartialReply(Mutex<PartialState>);

struct PartialState {
    /// From the pool, so that those who wait are within the budget too; none once it is given.
    bytes: Option<Buffer>,
    len: usize,
    /// Blocks that have not come.
    missing_blocks: usize,
    reply: Option<PendingReply>,
}

impl PartialReply {
    /// An answer of so many bytes of a buffer, some of which are already there.
    pub fn new(
        bytes: Buffer,
        len: usize,
        missing: usize,
        answer: PendingReply,
    ) -> Arc<PartialReply> {
        let (bytes, answer) = (Some(bytes), Some(answer));
        Arc::new(PartialReply(Mutex::new(PartialState {
            bytes,
            len,
            missing_blocks: missing,
            reply: answer,
        })))
    }

    /// A block has come: takes its parts. The last one to come gives the answer, and an error
    /// gives it at once.
    pub fn add_block(&self, parts: &[BlockPart], block: Result<&[u8], &CacheError>) {
        let mut state = lock(&self.0);
        match block {
            Err(error) => {
                let (answer, bytes) = (state.reply.take(), state.bytes.take());
                drop((state, bytes));
                if let Some(answer) = answer {
                    answer.send(Err(error));
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
                let (answer, bytes, len) = (state.reply.take(), state.bytes.take(), state.len);
                drop(state);
                if let (Some(answer), Some(bytes)) = (answer, bytes) {
                    answer.send(Ok(&bytes[..len]));
                }
            }
        }
    }
}

/// Somebody who waits for a block.
pub enum Waiter {
    /// For one part of it, which is the whole answer: no byte of it is copied.
    Direct(Range<usize>, PendingReply),
    /// For parts of it.
    Partial(Vec<BlockPart>, Arc<PartialReply>),
}

impl Waiter {
    pub fn complete(self, block: Result<&[u8], &CacheError>) {
        match self {
            Waiter::Direct(bytes, answer) => answer.send(block.map(|block| &block[bytes])),
            Waiter::Partial(parts, gathering) => gathering.add_block(&parts, block),
        }
    }

    /// The same waiter for a block that has what it wants and nothing else. `visit` learns of each
    /// stretch where it is in the block that is, and where in that one.
    pub fn compacted(self, mut visit: impl FnMut(Range<usize>, usize)) -> Waiter {
        let mut at = 0;
        let mut close_up = |bytes: Range<usize>| {
            let moved = at..at + bytes.len();
            at = moved.end;
            visit(bytes, moved.start);
            moved
        };
        match self {
            Waiter::Direct(bytes, answer) => Waiter::Direct(close_up(bytes), answer),
            Waiter::Partial(parts, gathering) => {
                let close_up = |part: BlockPart| BlockPart {
                    reply_offset: part.reply_offset,
                    bytes: close_up(part.bytes),
                };
                Waiter::Partial(parts.into_iter().map(close_up).collect(), gathering)
            }
        }
    }

    /// How many bytes of the block are wanted.
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

    use super::*;
    use crate::cache::block::pool::{BlockPool, BufferSize};

    #[test]
    fn an_answer_is_given_once_whatever_happens() {
        let (say, said) = channel();
        let answer = || {
            let say = say.clone();
            let done: ReplyCallback = Box::new(move |a| say.send(a.is_ok()).unwrap());
            PendingReply::new(done, Arc::default())
        };
        answer().send(Ok(b"x"));
        drop(answer());
        let pool = BlockPool::new(3 << 20);
        let buffer =
            || pool.reuse(BufferSize::Small).or_else(|| pool.allocate(BufferSize::Small)).unwrap();
        let gathering = PartialReply::new(buffer(), 2, 2, answer());
        gathering.add_block(&[], Err(&CacheError::Stopped));
        gathering.add_block(&[BlockPart { reply_offset: 0, bytes: 0..2 }], Ok(b"ab"));
        // Once answered it keeps no memory, whoever still holds it.
        drop([buffer(), buffer()]);
        drop(gathering);
        drop(PartialReply::new(buffer(), 0, 1, answer()));
        drop(say);
        assert_eq!(said.iter().collect::<Vec<_>>(), [true, false, false, false]);
    }
}
