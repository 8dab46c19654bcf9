//! Waiting for work, so that other threads of Python go on and the user's Ctrl-C is heard.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::threads::lock;

/// How often signals are looked for: what feels like at once.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// How long work that is to end is waited for: any that can ends by then.
const ABANDON_TIMEOUT: Duration = Duration::from_secs(1);

/// What ends a load from another thread.
#[pyclass(frozen, module = "ckptfs._ckptfs")]
#[derive(Default)]
pub struct Stop(Arc<AtomicBool>);

#[pymethods]
impl Stop {
    #[new]
    fn new() -> Stop {
        Stop::default()
    }

    /// Ends the loads that were given this, soon.
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Stop {
    /// The flag of one, or a new one.
    pub fn flag(stop: Option<&Stop>) -> Arc<AtomicBool> {
        stop.map(|stop| Arc::clone(&stop.0)).unwrap_or_default()
    }
}

/// How work is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// In the calling thread: it takes less time than a thread for it would.
    Inline,
    /// Until it ends, which it does soon once it is told to.
    UntilDone,
    /// Until it ends; what hangs after it was told to end is left behind, and comes to nothing.
    MayAbandon,
}

/// Does the work without the interpreter's lock. Where that may take long, a signal whose handler raises
/// sets `stop`, waits for the work to end, and is raised instead of what came of it.
pub fn without_gil<T: Send + 'static>(
    py: Python<'_>,
    wait: WaitMode,
    stop: &AtomicBool,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    if wait == WaitMode::Inline {
        return Ok(py.detach(work));
    }
    py.detach(|| {
        let (done, ended) = channel();
        let work = Arc::new(Mutex::new(Some(work)));
        let its = Arc::clone(&work);
        let sent = move || {
            let work = lock(&its).take();
            // Where nobody waits any more, what came of it is let go here.
            let _ = work.map(|work| done.send(work()));
        };
        if thread::Builder::new().name("ckptfs load".to_owned()).spawn(sent).is_err() {
            // The system starts no thread: it is done here, and nobody hears signals.
            let work = lock(&work).take();
            return work.map(|work| work()).ok_or_else(|| PyRuntimeError::new_err("no thread"));
        }
        let mut raised: Option<(PyErr, Instant)> = None;
        loop {
            match ended.recv_timeout(SIGNAL_CHECK_INTERVAL) {
                Ok(done) => return raised.map_or(Ok(done), |(error, _)| Err(error)),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(PyRuntimeError::new_err("the load panicked"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            match raised {
                Some((error, when))
                    if wait == WaitMode::MayAbandon && when.elapsed() > ABANDON_TIMEOUT =>
                {
                    return Err(error);
                }
                Some(_) => {}
                None => {
                    if let Err(error) = Python::attach(|py| py.check_signals()) {
                        stop.store(true, Ordering::Relaxed);
                        raised = Some((error, Instant::now()));
                    }
                }
            }
        }
    })
}
