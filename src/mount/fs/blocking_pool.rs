//! Threads for requests that may wait for the source's filesystem.
//!
//! Each job names the device that it reads. A device that hangs takes its share of the threads and no more. Its further
//! jobs wait in a queue, and jobs of other devices run as before.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::threads::lock;

/// The threads of a mount: started when needed, ended when idle.
#[derive(Debug)]
pub struct BlockingPool {
    handle: BlockingPoolHandle,
    runtime: Option<tokio::runtime::Runtime>,
}

/// Jobs of one device that run at once: more than the programs of one machine ask for at a time. Each costs a
/// few pages of stack.
const MAX_THREADS_PER_DEVICE: usize = 1_024;

/// Jobs of all devices that run at once: a handful of devices can hang.
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
        let handle =
            BlockingPoolHandle { runtime: runtime.handle().clone(), devices: Arc::default() };
        Ok(BlockingPool { handle, runtime: Some(runtime) })
    }

    /// Runs a job on a thread that may wait for a device.
    pub fn run(&self, device: u64, job: impl FnOnce() + Send + 'static) {
        self.handle.run(device, job);
    }

    /// A handle that runs jobs as long as the pool lives.
    pub fn handle(&self) -> BlockingPoolHandle {
        self.handle.clone()
    }
}

impl Drop for BlockingPool {
    fn drop(&mut self) {
        // Jobs that hang with their source are left behind.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

type BlockingJob = Box<dyn FnOnce() + Send>;

/// The jobs of one device.
#[derive(Default)]
struct DeviceQueue {
    running: usize,
    waiting: VecDeque<BlockingJob>,
}

/// Runs jobs on the threads of a pool.
#[derive(Clone)]
pub struct BlockingPoolHandle {
    runtime: tokio::runtime::Handle,
    devices: Arc<Mutex<HashMap<u64, DeviceQueue>>>,
}

impl std::fmt::Debug for BlockingPoolHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockingPoolHandle").finish_non_exhaustive()
    }
}

impl BlockingPoolHandle {
    /// Runs a job on a thread that may wait for a device.
    pub fn run(&self, device: u64, job: impl FnOnce() + Send + 'static) {
        let mut devices = lock(&self.devices);
        let queue = devices.entry(device).or_default();
        if queue.running >= MAX_THREADS_PER_DEVICE {
            return queue.waiting.push_back(Box::new(job));
        }
        queue.running += 1;
        drop(devices);
        let handle = self.clone();
        self.runtime.spawn_blocking(move || {
            let mut next: Option<BlockingJob> = Some(Box::new(job));
            while let Some(job) = next {
                // A job that panics drops its reply, which answers EIO. The next one runs.
                drop(catch_unwind(AssertUnwindSafe(job)));
                next = handle.next_job(device);
            }
        });
    }

    /// The next job of a device. If there is none, the device has one running job less.
    fn next_job(&self, device: u64) -> Option<BlockingJob> {
        let mut devices = lock(&self.devices);
        let Entry::Occupied(mut queue) = devices.entry(device) else { return None };
        let next = queue.get_mut().waiting.pop_front();
        if next.is_none() {
            queue.get_mut().running -= 1;
            if queue.get().running == 0 {
                queue.remove();
            }
        }
        next
    }
}
