//! Bounds the memory of concurrent parses in the whole process: large pickles are parsed one at a time.
//!
//! A thread that holds a permit must never wait for a source: the bytes that it parses are in memory before. So
//! a thread that waits for a permit waits for the processor alone, and a source that hangs delays no other parse.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::threads::lock;

use super::pickle::memory_allowance;

/// Bytes that concurrent parses may take together.
const CAPACITY_BYTES: u64 = 64 << 20;

/// The largest parse that needs no permit: a pickle of some hundred tensors. Every thread may run one.
const MAX_FREE_BYTES: u64 = 4 << 20;

/// Maximum bytes of values for one byte of a pickle.
const MAX_BYTES_PER_BYTE: u64 = 40;

#[derive(Debug)]
struct ParseGate {
    /// A forked child inherits the state, but none of the threads that hold permits.
    pid: u32,
    /// Bytes of all permits.
    used_bytes: u64,
    /// The ticket that is handed out next.
    next_ticket: u64,
    /// The ticket that is served next.
    current_ticket: u64,
}

static GATE: Mutex<ParseGate> =
    Mutex::new(ParseGate { pid: 0, used_bytes: 0, next_ticket: 0, current_ticket: 0 });
static GATE_CHANGED: Condvar = Condvar::new();

/// A share of the capacity in bytes, returned on drop.
#[derive(Debug)]
pub struct ParsePermit(u64);

/// Waits for a permit to parse a pickle of `len` bytes, which takes `stored_len` bytes in its file.
pub fn acquire(len: u64, stored_len: u64) -> ParsePermit {
    let growth = len.saturating_mul(MAX_BYTES_PER_BYTE).min(memory_allowance(stored_len));
    let weight = len.saturating_add(growth).min(CAPACITY_BYTES);
    if weight <= MAX_FREE_BYTES {
        return ParsePermit(0);
    }
    let mut gate = lock(&GATE);
    let pid = std::process::id();
    if gate.pid != pid {
        *gate = ParseGate { pid, used_bytes: 0, next_ticket: 0, current_ticket: 0 };
    }
    let ticket = gate.next_ticket;
    gate.next_ticket += 1;
    while gate.current_ticket != ticket || gate.used_bytes + weight > CAPACITY_BYTES {
        gate = GATE_CHANGED.wait(gate).unwrap_or_else(PoisonError::into_inner);
    }
    gate.current_ticket += 1;
    gate.used_bytes += weight;
    drop(gate);
    GATE_CHANGED.notify_all();
    ParsePermit(weight)
}

impl Drop for ParsePermit {
    fn drop(&mut self) {
        if self.0 > 0 {
            lock(&GATE).used_bytes -= self.0;
            GATE_CHANGED.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn large_pickles_take_turns_and_small_ones_never_wait() {
        let (inside, large) = (AtomicUsize::new(0), 32 << 20);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _permit = acquire(large, large);
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        // This would hang if it had to wait.
                        drop(acquire(10_000, 10_000));
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
    }
}
