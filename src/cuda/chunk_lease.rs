//! A chunk in use: a reader fills it, its pieces are copied out, and it returns to its ring at once.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::destination::{DeviceDestination, merge_adjacent};
use super::error::CudaError;
use super::ring::{Chunk, Ring};
use super::stream::{CudaEvent, CudaStream};

/// As long as pinning a chunk takes (H100). A copy out of one takes 0.1 ms, once its turn comes.
const BUSY_CHUNK_TIMEOUT: Duration = Duration::from_millis(1);

const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Events behind the copies out of a chunk.
#[derive(Debug, Default)]
pub struct PendingCopies(Vec<CudaEvent>);

impl PendingCopies {
    /// Whether all copies are done. Never waits.
    pub fn are_done(&self) -> Result<bool, CudaError> {
        for event in &self.0 {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all copies are done.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.0.iter().try_for_each(CudaEvent::wait)
    }

    /// Waits until all copies are done, but for [`BUSY_CHUNK_TIMEOUT`] at most. Returns whether they are.
    pub fn wait_briefly(&self) -> Result<bool, CudaError> {
        let end = Instant::now() + BUSY_CHUNK_TIMEOUT;
        while !self.are_done()? {
            if Instant::now() >= end {
                return Ok(false);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Whether there are no events.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A chunk that pieces are copied out of.
pub trait StagingChunk: Chunk<Fault = CudaError> {
    /// The address by which the device of a stream reads the chunk.
    fn device_address(&mut self, stream: &CudaStream) -> Result<u64, CudaError>;

    /// The copies out of the chunk.
    fn pending_copies(&mut self) -> &mut PendingCopies;

    /// Queues a copy of `len` bytes from `start` on to an address.
    ///
    /// # Safety
    ///
    /// As many bytes at that address must belong to the caller until the copy is done, and the chunk must not be
    /// filled before.
    #[allow(unsafe_code)]
    unsafe fn copy_to(
        &mut self,
        start: usize,
        len: usize,
        stream: &CudaStream,
        address: u64,
    ) -> Result<(), CudaError>;
}

/// A chunk that returns to its ring when it is dropped.
pub struct ChunkLease<'a, C: StagingChunk> {
    ring: &'a Ring<C>,
    chunk: Option<C>,
}

impl<'a, C: StagingChunk> ChunkLease<'a, C> {
    /// Takes an idle chunk to fill.
    pub fn take<E: From<CudaError>>(
        ring: &'a Ring<C>,
        allocate: impl FnMut() -> Result<C, E>,
    ) -> Result<Self, E> {
        let mut chunk = ring.take(allocate)?;
        chunk.pending_copies().0.clear();
        Ok(ChunkLease { ring, chunk: Some(chunk) })
    }

    /// The chunk, to fill.
    pub fn chunk(&mut self) -> Option<&mut C> {
        self.chunk.as_mut()
    }

    /// Queues copies or casts of the pieces out of the chunk, and records events behind them. The chunk holds the file's
    /// bytes from the offset `start` on.
    ///
    /// # Safety
    ///
    /// The bytes at the addresses of the pieces must belong to the caller until the streams have done this work.
    #[allow(unsafe_code)]
    pub unsafe fn copy_out(
        mut self,
        start: u64,
        pieces: &[(u64, DeviceDestination)],
        streams: &[Arc<CudaStream>],
    ) -> Result<(), CudaError> {
        let Some(chunk) = self.chunk.as_mut() else { return Ok(()) };
        let allocation_end = |piece: &DeviceDestination| {
            streams[piece.stream].device().allocation_end(piece.address)
        };
        let copied = merge_adjacent(pieces, allocation_end).try_for_each(|(offset, piece)| {
            let DeviceDestination { stream, address, len, cast } = piece;
            let (stream, in_chunk) = (&streams[stream], offset - start);
            let Some(cast) = cast else {
                // SAFETY: the caller guarantees the addresses; the chunk is not filled before the events recorded below.
                return unsafe { chunk.copy_to(in_chunk as usize, len as usize, stream, address) };
            };
            let from = chunk.device_address(stream)? + in_chunk;
            // SAFETY: as above; the chunk has these bytes, and both addresses are aligned where a cast was found.
            unsafe { cast.launch(stream, from, len, address) }
        });
        // Also where one copy failed: those before it are queued.
        let is_used = |stream: &usize| pieces.iter().any(|(_, piece)| piece.stream == *stream);
        let used = (0..streams.len()).filter(is_used);
        let events: Result<Vec<_>, _> = used.map(|used| streams[used].record_event()).collect();
        match events {
            Ok(events) => chunk.pending_copies().0.extend(events),
            Err(error) => {
                // Their work may never end, either.
                pieces.iter().for_each(|(_, piece)| std::mem::forget(piece.cast.clone()));
                self.leak();
                return copied.and(Err(error));
            }
        }
        copied
    }

    /// Leaks the chunk: its copies may never end, so that it must never be filled or freed.
    fn leak(mut self) {
        std::mem::forget(self.chunk.take());
        self.ring.note_lost();
    }
}

impl<C: StagingChunk> Drop for ChunkLease<'_, C> {
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            self.ring.give_back(chunk);
        }
    }
}
