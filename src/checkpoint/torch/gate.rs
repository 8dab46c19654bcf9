//! Lets large pickles be parsed one at a time, in the whole process.
//!
//! Nobody waits for a source in here: what is parsed is in memory before. So whoever waits for a turn waits for the
//! processor alone, and a source that hangs holds up nobody.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::threads::lock;

use super::pickle::allowance;

/// The most bytes that parsing may take side by side.
const CAPACITY: u64 = 64 << 20;

/// What takes no more needs no turn: pickles of some hundred tensors. Of these as many are parsed as there are threads.
const UNWEIGHED: u64 = 4 << 20;

/// The most bytes that a byte of a pickle becomes.
const MAX_GROWTH: u64 = 40;

#[derive(Debug)]
struct State {
    /// A child has the state of its parent, and none of the threads that are in there.
    process: u32,
    held: u64,
    /// The next that is handed out, and the next that may go in.
    ticket: u64,
    turn: u64,
}

static STATE: Mutex<State> = Mutex::new(State { process: 0, held: 0, ticket: 0, turn: 0 });
static LEFT: Condvar = Condvar::new();

/// Bytes of which others are kept from parsing until it is dropped.
#[derive(Debug)]
pub struct Turn(u64);

/// Waits for a turn to parse a pickle of so many bytes, which took so many in its file.
pub fn enter(size: u64, stored: u64) -> Turn {
    let growth = size.saturating_mul(MAX_GROWTH).min(allowance(stored));
    let weight = size.saturating_add(growth).min(CAPACITY);
    if weight <= UNWEIGHED {
        return Turn(0);
    }
    let mut state = lock(&STATE);
    let process = std::process::id();
    if state.process != process {
        *state = State { process, held: 0, ticket: 0, turn: 0 };
    }
    let mine = state.ticket;
    state.ticket += 1;
    while state.turn != mine || state.held + weight > CAPACITY {
        state = LEFT.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    state.turn += 1;
    state.held += weight;
    drop(state);
    LEFT.notify_all();
    Turn(weight)
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.0 > 0 {
            lock(&STATE).held -= self.0;
            LEFT.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn large_ones_are_alone_and_small_ones_never_wait() {
        let (inside, large) = (AtomicUsize::new(0), 32 << 20);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _turn = enter(large, large);
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        // Which would hang, had it to wait.
                        drop(enter(10_000, 10_000));
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
    }
}
