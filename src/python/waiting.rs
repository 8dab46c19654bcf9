//! Waiting for a load, so that other threads of Python go on and the user's Ctrl-C is heard.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

/// How often signals are looked for: what feels like at once.
const PATIENCE: Duration = Duration::from_millis(50);

/// What is no larger is read in less time than that, and a thread for it would cost more than the read.
const SMALL: u64 = 1 << 20;

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

/// Does the work for so many bytes without the interpreter's lock. A signal whose handler raises sets
/// `stop`, waits for the work to end, and is raised instead of what came of it.
pub fn without_lock<T: Send>(
    py: Python<'_>,
    bytes: u64,
    stop: &AtomicBool,
    work: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    if bytes <= SMALL {
        return Ok(py.detach(work));
    }
    py.detach(|| {
        thread::scope(|scope| {
            let (done, wait) = channel();
            let sent = move || {
                // Whoever waits does so until this was sent.
                let _ = done.send(work());
            };
            thread::Builder::new().name("ckptfs load".to_owned()).spawn_scoped(scope, sent)?;
            let mut raised = None;
            loop {
                match wait.recv_timeout(PATIENCE) {
                    Ok(done) => return raised.map_or(Ok(done), Err),
                    Err(RecvTimeoutError::Timeout) => {
                        if let Err(error) = Python::attach(|py| py.check_signals()) {
                            stop.store(true, Ordering::Relaxed);
                            raised.get_or_insert(error);
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        // It panicked, and so will the end of this scope.
                        let panicked = "the load panicked";
                        return Err(pyo3::exceptions::PyRuntimeError::new_err(panicked));
                    }
                }
            }
        })
    })
}
