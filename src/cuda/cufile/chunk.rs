//! Chunks of device memory that storage writes to.
//!
//! In: a device. Out: chunks for a ring, each registered once, as long as it is there.

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::GdsUnavailable;
use super::library::CufileSession;
use crate::cuda::chunk_lease::{PendingCopies, StagingChunk};
use crate::cuda::driver::Device;
use crate::cuda::ring::Chunk;
use crate::cuda::{CudaError, CudaStream, DeviceMemory};
use crate::loader::BUFFER_BYTES;

/// What a device's memory is mapped in for others to write to: chunks that begin elsewhere would be read by way of
/// buffers of the library. Drivers give memory of this size so.
const GPU_PAGE_BYTES: u64 = 64 << 10;

/// A chunk of device memory that storage writes to.
#[derive(Debug)]
pub struct RegisteredChunk {
    session: Arc<CufileSession>,
    memory: ManuallyDrop<DeviceMemory>,
    address: u64,
    pending_copies: PendingCopies,
}

impl RegisteredChunk {
    /// One on this device.
    pub fn allocate(
        device: &Arc<Device>,
        session: &Arc<CufileSession>,
    ) -> Result<RegisteredChunk, GdsUnavailable> {
        let missing = |error: CudaError| GdsUnavailable::ChunkMemory { why: error.to_string() };
        let mut memory = device.allocate(BUFFER_BYTES).map_err(missing)?;
        if !memory.address().is_multiple_of(GPU_PAGE_BYTES) {
            drop(memory);
            memory = device.allocate(BUFFER_BYTES + GPU_PAGE_BYTES as usize).map_err(missing)?;
        }
        let at = memory.address().next_multiple_of(GPU_PAGE_BYTES);
        let _entered = device.enter().map_err(missing)?;
        session.register_memory(at, BUFFER_BYTES)?;
        let (session, memory) = (Arc::clone(session), ManuallyDrop::new(memory));
        Ok(RegisteredChunk {
            session,
            memory,
            address: at,
            pending_copies: PendingCopies::default(),
        })
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl StagingChunk for RegisteredChunk {
    fn pending_copies(&mut self) -> &mut PendingCopies {
        &mut self.pending_copies
    }

    unsafe fn copy_to(
        &mut self,
        at: usize,
        len: usize,
        by: &CudaStream,
        to: u64,
    ) -> Result<(), CudaError> {
        debug_assert!(at + len <= BUFFER_BYTES, "a piece leads out of its chunk");
        // SAFETY: the caller's word for the address; the chunk is there until its marks are over.
        unsafe { by.copy_on_device(self.address + at as u64, len, to) }
    }
}

impl Chunk for RegisteredChunk {
    type Fault = CudaError;

    fn is_idle(&self) -> Result<bool, CudaError> {
        self.pending_copies.is_done()
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.pending_copies.wait()
    }
}

impl Drop for RegisteredChunk {
    fn drop(&mut self) {
        // A process that was forked has nothing to give back.
        if !self.session.is_current_process() {
            return;
        }
        if self.wait().is_ok()
            && let Ok(_entered) = self.memory.device().enter()
            && self.session.deregister_memory(self.address).is_ok()
        {
            // SAFETY: this is the end of it.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            // Memory that may still be read, or be written to, nobody else must be given; and the library stays open.
            std::mem::forget(Arc::clone(&self.session));
        }
    }
}
