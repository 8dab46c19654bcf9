//! A chunk in use: somebody fills it, its pieces are copied out, and it goes back to its ring at once.
//!
//! In: a ring of chunks, on the host or on a device. Out: copies on streams, and a chunk that knows when they are
//! over.

use std::sync::Arc;

use super::CudaError;
use super::destination::{DeviceDestination, merge_adjacent};
use super::ring::{Chunk, Ring};
use super::stream::{CudaEvent, CudaStream};

/// Whoever reads a chunk has done so when these are over.
#[derive(Debug, Default)]
pub struct PendingCopies(Vec<CudaEvent>);

impl PendingCopies {
    /// Whether nobody reads it any more. Waits for nothing.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        for event in &self.0 {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until nobody does.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.0.iter().try_for_each(CudaEvent::wait)
    }

    /// Whether nobody is known to have been given it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A chunk that pieces are copied out of.
pub trait StagingChunk: Chunk<Fault = CudaError> {
    /// Who reads it.
    fn pending_copies(&mut self) -> &mut PendingCopies;

    /// Has so many of its bytes from `at` on copied to an address, some time from now.
    ///
    /// # Safety
    ///
    /// As many bytes at that address must be the caller's until this is done, and the chunk must not be filled
    /// before.
    #[allow(unsafe_code)]
    unsafe fn copy_to(
        &mut self,
        at: usize,
        len: usize,
        by: &CudaStream,
        to: u64,
    ) -> Result<(), CudaError>;
}

/// A chunk that is given back whatever happens.
pub struct ChunkLease<'a, C: StagingChunk> {
    ring: &'a Ring<C>,
    chunk: Option<C>,
}

impl<'a, C: StagingChunk> ChunkLease<'a, C> {
    /// One to fill.
    pub fn take<E: From<CudaError>>(
        ring: &'a Ring<C>,
        make: impl FnMut() -> Result<C, E>,
    ) -> Result<Self, E> {
        let mut chunk = ring.take(make)?;
        chunk.pending_copies().0.clear();
        Ok(ChunkLease { ring, chunk: Some(chunk) })
    }

    /// It.
    pub fn chunk(&mut self) -> Option<&mut C> {
        self.chunk.as_mut()
    }

    /// Has the pieces copied out of it, where what lies from `start` on in a file was read to, and says to it
    /// how long that takes.
    ///
    /// # Safety
    ///
    /// The bytes at the addresses of the pieces must be the caller's until the streams have done this.
    #[allow(unsafe_code)]
    pub unsafe fn copy_out(
        mut self,
        start: u64,
        pieces: &[(u64, DeviceDestination)],
        streams: &[Arc<CudaStream>],
    ) -> Result<(), CudaError> {
        let Some(chunk) = self.chunk.as_mut() else { return Ok(()) };
        let copied = merge_adjacent(pieces).try_for_each(
            |(at, DeviceDestination { stream, address: to, len })| {
                // SAFETY: the caller's word for the addresses; the chunk is not filled before what is marked below
                // is over.
                unsafe { chunk.copy_to((at - start) as usize, len as usize, &streams[stream], to) }
            },
        );
        // Also where one failed: those before it are under way.
        let used = |stream: &usize| pieces.iter().any(|(_, place)| place.stream == *stream);
        let used = (0..streams.len()).filter(used);
        let marks: Result<Vec<CudaEvent>, CudaError> =
            used.map(|used| streams[used].record_event()).collect();
        match marks {
            Ok(marks) => chunk.pending_copies().0.extend(marks),
            Err(fault) => {
                self.leak();
                return copied.and(Err(fault));
            }
        }
        copied
    }

    /// It may be read for ever, and so must never be filled or freed.
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
