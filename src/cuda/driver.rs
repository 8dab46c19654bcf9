//! CUDA's driver, which is loaded at the first use, and its devices.
//!
//! Any thread may use everything here. Programs that are built with this run without CUDA as well.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::error::CudaError;

/// A device and its primary context, which torch and everything else that uses the CUDA runtime shares.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    device: sys::CUdevice,
    context: DriverHandle<sys::CUcontext>,
    is_integrated: bool,
    bus_id: String,
}

/// A handle of the driver's, which any thread may use.
#[derive(Clone, Copy, Debug)]
pub struct DriverHandle<T>(pub T);

// SAFETY: contexts, streams and events are names for objects of the driver, which does its own locking.
unsafe impl<T> Send for DriverHandle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for DriverHandle<T> {}

/// The process that initialised the driver, or 0. A process that was forked from it must not call the driver.
static INIT_PID: AtomicU32 = AtomicU32::new(0);

/// Initialises the driver once.
fn initialize() -> Result<(), CudaError> {
    match INIT_PID.load(Ordering::Acquire) {
        0 => {}
        pid if pid == std::process::id() => return Ok(()),
        _ => return Err(CudaError::Forked),
    }
    // SAFETY: loads the driver's library, whose initialisers are the system's.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    match result::init() {
        Ok(()) => INIT_PID.store(std::process::id(), Ordering::Release),
        Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            return Err(CudaError::NoDevice { ordinal: 0, count: 0 });
        }
        Err(e) => return Err(driver_error(0, "cuInit", e)),
    }
    Ok(())
}

/// Whether there is a driver with devices.
pub fn is_available() -> bool {
    device_count().is_ok_and(|count| count > 0)
}

/// The number of devices.
pub fn device_count() -> Result<usize, CudaError> {
    match initialize() {
        Err(CudaError::NoDevice { .. }) => return Ok(0),
        initialized => initialized?,
    }
    let count = result::device::get_count().map_err(|e| driver_error(0, "cuDeviceGetCount", e))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Device {
    /// Opens the device of a number.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let count = device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let device = result::device::get(ordinal as i32)
            .map_err(|e| driver_error(ordinal, "cuDeviceGet", e))?;
        let integrated = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED;
        // SAFETY: the driver has just returned the device.
        let is_integrated = unsafe { result::device::get_attribute(device, integrated) }
            .map_err(|e| driver_error(ordinal, "cuDeviceGetAttribute", e))?
            != 0;
        // SAFETY: the driver has just returned the device.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| driver_error(ordinal, "cuDevicePrimaryCtxRetain", e))?;
        Ok(Arc::new(Device {
            ordinal,
            device,
            context: DriverHandle(context),
            is_integrated,
            bus_id: query_bus_id(device),
        }))
    }

    /// The number of the device.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The PCI address, or an empty text if the driver does not report it.
    pub(super) fn bus_id(&self) -> &str {
        &self.bus_id
    }

    /// Whether it has no memory of its own but uses the host's.
    pub fn is_integrated(&self) -> bool {
        self.is_integrated
    }

    /// Waits until all work in its context is done.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        let _context = self.enter()?;
        result::ctx::synchronize().map_err(|e| self.driver_error("cuCtxSynchronize", e))
    }

    /// The end address of the allocation that holds an address; the address itself if the driver cannot tell.
    pub(super) fn allocation_end(&self, address: u64) -> u64 {
        let (mut start, mut len) = (0, 0);
        let Ok(_context) = self.enter() else { return address };
        // SAFETY: the driver writes an address and a length there.
        let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut len, address) };
        found.result().map_or(address, |()| start.saturating_add(len as u64))
    }

    /// The error of a failed allocation.
    pub(super) fn allocation_error(
        &self,
        bytes: usize,
        call: &'static str,
        error: DriverError,
    ) -> CudaError {
        if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return self.driver_error(call, error);
        }
        let (free, total) = result::mem_get_info().unwrap_or((0, 0));
        CudaError::OutOfMemory { ordinal: self.ordinal, bytes, free, total }
    }

    /// Makes its context current in this thread until the guard is dropped. Meanwhile this thread cannot disturb
    /// the capture of a graph by another thread.
    pub fn enter(&self) -> Result<ContextGuard, CudaError> {
        initialize()?;
        let previous =
            result::ctx::get_current().map_err(|e| self.driver_error("cuCtxGetCurrent", e))?;
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let mut guard =
            ContextGuard { previous: None, capture_mode: exchange_capture_mode(relaxed) };
        if previous == Some(self.context.0) {
            return Ok(guard);
        }
        // SAFETY: the context is retained as long as the device exists.
        unsafe { result::ctx::set_current(self.context.0) }
            .map_err(|e| self.driver_error("cuCtxSetCurrent", e))?;
        guard.previous = Some(previous.unwrap_or(std::ptr::null_mut()));
        Ok(guard)
    }

    pub(super) fn driver_error(&self, call: &'static str, error: DriverError) -> CudaError {
        driver_error(self.ordinal, call, error)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if initialize().is_ok() {
            // SAFETY: it was retained when the device was opened. Nothing could be done about an error.
            let _ = unsafe { result::primary_ctx::release(self.device) };
        }
    }
}

/// Keeps a context current in this thread.
#[must_use]
pub struct ContextGuard {
    /// The context before, if it was another.
    previous: Option<sys::CUcontext>,
    capture_mode: Option<sys::CUstreamCaptureMode>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: it was current in this thread before, or is null.
            let _ = unsafe { result::ctx::set_current(previous) };
        }
        let _ = self.capture_mode.map(exchange_capture_mode);
    }
}

/// Sets what this thread may do while another captures a graph, and returns the mode before.
fn exchange_capture_mode(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: the driver reads a mode and writes one there.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
        .result()
        .is_ok()
        .then_some(mode)
}

fn query_bus_id(device: sys::CUdevice) -> String {
    let mut text = [0_u8; 32];
    let (start, len) = (text.as_mut_ptr().cast(), text.len() as i32);
    // SAFETY: the driver writes at most `len` bytes, a NUL among them.
    let status = unsafe { sys::cuDeviceGetPCIBusId(start, len, device) };
    let text = status.result().ok().and_then(|()| CStr::from_bytes_until_nul(&text).ok());
    text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn driver_error(ordinal: usize, call: &'static str, error: DriverError) -> CudaError {
    CudaError::Driver { ordinal, call, why: error_text(error) }
}

/// The driver's description of an error, and its name.
pub(super) fn error_text(error: DriverError) -> String {
    match error.error_string() {
        Ok(description) => format!("{} ({:?})", description.to_string_lossy(), error.0),
        Err(_) => format!("{:?}", error.0),
    }
}
