//! Chunks of device memory that storage writes to, registered with the library as long as they exist.

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::library::CufileSession;
use super::unavailable::GdsUnavailable;
use crate::cuda::chunk_lease::{PendingCopies, StagingChunk};
use crate::cuda::driver::Device;
use crate::cuda::error::CudaError;
use crate::cuda::memory::DeviceMemory;
use crate::cuda::ring::Chunk;
use crate::cuda::stream::CudaStream;
use crate::loader::BUFFER_BYTES;

/// The pages in which device memory is mapped for other devices to write to. The library would read into a chunk
/// with another alignment through buffers of its own. Drivers align allocations of this size so.
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
    /// Allocates a chunk on a device, and registers it.
    pub fn allocate(
        device: &Arc<Device>,
        session: &Arc<CufileSession>,
    ) -> Result<RegisteredChunk, GdsUnavailable> {
        let missing = |error: CudaError| GdsUnavailable::ChunkMemory { why: error.to_string() };
        let mut memory = DeviceMemory::allocate(device, BUFFER_BYTES).map_err(missing)?;
        if !memory.address().is_multiple_of(GPU_PAGE_BYTES) {
            drop(memory);
            memory = DeviceMemory::allocate(device, BUFFER_BYTES + GPU_PAGE_BYTES as usize)
                .map_err(missing)?;
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

    /// The address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl StagingChunk for RegisteredChunk {
    fn device_address(&mut self, _: &CudaStream) -> Result<u64, CudaError> {
        Ok(self.address)
    }

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
        // SAFETY: the caller guarantees the address; the chunk exists until its pending copies are done.
        unsafe { by.copy_on_device(self.address + at as u64, len, to) }
    }
}

impl Chunk for RegisteredChunk {
    type Fault = CudaError;

    fn is_idle(&self) -> Result<bool, CudaError> {
        self.pending_copies.are_done()
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.pending_copies.wait()
    }

    fn wait_briefly(&self) -> Result<bool, CudaError> {
        self.pending_copies.wait_briefly()
    }
}

impl Drop for RegisteredChunk {
    fn drop(&mut self) {
        // In a process that was forked nothing of the parent may be freed.
        if !self.session.is_current_process() {
            return;
        }
        if self.wait().is_ok()
            && let Ok(_entered) = self.memory.device().enter()
            && self.session.deregister_memory(self.address).is_ok()
        {
            // SAFETY: it is not used after this drop.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            // The memory may still be read or written: it is leaked, and the library stays open.
            std::mem::forget(Arc::clone(&self.session));
        }
    }
}
