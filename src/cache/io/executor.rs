//! The threads that may wait for one device.
//!
//! In: jobs, wanted now, soon or ahead of time. Out: each is run once, mostly in this order, on threads
//! that are started when there is work and end when there is none. A device that hangs holds up the
//! threads of its own lane and nobody else.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::threads::lock;

/// Threads that read one local device: some copy to readers while the others wait for the disk,
/// which gives all it has to two or three.
const LOCAL_THREAD_COUNT: usize = 4;

/// Threads that read one filesystem elsewhere, where each waits long and works little.
const REMOTE_THREAD_COUNT: usize = 16;

/// How long a thread waits for work before it ends: longer than a program pauses between tensors.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Jobs ahead of time that may wait. Those beyond are dropped, the oldest first: what was foreseen
/// so long ago has been read by then, or never will be.
const MAX_PREFETCH_JOBS: usize = 512;

/// Jobs that are wanted now and go before one that is wanted soon: there is a reader behind each of those, too.
const MAX_BLOCKING_STREAK: usize = 3;

/// Work that may wait for the disk. One that is dropped without being run must see to it by itself
/// that nobody goes on waiting for it.
pub type IoJob = Box<dyn FnOnce() + Send>;

pub struct IoExecutor {
    queue: Mutex<JobQueue>,
    work: Condvar,
    max_threads: usize,
}

#[derive(Default)]
struct JobQueue {
    blocking: VecDeque<IoJob>,
    deferred: VecDeque<IoJob>,
    prefetch: VecDeque<IoJob>,
    /// Jobs of `now` that went before those of `soon`.
    blocking_streak: usize,
    running_threads: usize,
    idle_threads: usize,
    stopped: bool,
}

impl IoExecutor {
    pub fn new(local: bool) -> Arc<IoExecutor> {
        let threads = if local { LOCAL_THREAD_COUNT } else { REMOTE_THREAD_COUNT };
        Arc::new(IoExecutor { queue: Mutex::default(), work: Condvar::new(), max_threads: threads })
    }

    /// Runs a job as soon as a thread is free.
    pub fn submit_blocking(self: &Arc<Self>, job: IoJob) {
        self.submit(|queue| {
            queue.blocking.push_back(job);
            None
        });
    }

    /// Runs a job when little is wanted now.
    pub fn submit_deferred(self: &Arc<Self>, job: IoJob) {
        self.submit(|queue| {
            queue.deferred.push_back(job);
            None
        });
    }

    /// Runs a job when nothing else is wanted.
    pub fn submit_prefetch(self: &Arc<Self>, job: IoJob) {
        self.submit(|queue| {
            queue.prefetch.push_back(job);
            (queue.prefetch.len() > MAX_PREFETCH_JOBS).then(|| queue.prefetch.pop_front()).flatten()
        });
    }

    /// Drops all jobs that have not begun, and every later one.
    pub fn stop(&self) {
        let mut queue = self.lock();
        queue.stopped = true;
        let jobs = queue.take_all();
        drop(queue);
        self.work.notify_all();
        drop(jobs);
    }

    /// Jobs are dropped outside the lock: each then tells those who wait for it.
    fn submit(self: &Arc<Self>, push: impl FnOnce(&mut JobQueue) -> Option<IoJob>) {
        let mut queue = self.lock();
        let dropped = push(&mut queue);
        if queue.stopped {
            drop(queue);
            return self.stop();
        }
        let start =
            queue.idle_threads < queue.job_count() && queue.running_threads < self.max_threads;
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

    /// A thread could not be started. If there is no other, nobody will ever do what waits.
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
        let lane = Arc::clone(self);
        let thread = std::thread::Builder::new().name("ckptfs-read".to_owned());
        thread.spawn(move || lane.run_jobs()).is_ok()
    }

