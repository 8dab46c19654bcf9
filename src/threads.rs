//! Threads and locks: a lock that survives a panic, and parallel work on scoped threads.

mod fork_lock;

#[cfg(feature = "python")]
pub use fork_lock::register_handlers as register_fork_handlers;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Locks a mutex, even if a thread panicked while it held it. Every value under a lock of ours is complete at any
/// time.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread. Every thread of the crate is started here or by [`try_spawn`], so that no fork falls into the start.
#[cfg(any(feature = "mount", test))]
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<T>> {
    let _guard = fork_lock::hold_forks();
    Builder::new().name(name.to_owned()).spawn(work)
}

/// Starts one more thread; `None` if the system refuses. Callers then work with the threads that they have.
pub fn try_spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Option<ScopedJoinHandle<'scope, T>> {
    let _guard = fork_lock::hold_forks();
    Builder::new().spawn_scoped(scope, work).ok()
}

/// The result of a thread. A panic of that thread continues in this one.
pub fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Applies `work` to each item on at most `threads` threads. The results are in order.
pub fn parallel_map<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    if let [item] = items {
        return vec![work(item)];
    }
    let next = AtomicUsize::new(0);
    let run = || {
        let mut results = Vec::new();
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(n) else { return results };
            results.push((n, work(item)));
        }
    };
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..items.len().min(threads)).map_while(|_| try_spawn(scope, run)).collect();
        let mut results = run();
        others.into_iter().for_each(|other| results.extend(join(other)));
        results
    });
    results.sort_by_key(|(n, _)| *n);
    results.into_iter().map(|(_, result)| result).collect()
}
