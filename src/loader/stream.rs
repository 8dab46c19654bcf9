//! Tensors one after the other, in the order in which their bytes lie, while the next are read.
//!
//! In: tensors of an [`Opened`], how many bytes of them may be held, and what to do with each. Out: a
//! [`Report`]. One thread reads batch after batch ahead of the caller, and waits where it would hold more
//! than it may; what the caller was handed counts until it is done with it.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use crate::checkpoint::Tensor;
use crate::threads::{lock, try_spawn};

use super::{LoadError, LoadReport, OpenCheckpoint, TensorBuffer};

/// As much is read at once where more may be held: all readers have something to do, and the first
/// tensors come soon.
const BATCH_BYTES: u64 = 64 << 20;

/// Bytes that may be held, and those that are.
struct StreamBudget {
    limit_bytes: u64,
    held_bytes: Mutex<u64>,
    freed: Condvar,
    /// Nobody wants more.
    stopped: AtomicBool,
}

impl StreamBudget {
    /// Waits until so many more may be held; whether they are still wanted.
    fn acquire(&self, bytes: u64) -> bool {
        let full = |held: &mut u64| *held + bytes > self.limit_bytes && !self.is_stopped();
        let waited = self.freed.wait_while(lock(&self.held_bytes), full);
        *waited.unwrap_or_else(|poisoned| poisoned.into_inner()) += bytes;
        !self.is_stopped()
    }

    fn release(&self, bytes: u64) {
        *lock(&self.held_bytes) -= bytes;
        self.freed.notify_all();
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// Ends the reading however the caller ends, so that nobody waits for it.
struct StopOnDrop<'a>(&'a StreamBudget);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        let _bytes = lock(&self.0.held_bytes);
        self.0.stopped.store(true, Ordering::Relaxed);
        self.0.freed.notify_all();
    }
}

type LoadedBatch<'a> = (Vec<(&'a Tensor, TensorBuffer)>, LoadReport);

impl OpenCheckpoint {
    /// Loads tensors, or parts of tensors, in the order in which their bytes lie, and hands each out as
    /// soon as it is there; meanwhile the next are read. No more than `hold` bytes of them are held at
    /// once, those included that `each` works on. It is over when all were handed out, or `each` breaks.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::ops::ControlFlow;
    ///
    /// let model = ckptfs::open("models/llama".as_ref())?;
    /// let mut sum = 0u64;
    /// model.stream(model.tensors(), 1 << 30, |tensor, memory| {
    ///     sum += memory.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    ///     println!("{}: {} bytes", tensor.name, memory.len());
    ///     ControlFlow::Continue(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn stream<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a Tensor>,
        hold: u64,
        mut each: impl FnMut(&'a Tensor, TensorBuffer) -> ControlFlow<()>,
    ) -> Result<LoadReport, LoadError> {
        let begun = Instant::now();
        let mut tensors: Vec<&Tensor> = tensors.into_iter().collect();
        let largest = tensors.iter().map(|tensor| tensor.bytes.len()).max().unwrap_or(0);
        if largest > hold {
            let path = self.path().to_path_buf();
            return Err(LoadError::MemoryLimit { path, given: hold, needs: largest });
        }
        tensors.sort_by_key(|tensor| tensor.bytes.extent());
        let held = StreamBudget {
            limit_bytes: hold,
            held_bytes: 0.into(),
            freed: Condvar::new(),
            stopped: false.into(),
        };
        let mut report = LoadReport::default();
        let done: Result<(), LoadError> = std::thread::scope(|scope| {
            let ends = StopOnDrop(&held);
            let (sender, batches) = channel();
            let (held, tensors) = (&held, &tensors[..]);
            try_spawn(scope, move || self.read_ahead(tensors, held, &sender))
                .ok_or_else(|| LoadError::NoThread { path: self.path().to_path_buf() })?;
            for batch in batches {
                let (loaded, told): LoadedBatch<'a> = batch?;
                report.merge(&told);
                for (tensor, memory) in loaded {
                    let bytes = memory.len() as u64;
                    if each(tensor, memory).is_break() {
                        return Ok(());
                    }
                    held.release(bytes);
                }
            }
            drop(ends);
            Ok(())
        });
        done?;
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    fn read_ahead<'a>(
        &self,
        mut rest: &[&'a Tensor],
        held: &StreamBudget,
        batches: &Sender<Result<LoadedBatch<'a>, LoadError>>,
    ) {
        let most = BATCH_BYTES.min(held.limit_bytes / 2);
        while let Some(first) = rest.first() {
            let mut bytes = first.bytes.len();
            let more = rest[1..].iter().take_while(|tensor| {
                bytes += tensor.bytes.len();
                bytes <= most
            });
            let (batch, after) = rest.split_at(1 + more.count());
            rest = after;
            if !held.acquire(batch.iter().map(|tensor| tensor.bytes.len()).sum()) {
                return;
            }
            let loaded = self.load_batch(batch, &held.stopped);
            let failed = loaded.is_err();
            // Whoever wanted it is gone, or it was the last.
            if batches.send(loaded).is_err() || failed {
                return;
            }
        }
    }

    fn load_batch<'a>(
        &self,
        batch: &[&'a Tensor],
        stop: &AtomicBool,
    ) -> Result<LoadedBatch<'a>, LoadError> {
        let (memory, report) = self.load_owned(batch, stop, None)?;
        Ok((batch.iter().copied().zip(memory).collect(), report))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_would_hold_more_than_it_may_waits_until_it_may_or_nobody_wants_it() {
        let (some, held) = (
            Duration::from_millis(50),
            StreamBudget {
                limit_bytes: 10,
                held_bytes: 0.into(),
                freed: Condvar::new(),
                stopped: false.into(),
            },
        );
        assert!(held.acquire(6) && held.acquire(4));
        let take = |bytes: u64, then: &dyn Fn()| {
            std::thread::scope(|scope| {
                let (told, taken) = channel();
                let held = &held;
                scope.spawn(move || told.send(held.acquire(bytes)));
                assert_eq!(taken.recv_timeout(some), Err(RecvTimeoutError::Timeout));
                then();
                taken.recv().unwrap()
            })
        };
        assert!(take(6, &|| held.release(6)));
        assert!(!take(1, &|| drop(StopOnDrop(&held))));
    }
}
