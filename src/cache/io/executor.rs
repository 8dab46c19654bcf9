//! The threads that may wait for a device, apart from those of other devices.
//!
//! In: jobs of three priorities. Out: each is run once, mostly by priority, on threads that start when there is work
//! and end when there is none. A device that hangs blocks the threads of its own executor alone.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::threads::{lock, spawn};

/// Threads for a local device: some copy to readers while the others wait for the disk, which two or three keep busy.
const LOCAL_THREAD_COUNT: usize = 4;

/// Threads for a remote filesystem, where each waits long and works little.
const REMOTE_THREAD_COUNT: usize = 16;

/// Threads for a store, which serves requests side by side: readers of single pages never wait for one another.
const STORE_THREAD_COUNT: usize = 64;

/// Threads of a store that prefetch. Each fills a part; their parts together take at most half the default memory limit.
pub const STORE_PREFETCH_THREAD_COUNT: usize = 32;

/// Bytes of the memory limit for each thread of a store. A thread without a free buffer takes scratch memory beside the
/// limit, so a small limit allows few threads.
const STORE_LIMIT_BYTES_PER_THREAD: u64 = 3 << 20;

/// How long a thread waits for work before it ends: longer than a program pauses between tensors.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Prefetch jobs that may wait. Older ones are dropped: what was predicted so long ago has been read by now, or never
/// will be.
const MAX_PREFETCH_JOBS: usize = 512;

/// Blocking jobs that run before a deferred one does: it has a reader, too.
const MAX_BLOCKING_STREAK: usize = 3;

/// Work that may wait for the disk. A job that is dropped without being run must tell its waiters.
pub type IoJob = Box<dyn FnOnce() + Send>;

/// The kind of a device, which decides its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// A disk of this machine.
    Disk,
    /// Another machine's filesystem.
    Network,
    /// A store, with the number of all threads and of those that prefetch.
    Store { threads: usize, prefetch_threads: usize },
}

impl DeviceKind {
    /// A store that serves at most `max_requests` parts at once. A small memory limit allows fewer threads.
    pub fn store(max_requests: usize, memory_limit: u64) -> DeviceKind {
        let threads = (memory_limit / STORE_LIMIT_BYTES_PER_THREAD) as usize;
        let threads = threads.clamp(LOCAL_THREAD_COUNT, STORE_THREAD_COUNT);
        let prefetch_threads = (threads / 2).min(max_requests).min(STORE_PREFETCH_THREAD_COUNT);
        DeviceKind::Store { threads, prefetch_threads }
    }

    /// The numbers of all threads and of those that prefetch.
    fn thread_counts(self) -> (usize, usize) {
        match self {
            DeviceKind::Disk => (LOCAL_THREAD_COUNT, LOCAL_THREAD_COUNT),
            DeviceKind::Network => (REMOTE_THREAD_COUNT, REMOTE_THREAD_COUNT),
            DeviceKind::Store { threads, prefetch_threads } => (threads, prefetch_threads),
        }
    }
}

/// The executors of all devices. They stop when the set is dropped.
#[derive(Default)]
pub struct ExecutorSet {
    devices: Mutex<DeviceExecutors>,
}

#[derive(Default)]
struct DeviceExecutors {
    /// Memory, which has no device, has an executor too: gathering takes its time.
    by_device: HashMap<(Option<u64>, DeviceKind), Arc<IoExecutor>>,
    is_stopped: bool,
}

impl ExecutorSet {
    /// The executor of a device.
    pub fn for_device(&self, device: Option<u64>, kind: DeviceKind) -> Arc<IoExecutor> {
        let mut devices = lock(&self.devices);
        let is_stopped = devices.is_stopped;
        let executor =
            devices.by_device.entry((device, kind)).or_insert_with(|| IoExecutor::new(kind));
        let executor = Arc::clone(executor);
        drop(devices);
        if is_stopped {
            executor.stop();
        }
        executor
    }

    /// Drops all jobs that have not begun, and every later one.
    pub fn stop(&self) {
        let mut devices = lock(&self.devices);
        devices.is_stopped = true;
        let executors: Vec<Arc<IoExecutor>> = devices.by_device.values().cloned().collect();
        drop(devices);
        executors.iter().for_each(|executor| executor.stop());
    }
}

