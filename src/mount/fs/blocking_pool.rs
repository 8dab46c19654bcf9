//! Threads that wait for the source, and what becomes of an answer that panics.
//!
//! In: questions, each with the device that it is about. Out: each is asked once, on a thread that may
//! wait. A device that hangs takes its share of the threads and no more: what else is asked of it waits
//! in a queue, and others are asked as before.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fuser::Errno;

use crate::threads::lock;

/// Threads for what may wait on the source's filesystem: made when needed, gone when idle.
#[derive(Debug)]
pub struct BlockingPool {
    handle: BlockingPoolHandle,
    runtime: Option<tokio::runtime::Runtime>,
}

/// Questions of one device that may wait at once before others of it wait for them: more than the
/// programs of one machine ask at a time, and each costs a few pages of stack.
const MAX_THREADS_PER_DEVICE: usize = 1_024;

/// The same for all together: a handful of devices can hang.
const MAX_POOL_THREADS: usize = 8 * MAX_THREADS_PER_DEVICE;

/// As long as a loader pauses between two files.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

impl BlockingPool {
    pub fn new() -> io::Result<BlockingPool> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(MAX_POOL_THREADS)
            .thread_keep_alive(IDLE_TIMEOUT)
            .thread_name("ckptfs asks")
            .build()?;
        let asker =
            BlockingPoolHandle { runtime: runtime.handle().clone(), devices: Arc::default() };
        Ok(BlockingPool { handle: asker, runtime: Some(runtime) })
    }

    /// Does it on a thread that may wait.
    pub fn run(&self, device: u64, what: impl FnOnce() + Send + 'static) {
        self.handle.run(device, what);
    }

    /// The same, for those who do not know yet whether they must.
    pub fn handle(&self) -> BlockingPoolHandle {
        self.handle.clone()
    }
}

type BlockingJob = Box<dyn FnOnce() + Send>;

/// What is asked of one device just now, and what has to wait for that.
#[derive(Default)]
struct DeviceQueue {
    running: usize,
    waiting: VecDeque<BlockingJob>,
}

/// A way to the threads.
#[derive(Clone)]
pub struct BlockingPoolHandle {
    runtime: tokio::runtime::Handle,
    devices: Arc<Mutex<HashMap<u64, DeviceQueue>>>,
}

impl std::fmt::Debug for BlockingPoolHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asker").finish_non_exhaustive()
    }
}

impl BlockingPoolHandle {
    /// Does it on a thread that may wait.
    pub fn run(&self, device: u64, what: impl FnOnce() + Send + 'static) {
        let mut devices = lock(&self.devices);
        let about = devices.entry(device).or_default();
        if about.running >= MAX_THREADS_PER_DEVICE {
            return about.waiting.push_back(Box::new(what));
        }
        about.running += 1;
        drop(devices);
        let asker = self.clone();
        self.runtime.spawn_blocking(move || {
            let mut next: Option<BlockingJob> = Some(Box::new(what));
            while let Some(question) = next {
                // A question that panics has answered by being dropped; the next one is asked.
                drop(catch_unwind(AssertUnwindSafe(question)));
                next = asker.next_job(device);
            }
        });
    }

    /// The next question of a device; if there is none, one less is asked of it.
    fn next_job(&self, device: u64) -> Option<BlockingJob> {
        let mut devices = lock(&self.devices);
        let Entry::Occupied(mut about) = devices.entry(device) else { return None };
        let next = about.get_mut().waiting.pop_front();
        if next.is_none() {
            about.get_mut().running -= 1;
            if about.get().running == 0 {
                about.remove();
            }
        }
        next
    }
}

impl Drop for BlockingPool {
    fn drop(&mut self) {
        // What still waits for a source that hangs is not waited for.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// An answer, or EIO if it panics: one request is lost, and the mount lives.
pub fn catch_panic<T>(answer: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    // Whatever was half done is behind a lock or belongs to this request alone.
    catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|_| {
        tracing::error!("a request could not be answered: a fault in ckptfs, please report it");
        Err(Errno::EIO)
    })
}
