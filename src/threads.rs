//! Threads and locks: a lock that survives a panic, parallel work on scoped threads, and forks that wait for the start
//! of a thread.
//!
//! glibc (2.36 was tested) starts a thread on the stack of an earlier one. It frees the thread-local memory found
//! there, then clears the pointers to it. A child forked in between inherits the uncleared pointers and counts the
//! stack as unused. The next thread on that stack frees the memory again, which corrupts the child's heap.

use std::cell::Cell;
#[cfg(feature = "remote")]
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Locks a mutex, even if a thread panicked while it held it. Every value under a lock of ours is complete at any
/// time.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex that a forked child uses too, and holds forks back while it is held: no other thread holds it in a child.
#[cfg(feature = "remote")]
pub fn lock_holding_forks<T>(mutex: &Mutex<T>) -> ForkSafeGuard<'_, T> {
    let _forks = hold_forks();
    ForkSafeGuard { guard: lock(mutex), _forks }
}

/// The guard of [`lock_holding_forks`]. The mutex is unlocked before forks go on.
#[cfg(feature = "remote")]
pub struct ForkSafeGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    _forks: RwLockReadGuard<'static, ()>,
}

#[cfg(feature = "remote")]
impl<T> Deref for ForkSafeGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

#[cfg(feature = "remote")]
impl<T> DerefMut for ForkSafeGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Starts a thread. Every thread of the crate is started here or by [`try_spawn`], so that no fork falls into the start.
#[cfg(any(feature = "mount", feature = "remote", test))]
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<T>> {
    let _guard = hold_forks();
    Builder::new().name(name.to_owned()).spawn(work)
}

/// Starts one more thread; `None` if the system refuses. Callers then work with the threads that they have.
pub fn try_spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Option<ScopedJoinHandle<'scope, T>> {
    let _guard = hold_forks();
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

/// Read-locked while a thread starts or a `ForkSafeGuard` is held, write-locked during a fork.
static FORK_LOCK: RwLock<()> = RwLock::new(());
/// Not a `Once`: a child that is forked while another thread is in it would wait for that thread for ever.
static HAS_HANDLERS: AtomicBool = AtomicBool::new(false);

thread_local! {
    static FORKING: Cell<Option<RwLockWriteGuard<'static, ()>>> = const { Cell::new(None) };
}

/// Holds forks of this process back until the guard is dropped.
pub fn hold_forks() -> RwLockReadGuard<'static, ()> {
    register_fork_handlers();
    FORK_LOCK.read().unwrap_or_else(PoisonError::into_inner)
}

/// Makes forks wait for [`hold_forks`] from now on. The first start of a thread does so too, but misses a fork that
/// another thread began before.
pub fn register_fork_handlers() {
    if !HAS_HANDLERS.swap(true, Ordering::Relaxed) {
        // It fails only without memory. Forks are then as safe as without the lock.
        #[allow(unsafe_code)]
        // SAFETY: the handlers take no arguments and do not unwind. glibc forgets them if this library is unloaded.
        unsafe {
            libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork));
        }
    }
}

extern "C" fn before_fork() {
    let guard = FORK_LOCK.write().unwrap_or_else(PoisonError::into_inner);
    // A thread that ends has no thread-local value any more. It forks without the lock.
    let _ = FORKING.try_with(|forking| forking.set(Some(guard)));
}

/// Runs in the parent and in the child, on the thread that forked.
extern "C" fn after_fork() {
    let _ = FORKING.try_with(Cell::take);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    /// Forks, and returns the exit code of the child, which is what `work` returns there.
    fn exit_code_of_fork(work: impl FnOnce() -> i32) -> i32 {
        #[allow(unsafe_code)]
        // SAFETY: the child runs `work` alone, and ends without returning. glibc's memory can be used after a fork.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(work());
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            libc::WEXITSTATUS(status)
        }
    }

    #[test]
    fn a_fork_waits_until_no_thread_is_being_started_and_its_child_can_start_threads() {
        let has_ended = AtomicBool::new(false);
        let (sender, started) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _guard = hold_forks();
                sender.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(200));
                has_ended.store(true, Ordering::SeqCst);
            });
            started.recv().unwrap();
            let code = exit_code_of_fork(|| {
                let thread = spawn("child", || 3).map(|thread| thread.join());
                let result = if let Ok(Ok(result)) = thread { result } else { 1 };
                if has_ended.load(Ordering::SeqCst) { result } else { 2 }
            });
            assert_eq!(code, 3);
        });
        assert_eq!(spawn("parent", || 4).unwrap().join().unwrap(), 4);
    }
}
