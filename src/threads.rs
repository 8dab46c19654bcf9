//! What every room with threads needs: a lock that outlives a panic, and several things done at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// A lock whose holder panicked guards nothing half done here: every value under one is whole at
/// any time.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One more thread, if the system allows one: whoever wants it goes on without.
pub fn try_spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Option<ScopedJoinHandle<'scope, T>> {
    Builder::new().spawn_scoped(scope, work).ok()
}

/// What came of a thread. One that panics takes this one with it, as if it had done the work itself.
pub fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Does the same with each, on so many threads at the most; the answers are in order.
pub fn parallel_map<T: Sync, R: Send>(
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
        let others: Vec<_> =
            (1..of.len().min(threads)).map_while(|_| try_spawn(scope, some)).collect();
        let mut done = some();
        others.into_iter().for_each(|other| done.extend(join(other)));
        done
    });
    done.sort_by_key(|(n, _)| *n);
    done.into_iter().map(|(_, answer)| answer).collect()
}