impl Drop for ExecutorSet {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The threads of one device, and the jobs that wait for one of them.
pub struct IoExecutor {
    queue: Mutex<JobQueue>,
    work: Condvar,
    max_threads: usize,
}

#[derive(Default)]
struct JobQueue {
    max_prefetch_threads: usize,
    prefetch_threads: usize,
    blocking: VecDeque<IoJob>,
    deferred: VecDeque<IoJob>,
    prefetch: VecDeque<IoJob>,
    /// Blocking jobs that ran while deferred ones waited.
    blocking_streak: usize,
    running_threads: usize,
    idle_threads: usize,
    is_stopped: bool,
}

impl IoExecutor {
    pub fn new(kind: DeviceKind) -> Arc<IoExecutor> {
        let (max_threads, max_prefetch_threads) = kind.thread_counts();
        let queue = Mutex::new(JobQueue { max_prefetch_threads, ..JobQueue::default() });
        Arc::new(IoExecutor { queue, work: Condvar::new(), max_threads })
    }

    /// Runs a job as soon as a thread is free.
    pub fn submit_blocking(self: &Arc<Self>, job: IoJob) {
        self.submit(|queue| {
            queue.blocking.push_back(job);
            None
        });
    }

    /// Runs a job when no blocking job waits, or after a few of these.
    pub fn submit_deferred(self: &Arc<Self>, job: IoJob) {
        self.submit(|queue| {
            queue.deferred.push_back(job);
            None
        });
    }

    /// Runs a job when no other waits.
    pub fn submit_prefetch(self: &Arc<Self>, job: IoJob) {
        self.submit(|queue| {
            queue.prefetch.push_back(job);
            (queue.prefetch.len() > MAX_PREFETCH_JOBS).then(|| queue.prefetch.pop_front()).flatten()
        });
    }

    /// Drops all jobs that have not begun, and every later one.
    pub fn stop(&self) {
        let mut queue = self.lock();
        queue.is_stopped = true;
        let jobs = queue.take_all();
        drop(queue);
        self.work.notify_all();
        drop(jobs);
    }

    /// Queues a job. Jobs are dropped outside the lock: each then tells its waiters.
    fn submit(self: &Arc<Self>, push: impl FnOnce(&mut JobQueue) -> Option<IoJob>) {
        let mut queue = self.lock();
        let dropped = push(&mut queue);
        if queue.is_stopped {
            drop(queue);
            return self.stop();
        }
        let needs_thread = queue.idle_threads < queue.runnable_count();
        let start = needs_thread && queue.running_threads < self.max_threads;
        let wake = queue.idle_threads > 0;
        if start {
            queue.running_threads += 1;
        }
        drop(queue);
        drop(dropped);
        if start && self.spawn_thread() {
            return;
        }
        if wake {
            self.work.notify_one();
        }
        if start {
            self.on_spawn_failure();
        }
    }

    /// Drops all jobs if there is no thread at all to run them.
    fn on_spawn_failure(&self) {
        let mut queue = self.lock();
        queue.running_threads -= 1;
        if queue.running_threads > 0 {
            return;
        }
        let jobs = queue.take_all();
        drop(queue);
        tracing::error!("no thread can be started to read with");
        drop(jobs);
    }

    fn spawn_thread(self: &Arc<Self>) -> bool {
        let executor = Arc::clone(self);
        spawn("ckptfs-read", move || executor.run_jobs()).is_ok()
    }

    fn run_jobs(&self) {
        let mut queue = self.lock();
        loop {
            if let Some((job, is_prefetch)) = queue.pop() {
                drop(queue);
                // A job that panics has told its waiters as it was dropped.
                drop(catch_unwind(AssertUnwindSafe(job)));
                queue = self.lock();
                queue.prefetch_threads -= usize::from(is_prefetch);
                continue;
            }
            if queue.is_stopped {
                break;
            }
            queue.idle_threads += 1;
            let (woken, waited) =
                self.work.wait_timeout(queue, IDLE_TIMEOUT).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle_threads -= 1;
            if waited.timed_out() && queue.runnable_count() == 0 {
                break;
            }
        }
        queue.running_threads -= 1;
    }

    fn lock(&self) -> MutexGuard<'_, JobQueue> {
        lock(&self.queue)
    }
}

impl JobQueue {
    /// Jobs that a thread could run now.
    fn runnable_count(&self) -> usize {
        let prefetch_room = self.max_prefetch_threads.saturating_sub(self.prefetch_threads);
        self.blocking.len() + self.deferred.len() + self.prefetch.len().min(prefetch_room)
    }

