//! Work on the bytes of virtual files in chunks, on several threads.

use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::checkpoint::OriginId;
use crate::threads::lock;

use super::error::VirtualFileError;
use super::file::VirtualFileReader;
use super::parallel_chunks::for_each_admitted;

/// Threads that read from stores at once, each with a buffer. The store's own limit on requests applies, too.
const MAX_STORE_THREADS: usize = 32;

/// Minimum requests at once for a window.
const MIN_WINDOW_THREADS: u64 = 8;

/// Receives the progress of long work, and may stop it.
pub trait Progress: Sync {
    /// Called once, with the bytes of everything, if they are not known before.
    fn on_total(&self, _bytes: u64) {}
    /// Called after so many more bytes.
    fn on_bytes(&self, bytes: u64);
    /// Whether to stop.
    fn should_stop(&self) -> bool;
}

/// A limit on the bytes of all windows that are in memory at once.
struct ByteBudget {
    limit: u64,
    held: Mutex<u64>,
    released: Condvar,
}

/// Bytes taken from a budget, given back on drop.
struct BudgetPermit<'a>(&'a ByteBudget, u64);

impl ByteBudget {
    /// Waits until so many bytes are free, or nothing else is held.
    fn acquire(&self, bytes: u64) -> BudgetPermit<'_> {
        let is_full = |held: &mut u64| *held > 0 && *held + bytes > self.limit;
        let held = self.released.wait_while(lock(&self.held), is_full);
        *held.unwrap_or_else(PoisonError::into_inner) += bytes;
        BudgetPermit(self, bytes)
    }
}

impl Drop for BudgetPermit<'_> {
    fn drop(&mut self) {
        *lock(&self.0.held) -= self.1;
        self.0.released.notify_all();
    }
}

/// Reads chunks of virtual files into the buffers of threads.
pub struct ChunkReader {
    /// Bytes of a chunk, and of a thread's buffer.
    chunk_bytes: u64,
    /// The budget of larger chunks: windows of tensors that are strided in a store.
    windows: ByteBudget,
}

impl ChunkReader {
    pub fn new(chunk_bytes: u64, window_bytes: u64) -> ChunkReader {
        let (held, released) = Default::default();
        ChunkReader { chunk_bytes, windows: ByteBudget { limit: window_bytes, held, released } }
    }

    /// The chunks of a whole virtual file.
    pub fn chunks(&self, reader: &VirtualFileReader) -> Vec<Range<u64>> {
        reader.chunks(self.chunk_bytes, self.windows.limit)
    }

    /// The bytes of a tensor that are best read as one chunk.
    pub fn window_bytes(&self, reader: &VirtualFileReader, tensor: usize) -> u64 {
        reader.tensor_window(tensor, self.chunk_bytes, self.windows.limit)
    }

    /// Reads a chunk; `None` if it was stopped before its end.
    pub fn read<'b>(
        &self,
        reader: &VirtualFileReader,
        range: &Range<u64>,
        buffer: &'b mut Vec<u8>,
        should_stop: impl Fn() -> bool + Sync,
    ) -> Result<Option<&'b [u8]>, VirtualFileError> {
        let bytes = range.end - range.start;
        let len = bytes as usize;
        if buffer.len() < len {
            let out_of_memory = |_| reader.out_of_memory(bytes);
            buffer.try_reserve_exact(len - buffer.len()).map_err(out_of_memory)?;
            buffer.resize(len, 0);
        }
        let buffer = &mut buffer[..len];
        if bytes <= self.chunk_bytes {
            reader.read_at(buffer, range.start)?;
            return Ok(Some(buffer));
        }
        let share = MAX_STORE_THREADS as u64 * bytes / self.windows.limit;
        let threads = share.clamp(MIN_WINDOW_THREADS, MAX_STORE_THREADS as u64);
        let is_complete = reader.read_from_stores(
            &mut [(range.start, &mut *buffer)],
            threads as usize,
            |len| vec![0; len],
            should_stop,
        )?;
        Ok(is_complete.then_some(buffer))
    }

    /// Calls `work` for each chunk in order, on some threads, each with buffers of its own. Returns true when all chunks are
    /// done, and false when the caller stops it. The buffers of a window are freed after it.
    pub fn for_each<const N: usize, E: Send>(
        &self,
        chunks: &[Range<u64>],
        threads: usize,
        should_stop: impl Fn() -> bool + Sync,
        work: impl Fn(&mut [Vec<u8>; N], usize) -> Result<(), E> + Sync,
    ) -> Result<bool, E>
    where
        [Vec<u8>; N]: Default,
    {
        let window = |chunk: usize| {
            let bytes = chunks[chunk].end - chunks[chunk].start;
            (bytes > self.chunk_bytes).then_some(bytes * N as u64)
        };
        let admit = |chunk: usize| window(chunk).map(|bytes| self.windows.acquire(bytes));
        for_each_admitted(chunks.len(), threads, should_stop, admit, |buffers, chunk| {
            let done = work(buffers, chunk);
            if window(chunk).is_some() {
                *buffers = Default::default();
            }
            done
        })
    }
}

impl VirtualFileReader {
    /// The number of chunks to read at once: `local` of them, or more if the sources lie in stores.
    pub(crate) fn chunk_threads(&self, local: usize) -> usize {
        let origins = self.virtual_file().origins().len();
        let preferred =
            (0..origins as u32).find_map(|n| self.file(OriginId(n))?.preferred_requests());
        preferred.map_or(local, |preferred| preferred.max_count.clamp(1, MAX_STORE_THREADS))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::checkpoint::{ParseOptions, parse_bytes};
    use crate::virtual_file::VirtualFile;

    #[test]
    fn a_chunk_that_memory_cannot_hold_is_an_error() {
        let checkpoint = parse_bytes(
            b"\x02\0\0\0\0\0\0\0{}",
            Path::new("x.safetensors"),
            &ParseOptions::default(),
        );
        let file = Arc::new(VirtualFile::new(checkpoint.unwrap()).unwrap());
        let reader = VirtualFileReader::open(&file).unwrap();
        let mut buffer = Vec::new();
        // 1 PiB, of which a process has 128 TiB by default.
        let range = 0..1 << 50;
        let read = ChunkReader::new(1 << 20, 1 << 60).read(&reader, &range, &mut buffer, || false);
        assert!(
            matches!(read, Err(VirtualFileError::OutOfMemory { bytes, .. }) if bytes == 1 << 50)
        );
    }
}
