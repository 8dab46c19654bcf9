//! Memory that the host and an integrated device share (Jetson, DGX Spark): readers fill it, and nothing is copied.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::{Device, DriverHandle};
use super::error::CudaError;
use super::memory::HOST_ALLOC_FLAGS;

/// Memory of the host that a device sees.
#[derive(Debug)]
pub struct SharedMemory {
    device: Arc<Device>,
    host: DriverHandle<*mut c_void>,
    device_address: u64,
    len: usize,
}

impl SharedMemory {
    pub fn allocate(device: &Arc<Device>, len: usize) -> Result<SharedMemory, CudaError> {
        let _context = device.enter()?;
        // SAFETY: the allocation belongs to this value alone.
        let host = unsafe { result::malloc_host(len, HOST_ALLOC_FLAGS) }
            .map_err(|e| device.allocation_error(len, "cuMemHostAlloc", e))?;
        let mut memory = SharedMemory {
            device: Arc::clone(device),
            host: DriverHandle(host),
            device_address: 0,
            len,
        };
        // SAFETY: the memory was just allocated so that devices see it.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut memory.device_address, host, 0) }
            .result()
            .map_err(|e| device.driver_error("cuMemHostGetDevicePointer", e))?;
        Ok(memory)
    }

    /// The address on the device.
    pub fn address(&self) -> u64 {
        self.device_address
    }

    /// The device that sees the memory.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The address of a part on the host.
    pub fn host_part(&self, start: usize, len: usize) -> *mut [u8] {
        assert!(start <= self.len && len <= self.len - start, "a part lies in the whole");
        std::ptr::slice_from_raw_parts_mut(self.host.0.cast::<u8>().wrapping_add(start), len)
    }

    /// Copies a part, after all work of the device is done.
    pub fn copy_part_to_host(&self, start: usize, len: usize) -> Result<Vec<u8>, CudaError> {
        let part = self.host_part(start, len);
        self.device.synchronize()?;
        // SAFETY: the part exists, the system has zeroed it or it was filled, and no work of the device writes to it.
        Ok(unsafe { &*part }.to_vec())
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // Work that uses the memory may still be queued. If the device cannot finish it, the memory is leaked.
        if self.device.synchronize().is_ok()
            && let Ok(_context) = self.device.enter()
        {
            // SAFETY: it was allocated here, and no work uses it any more.
            let _ = unsafe { result::free_host(self.host.0) };
        }
    }
}
