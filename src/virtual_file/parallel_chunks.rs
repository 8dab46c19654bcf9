//! Work on numbered chunks, in order, on several threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::threads::{join, lock, try_spawn};

/// Works on `chunks` in order on some threads, each with a buffer of its own. Ends when all are done (true), one fails,
/// or the caller stops it (false).
pub fn for_each_chunk<B: Default, E: Send>(
    chunks: usize,
    threads: usize,
    should_stop: impl Fn() -> bool + Sync,
    work: impl Fn(&mut B, usize) -> Result<(), E> + Sync,
) -> Result<bool, E> {
    for_each_admitted(chunks, threads, should_stop, |_| (), work)
}

/// Works on chunks as [`for_each_chunk`] does. `admit` is called for each chunk in order, and may wait until others are done.
/// What it returns is dropped when the chunk is done.
pub fn for_each_admitted<B: Default, P, E: Send>(
    chunks: usize,
    threads: usize,
    should_stop: impl Fn() -> bool + Sync,
    admit: impl Fn(usize) -> P + Sync,
    work: impl Fn(&mut B, usize) -> Result<(), E> + Sync,
) -> Result<bool, E> {
    let next = Mutex::new(0);
    let has_failed = AtomicBool::new(false);
    let run = || {
        let mut buffer = B::default();
        while !has_failed.load(Ordering::Relaxed) && !should_stop() {
            let mut next = lock(&next);
            let chunk = *next;
            if chunk >= chunks {
                return Ok(true);
            }
            *next += 1;
            let _permit = admit(chunk);
            drop(next);
            work(&mut buffer, chunk).inspect_err(|_| has_failed.store(true, Ordering::Relaxed))?;
        }
        Ok(false)
    };
    let results = std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..threads.min(chunks)).map_while(|_| try_spawn(scope, run)).collect();
        let mut results = vec![run()];
        results.extend(others.into_iter().map(join));
        results
    });
    match results.into_iter().collect::<Result<Vec<bool>, E>>() {
        // A thread that returned true saw the end of the work.
        Ok(ended) => Ok(ended.into_iter().all(|is_complete| is_complete)),
        // Stopped reads fail, which is no error.
        Err(_) if should_stop() => Ok(false),
        Err(error) => Err(error),
    }
}
