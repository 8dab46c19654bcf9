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
const LOCAL_THREADS: usize = 4;

/// Threads that read one filesystem elsewhere, where each waits long and works little.
const REMOTE_THREADS: usize = 16;

/// How long a thread waits for work before it ends: longer than a program pauses between tensors.
const IDLE: Duration = Duration::from_secs(5);

/// Jobs ahead of time that may wait. Those beyond are dropped, the oldest first: what was foreseen
/// so long ago has been read by then, or never will be.
const MOST_AHEAD: usize = 512;

/// Jobs that are wanted now and go before one that is wanted soon: there is a reader behind each of those, too.
const IN_A_ROW: usize = 3;

/// Work that may wait for the disk. One that is dropped without being run must see to it by itself
/// that nobody goes on waiting for it.
pub type Job = Box<dyn FnOnce() + Send>;

pub struct Lane {
    queue: Mutex<Queue>,
    work: Condvar,
    threads: usize,
}

#[derive(Default)]
struct Queue {
    now: VecDeque<Job>,
    soon: VecDeque<Job>,
    ahead: VecDeque<Job>,
    /// Jobs of `now` that went before those of `soon`.
    in_a_row: usize,
    running: usize,
    idle: usize,
    stopped: bool,
}

impl Lane {
    pub fn new(local: bool) -> Arc<Lane> {
        let threads = if local { LOCAL_THREADS } else { REMOTE_THREADS };
        Arc::new(Lane { queue: Mutex::default(), work: Condvar::new(), threads })
    }

    /// Runs a job as soon as a thread is free.
    pub fn run_now(self: &Arc<Self>, job: Job) {
        self.add(|queue| {
            queue.now.push_back(job);
            None
        });
    }

    /// Runs a job when little is wanted now.
    pub fn run_soon(self: &Arc<Self>, job: Job) {
        self.add(|queue| {
            queue.soon.push_back(job);
            None
        });
    }

    /// Runs a job when nothing else is wanted.
    pub fn run_ahead(self: &Arc<Self>, job: Job) {
        self.add(|queue| {
            queue.ahead.push_back(job);
            (queue.ahead.len() > MOST_AHEAD).then(|| queue.ahead.pop_front()).flatten()
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
    fn add(self: &Arc<Self>, push: impl FnOnce(&mut Queue) -> Option<Job>) {
        let mut queue = self.lock();
        let dropped = push(&mut queue);
        if queue.stopped {
            drop(queue);
            return self.stop();
        }
        let start = queue.idle < queue.waiting() && queue.running < self.threads;
        let wake = queue.idle > 0;
        if start {
            queue.running += 1;
        }
        drop(queue);
        drop(dropped);
        if start && self.start() {
            return;
        }
        if wake {
            self.work.notify_one();
        }
        if start {
            self.one_less();
        }
    }

    /// A thread could not be started. If there is no other, nobody will ever do what waits.
    fn one_less(&self) {
        let mut queue = self.lock();
        queue.running -= 1;
        if queue.running > 0 {
            return;
        }
        let jobs = queue.take_all();
        drop(queue);
        tracing::error!("no thread can be started to read with");
        drop(jobs);
    }

    fn start(self: &Arc<Self>) -> bool {
        let lane = Arc::clone(self);
        let thread = std::thread::Builder::new().name("ckptfs-read".to_owned());
        thread.spawn(move || lane.work()).is_ok()
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.next() {
                drop(queue);
                // A job that panics has told those who wait as it was dropped.
                drop(catch_unwind(AssertUnwindSafe(job)));
                queue = self.lock();
                continue;
            }
            if queue.stopped {
                break;
            }
            queue.idle += 1;
            let (woken, waited) =
                self.work.wait_timeout(queue, IDLE).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle -= 1;
            if waited.timed_out() && queue.waiting() == 0 {
                break;
            }
        }
        queue.running -= 1;
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }
}

impl Queue {
    fn waiting(&self) -> usize {
        self.now.len() + self.soon.len() + self.ahead.len()
    }

    fn next(&mut self) -> Option<Job> {
        self.in_a_row = if self.soon.is_empty() { 0 } else { self.in_a_row + 1 };
        if self.in_a_row <= IN_A_ROW
            && let Some(job) = self.now.pop_front()
        {
            return Some(job);
        }
        self.in_a_row = 0;
        [&mut self.soon, &mut self.now, &mut self.ahead].into_iter().find_map(VecDeque::pop_front)
    }

    fn take_all(&mut self) -> [VecDeque<Job>; 3] {
        [&mut self.now, &mut self.soon, &mut self.ahead].map(std::mem::take)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_is_wanted_now_comes_first_and_a_panic_harms_nobody_else() {
        let lane = Arc::new(Lane { threads: 1, ..Arc::into_inner(Lane::new(true)).unwrap() });
        let (hold, held) = channel::<()>();
        let (say, said) = channel();
        lane.run_now(Box::new(move || held.recv().unwrap()));
        for n in [1, 2] {
            let say = say.clone();
            lane.run_ahead(Box::new(move || say.send(n).unwrap()));
        }
        lane.run_now(Box::new(|| panic!("meant to")));
        lane.run_now(Box::new(move || say.send(0).unwrap()));
        hold.send(()).unwrap();
        assert_eq!(said.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn what_is_wanted_soon_waits_for_what_is_wanted_now_but_not_for_ever() {
        let lane = Arc::new(Lane { threads: 1, ..Arc::into_inner(Lane::new(true)).unwrap() });
        let (hold, held) = channel::<()>();
        let (say, said) = channel();
        let begin = say.clone();
        lane.run_now(Box::new(move || {
            begin.send("begun").unwrap();
            held.recv().unwrap();
        }));
        assert_eq!(said.recv(), Ok("begun"));
        let job = |word: &'static str| -> Job {
            let say = say.clone();
            Box::new(move || say.send(word).unwrap())
        };
        lane.run_ahead(job("ahead"));
        for word in ["soon 1", "soon 2", "soon 3"] {
            lane.run_soon(job(word));
        }
        for word in ["now 1", "now 2", "now 3", "now 4"] {
            lane.run_now(job(word));
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
        let lane = Arc::new(Lane { threads: 1, ..Arc::into_inner(Lane::new(true)).unwrap() });
        let (hold, held) = channel::<()>();
        lane.run_now(Box::new(move || assert!(held.recv().is_err())));
        let (say, said) = channel();
        let job = |dropped: Dropped| -> Job { Box::new(move || drop(dropped)) };
        lane.run_now(job(Dropped(say.clone())));
        lane.stop();
        assert_eq!(said.recv(), Ok("dropped"));
        lane.run_ahead(job(Dropped(say)));
        assert_eq!(said.recv(), Ok("dropped"));
        drop(hold);
    }
}