    fn run_jobs(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.pop() {
                drop(queue);
                // A job that panics has told those who wait as it was dropped.
                drop(catch_unwind(AssertUnwindSafe(job)));
                queue = self.lock();
                continue;
            }
            if queue.stopped {
                break;
            }
            queue.idle_threads += 1;
            let (woken, waited) =
                self.work.wait_timeout(queue, IDLE_TIMEOUT).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle_threads -= 1;
            if waited.timed_out() && queue.job_count() == 0 {
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
    fn job_count(&self) -> usize {
        self.blocking.len() + self.deferred.len() + self.prefetch.len()
    }

    fn pop(&mut self) -> Option<IoJob> {
        self.blocking_streak = if self.deferred.is_empty() { 0 } else { self.blocking_streak + 1 };
        if self.blocking_streak <= MAX_BLOCKING_STREAK
            && let Some(job) = self.blocking.pop_front()
        {
            return Some(job);
        }
        self.blocking_streak = 0;
        [&mut self.deferred, &mut self.blocking, &mut self.prefetch]
            .into_iter()
            .find_map(VecDeque::pop_front)
    }

    fn take_all(&mut self) -> [VecDeque<IoJob>; 3] {
        [&mut self.blocking, &mut self.deferred, &mut self.prefetch].map(std::mem::take)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_is_wanted_now_comes_first_and_a_panic_harms_nobody_else() {
        let lane = Arc::new(IoExecutor {
            max_threads: 1,
            ..Arc::into_inner(IoExecutor::new(true)).unwrap()
        });
        let (hold, held) = channel::<()>();
        let (say, said) = channel();
        lane.submit_blocking(Box::new(move || held.recv().unwrap()));
        for n in [1, 2] {
            let say = say.clone();
            lane.submit_prefetch(Box::new(move || say.send(n).unwrap()));
        }
        lane.submit_blocking(Box::new(|| panic!("meant to")));
        lane.submit_blocking(Box::new(move || say.send(0).unwrap()));
        hold.send(()).unwrap();
        assert_eq!(said.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn what_is_wanted_soon_waits_for_what_is_wanted_now_but_not_for_ever() {
        let lane = Arc::new(IoExecutor {
            max_threads: 1,
            ..Arc::into_inner(IoExecutor::new(true)).unwrap()
        });
        let (hold, held) = channel::<()>();
        let (say, said) = channel();
        let begin = say.clone();
        lane.submit_blocking(Box::new(move || {
            begin.send("begun").unwrap();
            held.recv().unwrap();
        }));
        assert_eq!(said.recv(), Ok("begun"));
        let job = |word: &'static str| -> IoJob {
            let say = say.clone();
            Box::new(move || say.send(word).unwrap())
        };
        lane.submit_prefetch(job("ahead"));
        for word in ["soon 1", "soon 2", "soon 3"] {
            lane.submit_deferred(job(word));
        }
        for word in ["now 1", "now 2", "now 3", "now 4"] {
            lane.submit_blocking(job(word));
        }
        drop(say);
        hold.send(()).unwrap();
        let order = ["now 1", "now 2", "now 3", "soon 1", "now 4", "soon 2", "soon 3", "ahead"];
        assert_eq!(said.iter().collect::<Vec<_>>(), order);
    }

    #[test]
    fn a_stopped_lane_drops_what_waits_and_what_comes() {
        struct Dropped(std::sync::mpsc::Sender<&'static str>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.send("dropped").unwrap();
            }
        }
        let lane = Arc::new(IoExecutor {
            max_threads: 1,
            ..Arc::into_inner(IoExecutor::new(true)).unwrap()
        });
        let (hold, held) = channel::<()>();
        lane.submit_blocking(Box::new(move || assert!(held.recv().is_err())));
        let (say, said) = channel();
        let job = |dropped: Dropped| -> IoJob { Box::new(move || drop(dropped)) };
        lane.submit_blocking(job(Dropped(say.clone())));
        lane.stop();
        assert_eq!(said.recv(), Ok("dropped"));
        lane.submit_prefetch(job(Dropped(say)));
        assert_eq!(said.recv(), Ok("dropped"));
        drop(hold);
    }
}
