//! One read: what it is made of, and its answer, given exactly once.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use crate::threads::lock;

use super::Error;
use super::counters::Counting;
use super::pool::Buffer;

/// What is called with the bytes of a read, or with why there are none.
pub type Done = Box<dyn FnOnce(Result<&[u8], &Error>) + Send>;

/// An answer that is owed. Dropped without one, it says that reading was stopped.
pub struct Answer {
    done: Option<Done>,
    counting: Arc<Counting>,
}

impl Answer {
    pub fn new(done: Done, counting: Arc<Counting>) -> Answer {
        Answer { done: Some(done), counting }
    }

    pub fn give(mut self, answer: Result<&[u8], &Error>) {
        self.give_once(answer);
    }

    fn give_once(&mut self, answer: Result<&[u8], &Error>) {
        if let Some(done) = self.done.take() {
            if answer.is_err() {
                self.counting.errors.one();
            }
            // A panic of whoever asked must not fail those who are answered after.
            drop(catch_unwind(AssertUnwindSafe(|| done(answer))));
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.give_once(Err(&Error::Stopped));
    }
}

/// Bytes of a block, and where in the answer they belong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// From which byte of the answer.
    pub at: usize,
    /// Which bytes of the block.
    pub bytes: Range<usize>,
}

/// An answer that is put together from parts as they come.
pub struct Gathering(Mutex<State>);

struct State {
    /// From the pool, so that those who wait are within the budget too; none once it is given.
    bytes: Option<Buffer>,
    len: usize,
    /// Blocks that have not come.
    missing: usize,
    answer: Option<Answer>,
}

impl Gathering {
    /// An answer of so many bytes of a buffer, some of which are already there.
    pub fn new(bytes: Buffer, len: usize, missing: usize, answer: Answer) -> Arc<Gathering> {
        let (bytes, answer) = (Some(bytes), Some(answer));
        Arc::new(Gathering(Mutex::new(State { bytes, len, missing, answer })))
    }

    /// A block has come: takes its parts. The last one to come gives the answer, and an error
    /// gives it at once.
    pub fn take(&self, parts: &[Part], block: Result<&[u8], &Error>) {
        let mut state = lock(&self.0);
        match block {
            Err(error) => {
                let (answer, bytes) = (state.answer.take(), state.bytes.take());
                drop((state, bytes));
                if let Some(answer) = answer {
                    answer.give(Err(error));
                }
            }
            Ok(block) => {
                let Some(bytes) = state.bytes.as_mut() else { return };
                for part in parts {
                    let end = part.at + part.bytes.len();
                    bytes[part.at..end].copy_from_slice(&block[part.bytes.clone()]);
                }
                state.missing -= 1;
                if state.missing > 0 {
                    return;
                }
                let (answer, bytes, len) = (state.answer.take(), state.bytes.take(), state.len);
                drop(state);
                if let (Some(answer), Some(bytes)) = (answer, bytes) {
                    answer.give(Ok(&bytes[..len]));
                }
            }
        }
    }
}

/// Somebody who waits for a block.
pub enum Waiter {
    /// For one part of it, which is the whole answer: no byte of it is copied.
    Whole(Range<usize>, Answer),
    /// For parts of it.
    Parts(Vec<Part>, Arc<Gathering>),
}

impl Waiter {
    pub fn answer(self, block: Result<&[u8], &Error>) {
        match self {
            Waiter::Whole(bytes, answer) => answer.give(block.map(|block| &block[bytes])),
            Waiter::Parts(parts, gathering) => gathering.take(&parts, block),
        }
    }

    /// The same waiter for a block that has what it wants and nothing else. `visit` learns of each
    /// stretch where it is in the block that is, and where in that one.
    pub fn moved(self, mut visit: impl FnMut(Range<usize>, usize)) -> Waiter {
        let mut at = 0;
        let mut close_up = |bytes: Range<usize>| {
            let moved = at..at + bytes.len();
            at = moved.end;
            visit(bytes, moved.start);
            moved
        };
        match self {
            Waiter::Whole(bytes, answer) => Waiter::Whole(close_up(bytes), answer),
            Waiter::Parts(parts, gathering) => {
                let close_up = |part: Part| Part { at: part.at, bytes: close_up(part.bytes) };
                Waiter::Parts(parts.into_iter().map(close_up).collect(), gathering)
            }
        }
    }

    /// How many bytes of the block are wanted.
    pub fn wanted(&self) -> u64 {
        match self {
            Waiter::Whole(bytes, _) => bytes.len() as u64,
            Waiter::Parts(parts, _) => parts.iter().map(|part| part.bytes.len() as u64).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::super::pool::{Pool, Size};
    use super::*;

    #[test]
    fn an_answer_is_given_once_whatever_happens() {
        let (say, said) = channel();
        let answer = || {
            let say = say.clone();
            let done: Done = Box::new(move |a| say.send(a.is_ok()).unwrap());
            Answer::new(done, Arc::default())
        };
        answer().give(Ok(b"x"));
        drop(answer());
        let pool = Pool::new(3 << 20);
        let buffer = || pool.used(Size::Small).or_else(|| pool.fresh(Size::Small)).unwrap();
        let gathering = Gathering::new(buffer(), 2, 2, answer());
        gathering.take(&[], Err(&Error::Stopped));
        gathering.take(&[Part { at: 0, bytes: 0..2 }], Ok(b"ab"));
        // Once answered it keeps no memory, whoever still holds it.
        drop([buffer(), buffer()]);
        drop(gathering);
        drop(Gathering::new(buffer(), 0, 1, answer()));
        drop(say);
        assert_eq!(said.iter().collect::<Vec<_>>(), [true, false, false, false]);
    }
}
