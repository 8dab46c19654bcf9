//! Memory of devices, and memory of the host that they read by themselves.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result;

use super::CudaError;
use super::chunk_lease::{PendingCopies, StagingChunk};
use super::driver::{Device, DriverHandle, error_text};
use super::ring::Chunk;
use super::stream::CudaStream;

/// Memory of the host that every context can use, whichever it was made in.
const PORTABLE_FLAG: u32 = 1;

impl Device {
    /// A chunk of memory that it can read by itself.
    pub fn allocate_pinned(self: &Arc<Self>, len: usize) -> Result<PinnedChunk, CudaError> {
        let _entered = self.enter()?;
        // SAFETY: what is allocated belongs to the chunk alone.
        let at = unsafe { result::malloc_host(len, PORTABLE_FLAG) }
            .map_err(|e| CudaError::PinnedMemory { ordinal: self.ordinal(), why: error_text(e) })?;
        // So that whoever reads it before it was filled reads nothing of another program.
        // SAFETY: it is `len` bytes, and nobody else has them.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, len) };
        Ok(PinnedChunk {
            device: Arc::clone(self),
            address: DriverHandle(at),
            len,
            pending_copies: PendingCopies::default(),
        })
    }

    /// Memory on the device, of no known content.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Result<DeviceMemory, CudaError> {
        if len == 0 {
            return Ok(DeviceMemory { device: Arc::clone(self), address: 0, len });
        }
        let _entered = self.enter()?;
        // SAFETY: what is allocated belongs to the memory alone.
        let at = unsafe { result::malloc_sync(len) }
            .map_err(|e| self.allocation_error(len, "cuMemAlloc", e))?;
        Ok(DeviceMemory { device: Arc::clone(self), address: at, len })
    }
}

/// Memory of the host that devices read by themselves.
#[derive(Debug)]
pub struct PinnedChunk {
    device: Arc<Device>,
    address: DriverHandle<*mut c_void>,
    len: usize,
    pending_copies: PendingCopies,
}

impl PinnedChunk {
    /// Its bytes, to fill. Only of a chunk that is idle.
    pub fn bytes(&mut self) -> &mut [u8] {
        debug_assert!(self.pending_copies.is_empty(), "a chunk is filled while it may be read");
        // SAFETY: it is that long, it was zeroed, and it is this chunk's alone; no copy out of it is under way.
        unsafe { std::slice::from_raw_parts_mut(self.address.0.cast::<u8>(), self.len) }
    }
}

impl StagingChunk for PinnedChunk {
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
        let bytes = &self.bytes()[at..at + len];
        // SAFETY: the caller's word for the address; the bytes are there until the chunk's marks are over.
        unsafe { by.copy_from_host(bytes, to) }
    }
}

impl Chunk for PinnedChunk {
    type Fault = CudaError;

    fn is_idle(&self) -> Result<bool, CudaError> {
        self.pending_copies.is_done()
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.pending_copies.wait()
    }
}

impl Drop for PinnedChunk {
    fn drop(&mut self) {
        // A device that cannot say whether it still reads it may do so: then it is left to the system.
        if self.wait().is_ok()
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: it was made here, and nobody reads it any more.
            let _ = unsafe { result::free_host(self.address.0) };
        }
    }
}

/// Memory on a device.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    len: usize,
}

impl DeviceMemory {
    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A copy of its bytes on the host.
    pub fn to_host(&self) -> Result<Vec<u8>, CudaError> {
        self.copy_part_to_host(0, self.len)
    }

    /// The same of a part of it.
    pub(super) fn copy_part_to_host(&self, start: usize, len: usize) -> Result<Vec<u8>, CudaError> {
        assert!(start <= self.len && len <= self.len - start, "a part lies in the whole");
        let mut bytes = vec![0; len];
        if len > 0 {
            let _entered = self.device.enter()?;
            // SAFETY: both are that long, and the memory is ours.
            unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address + start as u64) }
                .map_err(|e| self.device.driver_error("cuMemcpyDtoH", e))?;
        }
        Ok(bytes)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Whoever had it may have given the device work that is not over: then it is left to the system.
        if self.len > 0
            && self.device.synchronize().is_ok()
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: it was made here, and nobody uses it any more.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
