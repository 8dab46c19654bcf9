//! Memory on a device, and pinned memory of the host, which devices copy from by themselves.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use memmap2::{Advice, MmapMut};

use crate::huge_pages;

use super::chunk_lease::{PendingCopies, StagingChunk};
use super::driver::{Device, DriverHandle, error_text};
use super::error::CudaError;
use super::ring::Chunk;
use super::stream::CudaStream;

/// All contexts can use the memory, and devices see it.
pub const HOST_ALLOC_FLAGS: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
const REGISTER_FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Memory of the host that devices copy from by themselves. It must be freed, or stays for good.
#[derive(Debug)]
enum PinnedMemory {
    /// A mapping of this process, registered with the driver.
    Registered(ManuallyDrop<MmapMut>),
    /// Memory that the driver allocated, and its length in bytes.
    Allocated(DriverHandle<*mut c_void>, usize),
}

impl PinnedMemory {
    /// Registers zeroed memory of this process; `None` if that is not possible. The kernel clears pages for several
    /// threads at once. The driver allocates for one thread at a time, and blocks its other calls meanwhile.
    fn register(device: &Arc<Device>, len: usize) -> Option<PinnedMemory> {
        let mut map = huge_pages::allocate_zeroed(len).ok()?;
        // After a fork, copy-on-write could replace pages that the device reads: the child does not get them.
        map.advise(Advice::DontFork).ok()?;
        // Before Linux 5.14 this fails, and the driver populates the pages when it registers them.
        let _ = map.advise(Advice::PopulateWrite);
        let _context = device.enter().ok()?;
        let start = map.as_mut_ptr().cast();
        // SAFETY: the memory belongs to the map, which is kept until it is no longer registered.
        unsafe { sys::cuMemHostRegister_v2(start, len, REGISTER_FLAGS) }.result().ok()?;
        Some(PinnedMemory::Registered(ManuallyDrop::new(map)))
    }

    /// Allocates zeroed memory of the driver, in the context of a device.
    fn allocate(device: &Arc<Device>, len: usize) -> Result<PinnedMemory, CudaError> {
        let _context = device.enter()?;
        // SAFETY: the allocation belongs to the returned value alone.
        let allocated = unsafe { result::malloc_host(len, HOST_ALLOC_FLAGS) };
        let address = allocated.map_err(|e| CudaError::PinnedMemory {
            ordinal: device.ordinal(),
            why: error_text(e),
        })?;
        // The driver may return memory with the data of another program.
        // SAFETY: the allocation has `len` bytes, and no other owner.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, len) };
        Ok(PinnedMemory::Allocated(DriverHandle(address), len))
    }

    fn bytes(&mut self) -> &mut [u8] {
        match self {
            PinnedMemory::Registered(map) => map,
            // SAFETY: the memory has `len` bytes, was zeroed, and belongs to this value alone.
            PinnedMemory::Allocated(address, len) => unsafe {
                std::slice::from_raw_parts_mut(address.0.cast::<u8>(), *len)
            },
        }
    }

    /// Frees the memory, or leaks it if the driver cannot unregister it.
    ///
    /// # Safety
    ///
    /// No copy may read it, its context must be current, and it must not be used again.
    unsafe fn free(&mut self) {
        match self {
            PinnedMemory::Registered(map) => {
                // SAFETY: `register` registered it, and nobody else unregisters it.
                let unregistered = unsafe { sys::cuMemHostUnregister(map.as_mut_ptr().cast()) };
                if unregistered.result().is_ok() {
                    // SAFETY: the caller does not use it again.
                    unsafe { ManuallyDrop::drop(map) };
                }
            }
            PinnedMemory::Allocated(address, _) => {
                // SAFETY: it was allocated here.
                let _ = unsafe { result::free_host(address.0) };
            }
        }
    }
}

/// A chunk of pinned memory.
#[derive(Debug)]
pub struct PinnedChunk {
    device: Arc<Device>,
    memory: PinnedMemory,
    pending_copies: PendingCopies,
}

