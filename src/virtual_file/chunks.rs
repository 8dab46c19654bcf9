//! Work on the bytes of virtual files in chunks, on several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::checkpoint::OriginId;
use crate::threads::{join, try_spawn};

use super::file::VirtualFileReader;

/// Threads that read from stores at once, each with a buffer. The store's own limit on requests applies, too.
const MAX_STORE_THREADS: usize = 32;

impl VirtualFileReader {
    /// The number of chunks to read at once: `local` of them, or more if the sources lie in stores.
    pub fn chunk_threads(&self, local: usize) -> usize {
        let origins = self.virtual_file().origins().len();
        let preferred =
            (0..origins as u32).find_map(|n| self.file(OriginId(n))?.preferred_requests());
        preferred.map_or(local, |preferred| preferred.max_count.clamp(1, MAX_STORE_THREADS))
    }
}

/// Works on `chunks` in order on some threads, each with a buffer of its own. Ends when all are done (true), one fails,
/// or the caller stops it (false).
pub fn for_each_chunk<B, E: Send>(
    chunks: usize,
    threads: usize,
    should_stop: impl Fn() -> bool + Sync,
    buffer: impl Fn() -> B + Sync,
    work: impl Fn(&mut B, usize) -> Result<(), E> + Sync,
) -> Result<bool, E> {
    let next = AtomicUsize::new(0);
    let has_failed = AtomicBool::new(false);
    let run = || {
        let mut buffer = buffer();
        while !has_failed.load(Ordering::Relaxed) && !should_stop() {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                return Ok(true);
            }
            work(&mut buffer, chunk).inspect_err(|_| has_failed.store(true, Ordering::Relaxed))?;
        }
        Ok(false)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..threads.min(chunks)).map_while(|_| try_spawn(scope, run)).collect();
        let mut results = vec![run()];
        results.extend(others.into_iter().map(join));
        // Each that returned true saw the end of the work; an error of any is the result.
        let ended = results.into_iter().collect::<Result<Vec<bool>, E>>()?;
        Ok(ended.into_iter().all(|is_complete| is_complete))
    })
}
