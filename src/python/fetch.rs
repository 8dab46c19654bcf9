//! Fetches checkpoints of a store into the cache on disk.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::checkpoint::ParseOptions;
use crate::fetch::{FetchReport, fetch as fetch_url};
use crate::view::ViewOptions;
use crate::virtual_file::Progress;

use super::checkpoint::PyLoadOptions;
use super::error::fetch_exception;
use super::interruptible::{WaitMode, without_gil};

/// The time between two calls of the callback: a bar needs no more.
const CALLBACK_INTERVAL: Duration = Duration::from_millis(100);

/// Reports cached bytes and their total to Python.
struct CallbackProgress {
    stop: Arc<AtomicBool>,
    callback: Option<Py<PyAny>>,
    total: AtomicU64,
    done: AtomicU64,
    called: Mutex<Option<Instant>>,
}

impl CallbackProgress {
    fn call(&self) {
        let Some(callback) = self.callback.as_ref().filter(|_| !self.should_stop()) else { return };
        let Ok(mut called) = self.called.try_lock() else { return };
        if called.is_some_and(|called| called.elapsed() < CALLBACK_INTERVAL) {
            return;
        }
        *called = Some(Instant::now());
        // A callback that fails ends no fetch.
        let _ = Python::attach(|py| {
            callback.call1(py, (self.done.load(Relaxed), self.total.load(Relaxed)))
        });
    }
}

impl Progress for CallbackProgress {
    fn on_total(&self, bytes: u64) {
        self.total.store(bytes, Relaxed);
        self.call();
    }

    fn on_bytes(&self, bytes: u64) {
        self.done.fetch_add(bytes, Relaxed);
        self.call();
    }

    fn should_stop(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

/// Fetches all that a URL shows. Returns the numbers of files and bytes, and of bytes that were there before.
#[pyfunction]
pub fn fetch(
    py: Python<'_>,
    url: PathBuf,
    options: PyLoadOptions,
    callback: Option<Py<PyAny>>,
) -> PyResult<(u64, u64, u64)> {
    let parse: ParseOptions = options.into_options(py)?.parse;
    let stop = Arc::new(AtomicBool::new(false));
    let progress = CallbackProgress {
        stop: Arc::clone(&stop),
        callback,
        total: AtomicU64::new(0),
        done: AtomicU64::new(0),
        called: Mutex::default(),
    };
    let options = ViewOptions { parse, ..ViewOptions::default() };
    let done =
        without_gil(py, WaitMode::MayAbandon, &stop, move || fetch_url(&url, options, &progress))?;
    let FetchReport { files, bytes, cached_bytes } =
        done.map_err(|error| fetch_exception(py, error))?;
    Ok((files, bytes, cached_bytes))
}