impl PinnedChunk {
    /// Pins zeroed memory for all devices, in the context of one.
    pub fn allocate(device: &Arc<Device>, len: usize) -> Result<PinnedChunk, CudaError> {
        let memory = match PinnedMemory::register(device, len) {
            Some(memory) => memory,
            // Not every system lets programs register memory.
            None => PinnedMemory::allocate(device, len)?,
        };
        let pending_copies = PendingCopies::default();
        Ok(PinnedChunk { device: Arc::clone(device), memory, pending_copies })
    }

    /// The bytes, to fill. The chunk must be idle.
    pub fn bytes(&mut self) -> &mut [u8] {
        debug_assert!(self.pending_copies.is_empty(), "a chunk is filled while it may be read");
        self.memory.bytes()
    }
}

impl StagingChunk for PinnedChunk {
    fn device_address(&mut self, stream: &CudaStream) -> Result<u64, CudaError> {
        let device = stream.device();
        let _context = device.enter()?;
        let (host, mut address) = (self.memory.bytes().as_mut_ptr(), 0);
        // SAFETY: the memory is pinned so that devices see it, and the driver writes an address there.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host.cast(), 0) }
            .result()
            .map_err(|e| device.driver_error("cuMemHostGetDevicePointer", e))?;
        Ok(address)
    }

    fn pending_copies(&mut self) -> &mut PendingCopies {
        &mut self.pending_copies
    }

    unsafe fn copy_to(
        &mut self,
        start: usize,
        len: usize,
        stream: &CudaStream,
        address: u64,
    ) -> Result<(), CudaError> {
        let bytes = &self.bytes()[start..start + len];
        // SAFETY: the caller guarantees the address; the chunk keeps the bytes until its pending copies are done.
        unsafe { stream.copy_from_host(bytes, address) }
    }
}

impl Chunk for PinnedChunk {
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

impl Drop for PinnedChunk {
    fn drop(&mut self) {
        // After an error the device may still read the memory: then it is leaked.
        if self.wait().is_ok()
            && let Ok(_context) = self.device.enter()
        {
            // SAFETY: no copy reads it any more, and nothing uses it after this.
            unsafe { self.memory.free() };
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
    /// Allocates uninitialised memory on a device.
    pub fn allocate(device: &Arc<Device>, len: usize) -> Result<DeviceMemory, CudaError> {
        if len == 0 {
            return Ok(DeviceMemory { device: Arc::clone(device), address: 0, len });
        }
        let _context = device.enter()?;
        // SAFETY: the allocation belongs to this value alone.
        let address = unsafe { result::malloc_sync(len) }
            .map_err(|e| device.allocation_error(len, "cuMemAlloc", e))?;
        Ok(DeviceMemory { device: Arc::clone(device), address, len })
    }

    /// The address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device of the memory.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Copies the bytes to the host.
    pub fn to_host(&self) -> Result<Vec<u8>, CudaError> {
        self.copy_part_to_host(0, self.len)
    }

    /// Copies a part of the bytes to the host.
    pub(super) fn copy_part_to_host(&self, start: usize, len: usize) -> Result<Vec<u8>, CudaError> {
        assert!(start <= self.len && len <= self.len - start, "a part lies in the whole");
        let mut bytes = vec![0; len];
        if len > 0 {
            let _context = self.device.enter()?;
            // SAFETY: both ranges have `len` bytes, and the memory belongs to this value.
            unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address + start as u64) }
                .map_err(|e| self.device.driver_error("cuMemcpyDtoH", e))?;
        }
        Ok(bytes)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Work that uses the memory may still be queued. If the device cannot finish it, the memory is leaked.
        if self.len > 0
            && self.device.synchronize().is_ok()
            && let Ok(_context) = self.device.enter()
        {
            // SAFETY: it was allocated here, and no work uses it any more.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
