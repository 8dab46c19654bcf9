//! Memory that the host and an integrated device both use where it lies (Jetson, DGX Spark): readers fill it
//! themselves, and nothing is copied.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::CudaError;
use super::driver::{Device, DriverHandle};

/// Every context may use it, and devices see it.
const HOST_ALLOC_FLAGS: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;

/// Memory of the host that a device sees.
#[derive(Debug)]
pub struct SharedMemory {
    device: Arc<Device>,
    host: DriverHandle<*mut c_void>,
    device_address: u64,
    len: usize,
}

impl Device {
    /// Memory that the host and this device both use.
    pub(super) fn allocate_shared(self: &Arc<Self>, len: usize) -> Result<SharedMemory, CudaError> {
        let _entered = self.enter()?;
        // SAFETY: what is allocated belongs to this memory alone.
        let here = unsafe { result::malloc_host(len, HOST_ALLOC_FLAGS) }
            .map_err(|e| self.allocation_error(len, "cuMemHostAlloc", e))?;
        let mut shared = SharedMemory {
            device: Arc::clone(self),
            host: DriverHandle(here),
            device_address: 0,
            len,
        };
        // SAFETY: it was just made so that devices see it.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut shared.device_address, here, 0) }
            .result()
            .map_err(|e| self.driver_error("cuMemHostGetDevicePointer", e))?;
        Ok(shared)
    }
}

impl SharedMemory {
    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.device_address
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Where a part of it is on the host.
    pub fn host_part(&self, start: usize, len: usize) -> *mut [u8] {
        assert!(start <= self.len && len <= self.len - start, "a part lies in the whole");
        std::ptr::slice_from_raw_parts_mut(self.host.0.cast::<u8>().wrapping_add(start), len)
    }

    /// A copy of a part of it.
    pub fn copy_part_to_host(&self, start: usize, len: usize) -> Result<Vec<u8>, CudaError> {
        let part = self.host_part(start, len);
        self.device.synchronize()?;
        // SAFETY: it is there, zeroed by the system or filled, and no work of the device writes to it any more.
        Ok(unsafe { &*part }.to_vec())
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // Whoever had it may have given the device work that is not over: then it is left to the system.
        if self.device.synchronize().is_ok()
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: it was made here, and nobody uses it any more.
            let _ = unsafe { result::free_host(self.host.0) };
        }
    }
}
