//! Memory that the host and an integrated device both use where it lies (Jetson, DGX Spark): readers fill it
//! themselves, and nothing is copied.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::Error;
use super::driver::{Device, Handle};

/// Every context may use it, and devices see it.
const FLAGS: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;

/// Memory of the host that a device sees.
#[derive(Debug)]
pub struct Shared {
    device: Arc<Device>,
    here: Handle<*mut c_void>,
    there: u64,
    len: usize,
}

impl Device {
    /// Memory that the host and this device both use.
    pub(super) fn shared(self: &Arc<Self>, len: usize) -> Result<Shared, Error> {
        let _entered = self.enter()?;
        // SAFETY: what is allocated belongs to this memory alone.
        let here = unsafe { result::malloc_host(len, FLAGS) }
            .map_err(|e| self.no_room(len, "cuMemHostAlloc", e))?;
        let mut shared = Shared { device: Arc::clone(self), here: Handle(here), there: 0, len };
        // SAFETY: it was just made so that devices see it.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut shared.there, here, 0) }
            .result()
            .map_err(|e| self.fault("cuMemHostGetDevicePointer", e))?;
        Ok(shared)
    }
}

impl Shared {
    /// Its address on the device.
    pub fn at(&self) -> u64 {
        self.there
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Where a part of it is on the host.
    pub fn part(&self, start: usize, len: usize) -> *mut [u8] {
        assert!(start <= self.len && len <= self.len - start, "a part lies in the whole");
        std::ptr::slice_from_raw_parts_mut(self.here.0.cast::<u8>().wrapping_add(start), len)
    }

    /// A copy of a part of it.
    pub fn copied(&self, start: usize, len: usize) -> Result<Vec<u8>, Error> {
        let part = self.part(start, len);
        self.device.finish()?;
        // SAFETY: it is there, zeroed by the system or filled, and no work of the device writes to it any more.
        Ok(unsafe { &*part }.to_vec())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Whoever had it may have given the device work that is not over: then it is left to the system.
        if self.device.finish().is_ok()
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: it was made here, and nobody uses it any more.
            let _ = unsafe { result::free_host(self.here.0) };
        }
    }
}
