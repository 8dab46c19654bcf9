//! Streams tensors in batches: a thread reads the next ones while the caller works on those that are loaded.
//!
//! The thread waits where it would hold more bytes than allowed. What the caller was handed counts until it is
//! done with it.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use crate::checkpoint::Tensor;
use crate::threads::{lock, try_spawn};

use super::error::LoadError;
use super::execute::LoadReport;
use super::memory::TensorBuffer;

/// The bytes of a batch, where more may be held: all readers have something to do, and the first tensors come
/// soon.
const MAX_BATCH_BYTES: u64 = 64 << 20;

/// Bytes that may be held, and those that are.
struct StreamBudget {
    limit_bytes: u64,
    held_bytes: Mutex<u64>,
    released: Condvar,
    is_stopped: AtomicBool,
}

impl StreamBudget {
    fn new(limit_bytes: u64) -> StreamBudget {
        let (held_bytes, released) = (Mutex::new(0), Condvar::new());
        StreamBudget { limit_bytes, held_bytes, released, is_stopped: AtomicBool::new(false) }
    }

    /// Waits until so many more bytes may be held; returns whether they are still wanted.
    fn acquire(&self, bytes: u64) -> bool {
        let is_full = |held: &mut u64| *held + bytes > self.limit_bytes && !self.is_stopped();
        let held = self.released.wait_while(lock(&self.held_bytes), is_full);
        *held.unwrap_or_else(|poisoned| poisoned.into_inner()) += bytes;
        !self.is_stopped()
    }

    fn release(&self, bytes: u64) {
        *lock(&self.held_bytes) -= bytes;
        self.released.notify_all();
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }
}

/// Stops the reading thread however the caller ends, so that it waits for nothing any more.
struct StopOnDrop<'a>(&'a StreamBudget);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        let _held = lock(&self.0.held_bytes);
        self.0.is_stopped.store(true, Ordering::Relaxed);
        self.0.released.notify_all();
    }
}

/// The tensors of a batch, loaded.
pub type LoadedBatch = (Vec<TensorBuffer>, LoadReport);

/// Hands out each tensor of a checkpoint as soon as `load` has loaded it, in the order in which their bytes lie.
/// Holds at most `limit_bytes` of them at once, those that `each` works on included.
pub fn stream<'a>(
    path: &Path,
    mut tensors: Vec<&'a Tensor>,
    limit_bytes: u64,
    load: impl Fn(&[&'a Tensor], &AtomicBool) -> Result<LoadedBatch, LoadError> + Sync,
    mut each: impl FnMut(&'a Tensor, TensorBuffer) -> ControlFlow<()>,
) -> Result<LoadReport, LoadError> {
    let started = Instant::now();
    let largest = tensors.iter().map(|tensor| tensor.bytes.len()).max().unwrap_or(0);
    if largest > limit_bytes {
        let path = path.to_path_buf();
        return Err(LoadError::MemoryLimit { path, allowed: limit_bytes, needed: largest });
    }
    tensors.sort_by_key(|tensor| tensor.bytes.first_extent());
    let budget = StreamBudget::new(limit_bytes);
    let mut report = LoadReport::default();
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&budget);
        let (sender, batches) = channel();
        let (budget, load, tensors) = (&budget, &load, &tensors[..]);
        try_spawn(scope, move || read_ahead(tensors, budget, load, &sender))
            .ok_or_else(|| LoadError::NoThread { path: path.to_path_buf() })?;
        for batch in batches {
            let (tensors, (buffers, batch_report)): (&[&'a Tensor], LoadedBatch) = batch?;
            report.merge(&batch_report);
            for (tensor, buffer) in tensors.iter().zip(buffers) {
                let bytes = buffer.len() as u64;
                if each(tensor, buffer).is_break() {
                    return Ok(());
                }
                budget.release(bytes);
            }
        }
        drop(stop);
        Ok::<_, LoadError>(())
    })?;
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

/// Loads batch after batch, until all are sent, one fails, or nothing receives them any more.
fn read_ahead<'t, 'a>(
    mut rest: &'t [&'a Tensor],
    budget: &StreamBudget,
    load: impl Fn(&[&'a Tensor], &AtomicBool) -> Result<LoadedBatch, LoadError>,
    batches: &Sender<Result<(&'t [&'a Tensor], LoadedBatch), LoadError>>,
) {
    let max_bytes = MAX_BATCH_BYTES.min(budget.limit_bytes / 2);
    while let Some(first) = rest.first() {
        let mut bytes = first.bytes.len();
        let more = rest[1..].iter().take_while(|tensor| {
            bytes += tensor.bytes.len();
            bytes <= max_bytes
        });
        let (batch, after) = rest.split_at(1 + more.count());
        rest = after;
        if !budget.acquire(batch.iter().map(|tensor| tensor.bytes.len()).sum()) {
            return;
        }
        let loaded = load(batch, &budget.is_stopped);
        let is_last = loaded.is_err();
        if batches.send(loaded.map(|loaded| (batch, loaded))).is_err() || is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::*;

    #[test]
    fn acquiring_more_than_allowed_waits_until_bytes_are_released_or_the_stream_stops() {
        const BLOCKED_WINDOW: Duration = Duration::from_millis(50);
        let budget = StreamBudget::new(10);
        assert!(budget.acquire(6) && budget.acquire(4));
        let acquire = |bytes: u64, then: &dyn Fn()| {
            std::thread::scope(|scope| {
                let (sender, acquired) = channel();
                let budget = &budget;
                scope.spawn(move || sender.send(budget.acquire(bytes)));
                assert_eq!(acquired.recv_timeout(BLOCKED_WINDOW), Err(RecvTimeoutError::Timeout));
                then();
                acquired.recv().unwrap()
            })
        };
        assert!(acquire(6, &|| budget.release(6)));
        assert!(!acquire(1, &|| drop(StopOnDrop(&budget))));
    }
}
