//! What every room with threads needs: a lock that outlives a panic, and several things done at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder panicked guards nothing half done here: every value under one is whole at
/// any time.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does the same with each, on so many threads at the most; the answers are in order.
pub fn together<T: Sync, R: Send>(
    of: &[T],
    threads: usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    if let [one] = of {
        return vec![work(one)];
    }
    let next = AtomicUsize::new(0);
    let some = || {
        let mut done = Vec::new();
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some(one) = of.get(n) else { return done };
            done.push((n, work(one)));
        }
    };
    let mut done: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..of.len().min(threads)).map(|_| scope.spawn(some)).collect();
        // A thread that panics takes this one with it, as if it had done the work itself.
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.flatten().collect()
    });
    done.sort_by_key(|(n, _)| *n);
    done.into_iter().map(|(_, answer)| answer).collect()
}
