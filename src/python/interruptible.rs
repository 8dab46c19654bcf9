//! Waits for work without the interpreter's lock, and handles signals such as Ctrl-C meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::threads::{lock, spawn};

/// The time between two checks for signals: short enough to feel immediate.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// How long stopped work is waited for: what can end has ended by then.
const ABANDON_TIMEOUT: Duration = Duration::from_secs(1);

/// Stops loads from another thread.
#[pyclass(frozen, name = "Stop", module = "ckptfs._ckptfs")]
#[derive(Default)]
pub struct StopFlag(Arc<AtomicBool>);

#[pymethods]
impl StopFlag {
    #[new]
    fn new() -> StopFlag {
        StopFlag::default()
    }

    /// Stops the loads that were given this flag.
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl StopFlag {
    /// The shared flag, or a new one where none is given.
    pub fn shared(stop: Option<&StopFlag>) -> Arc<AtomicBool> {
        stop.map(|stop| Arc::clone(&stop.0)).unwrap_or_default()
    }
}

/// How work is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// In the calling thread, because starting a thread would take longer than the work.
    Inline,
    /// In a thread, until it ends; it ends soon once it is stopped.
    UntilDone,
    /// In a thread, until it ends. What hangs after it was stopped is abandoned, and its result dropped.
    MayAbandon,
}

/// Does the work without the interpreter's lock. Where that may take long, a signal whose handler raises sets `stop`.
/// The exception is raised once the work has ended, in the place of its result.
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
        let shared = Arc::clone(&work);
        let sent = move || {
            let work = lock(&shared).take();
            // Nothing may wait any more; then the result is dropped here.
            let _ = work.map(|work| done.send(work()));
        };
        if spawn("ckptfs load", sent).is_err() {
            // Without a thread the work is done here, and signals are not handled.
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
