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
pub struct Askers {
    asker: Asker,
    runtime: Option<tokio::runtime::Runtime>,
}

/// Questions of one device that may wait at once before others of it wait for them: more than the
/// programs of one machine ask at a time, and each costs a few pages of stack.
const MOST_OF_ONE: usize = 1_024;

/// The same for all together: a handful of devices can hang.
const MOST: usize = 8 * MOST_OF_ONE;

/// As long as a loader pauses between two files.
const IDLE: Duration = Duration::from_secs(10);

impl Askers {
    pub fn new() -> io::Result<Askers> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(MOST)
            .thread_keep_alive(IDLE)
            .thread_name("ckptfs asks")
            .build()?;
        let asker = Asker { threads: runtime.handle().clone(), devices: Arc::default() };
        Ok(Askers { asker, runtime: Some(runtime) })
    }

    /// Does it on a thread that may wait.
    pub fn ask(&self, device: u64, what: impl FnOnce() + Send + 'static) {
        self.asker.ask(device, what);
    }

    /// The same, for those who do not know yet whether they must.
    pub fn asker(&self) -> Asker {
        self.asker.clone()
    }
}

type Question = Box<dyn FnOnce() + Send>;

/// What is asked of one device just now, and what has to wait for that.
#[derive(Default)]
struct Device {
    asking: usize,
    waiting: VecDeque<Question>,
}

/// A way to the threads.
#[derive(Clone)]
pub struct Asker {
    threads: tokio::runtime::Handle,
    devices: Arc<Mutex<HashMap<u64, Device>>>,
}

impl std::fmt::Debug for Asker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asker").finish_non_exhaustive()
    }
}

impl Asker {
    /// Does it on a thread that may wait.
    pub fn ask(&self, device: u64, what: impl FnOnce() + Send + 'static) {
        let mut devices = lock(&self.devices);
        let about = devices.entry(device).or_default();
        if about.asking >= MOST_OF_ONE {
            return about.waiting.push_back(Box::new(what));
        }
        about.asking += 1;
        drop(devices);
        let asker = self.clone();
        self.threads.spawn_blocking(move || {
            let mut next: Option<Question> = Some(Box::new(what));
            while let Some(question) = next {
                // A question that panics has answered by being dropped; the next one is asked.
                drop(catch_unwind(AssertUnwindSafe(question)));
                next = asker.next(device);
            }
        });
    }

    /// The next question of a device; if there is none, one less is asked of it.
    fn next(&self, device: u64) -> Option<Question> {
        let mut devices = lock(&self.devices);
        let Entry::Occupied(mut about) = devices.entry(device) else { return None };
        let next = about.get_mut().waiting.pop_front();
        if next.is_none() {
            about.get_mut().asking -= 1;
            if about.get().asking == 0 {
                about.remove();
            }
        }
        next
    }
}

impl Drop for Askers {
    fn drop(&mut self) {
        // What still waits for a source that hangs is not waited for.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// An answer, or EIO if it panics: one request is lost, and the mount lives.
pub fn guarded<T>(answer: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    // Whatever was half done is behind a lock or belongs to this request alone.
    catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|_| {
        tracing::error!("a request could not be answered: a fault in ckptfs, please report it");
        Err(Errno::EIO)
    })
}