    /// The next job, and whether it is a prefetch.
    fn pop(&mut self) -> Option<(IoJob, bool)> {
        self.blocking_streak = if self.deferred.is_empty() { 0 } else { self.blocking_streak + 1 };
        if self.blocking_streak <= MAX_BLOCKING_STREAK
            && let Some(job) = self.blocking.pop_front()
        {
            return Some((job, false));
        }
        self.blocking_streak = 0;
        let queues = [&mut self.deferred, &mut self.blocking];
        if let Some(job) = queues.into_iter().find_map(VecDeque::pop_front) {
            return Some((job, false));
        }
        if self.prefetch_threads >= self.max_prefetch_threads {
            return None;
        }
        let job = self.prefetch.pop_front()?;
        self.prefetch_threads += 1;
        Some((job, true))
    }

    fn take_all(&mut self) -> [VecDeque<IoJob>; 3] {
        [&mut self.blocking, &mut self.deferred, &mut self.prefetch].map(std::mem::take)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn single_thread() -> Arc<IoExecutor> {
        let executor = Arc::into_inner(IoExecutor::new(DeviceKind::Disk)).unwrap();
        Arc::new(IoExecutor { max_threads: 1, ..executor })
    }

    #[test]
    fn blocking_jobs_run_first_and_a_panic_harms_no_other_job() {
        let executor = single_thread();
        let (hold, held) = channel::<()>();
        let (sender, ran) = channel();
        executor.submit_blocking(Box::new(move || held.recv().unwrap()));
        for n in [1, 2] {
            let sender = sender.clone();
            executor.submit_prefetch(Box::new(move || sender.send(n).unwrap()));
        }
        executor.submit_blocking(Box::new(|| panic!("meant to")));
        executor.submit_blocking(Box::new(move || sender.send(0).unwrap()));
        hold.send(()).unwrap();
        assert_eq!(ran.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn deferred_jobs_wait_for_blocking_ones_but_not_for_ever() {
        let executor = single_thread();
        let (hold, held) = channel::<()>();
        let (sender, ran) = channel();
        let begin = sender.clone();
        executor.submit_blocking(Box::new(move || {
            begin.send("begun").unwrap();
            held.recv().unwrap();
        }));
        assert_eq!(ran.recv(), Ok("begun"));
        let job = |name: &'static str| -> IoJob {
            let sender = sender.clone();
            Box::new(move || sender.send(name).unwrap())
        };
        executor.submit_prefetch(job("prefetch"));
        for name in ["deferred 1", "deferred 2", "deferred 3"] {
            executor.submit_deferred(job(name));
        }
        for name in ["blocking 1", "blocking 2", "blocking 3", "blocking 4"] {
            executor.submit_blocking(job(name));
        }
        drop(sender);
        hold.send(()).unwrap();
        let order = [
            "blocking 1",
            "blocking 2",
            "blocking 3",
            "deferred 1",
            "blocking 4",
            "deferred 2",
            "deferred 3",
            "prefetch",
        ];
        assert_eq!(ran.iter().collect::<Vec<_>>(), order);
    }

    #[test]
    fn a_reader_of_a_store_waits_for_no_prefetch() {
        let executor = IoExecutor::new(DeviceKind::store(2, 1 << 30));
        let (release, held) = channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (sender, ran) = channel();
        for _ in 0..10 {
            let (held, sender) = (Arc::clone(&held), sender.clone());
            executor.submit_prefetch(Box::new(move || {
                sender.send("prefetch").unwrap();
                let _ = held.lock().unwrap().recv();
            }));
        }
        assert_eq!([ran.recv(), ran.recv()], [Ok("prefetch"); 2]);
        executor.submit_blocking(Box::new(move || sender.send("reader").unwrap()));
        assert_eq!(ran.recv(), Ok("reader"));
        drop(release);
        assert_eq!(ran.iter().count(), 8);
    }

    #[test]
    fn a_stopped_executor_drops_waiting_and_later_jobs() {
        struct DropSignal(std::sync::mpsc::Sender<&'static str>);
        impl Drop for DropSignal {
            fn drop(&mut self) {
                self.0.send("dropped").unwrap();
            }
        }
        let executor = single_thread();
        let (hold, held) = channel::<()>();
        executor.submit_blocking(Box::new(move || assert!(held.recv().is_err())));
        let (sender, dropped) = channel();
        let job = |signal: DropSignal| -> IoJob { Box::new(move || drop(signal)) };
        executor.submit_blocking(job(DropSignal(sender.clone())));
        executor.stop();
        assert_eq!(dropped.recv(), Ok("dropped"));
        executor.submit_prefetch(job(DropSignal(sender)));
        assert_eq!(dropped.recv(), Ok("dropped"));
        drop(hold);
    }
}
