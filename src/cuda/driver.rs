//! What we ask of CUDA's driver, which is found when it is first needed.
//!
//! In: the number of a device. Out: a [`Device`], with torch's own context of it. Whatever is here may be used by
//! any thread.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::CudaError;

/// A device, and its primary context: the one that torch and everything else that uses the runtime has.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    device: sys::CUdevice,
    context: DriverHandle<sys::CUcontext>,
    is_integrated: bool,
    bus_id: String,
}

/// A handle of the driver's, which takes calls from any thread.
#[derive(Clone, Copy, Debug)]
pub struct DriverHandle<T>(pub T);

// SAFETY: contexts, streams and events are names for what the driver has, which does its own locking.
unsafe impl<T> Send for DriverHandle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for DriverHandle<T> {}

/// The process that the driver was begun in: in one that was forked from it nothing of it may be called.
static INIT_PID: AtomicU32 = AtomicU32::new(0);

/// Begins the driver, if that was not done.
fn initialize() -> Result<(), CudaError> {
    match INIT_PID.load(Ordering::Acquire) {
        0 => {}
        process if process == std::process::id() => return Ok(()),
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

/// How many devices there are.
pub fn device_count() -> Result<usize, CudaError> {
    match initialize() {
        Err(CudaError::NoDevice { .. }) => return Ok(0),
        begun => begun?,
    }
    let count = result::device::get_count().map_err(|e| driver_error(0, "cuDeviceGetCount", e))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Device {
    /// The device of a number.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let count = device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let device = result::device::get(ordinal as i32)
            .map_err(|e| driver_error(ordinal, "cuDeviceGet", e))?;
        let integrated = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED;
        // SAFETY: the device is one that the driver has just named.
        let is_integrated = unsafe { result::device::get_attribute(device, integrated) }
            .map_err(|e| driver_error(ordinal, "cuDeviceGetAttribute", e))?
            != 0;
        // SAFETY: the device is one that the driver has just named.
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

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Its address on the bus, or nothing if the driver does not say it.
    pub(super) fn bus_id(&self) -> &str {
        &self.bus_id
    }

    /// Whether it has no memory of its own but uses the host's.
    pub fn is_integrated(&self) -> bool {
        self.is_integrated
    }

    /// Waits until all work of its context is done.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        result::ctx::synchronize().map_err(|e| self.driver_error("cuCtxSynchronize", e))
    }

    /// That it has no memory, or what else the driver said.
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

    /// Makes its context that of this thread until what is returned is dropped. Meanwhile what this thread does
    /// spoils no graph that another thread captures.
    pub fn enter(&self) -> Result<ContextGuard, CudaError> {
        initialize()?;
        let before =
            result::ctx::get_current().map_err(|e| self.driver_error("cuCtxGetCurrent", e))?;
        let mode = exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
        let mut entered = ContextGuard { previous: None, capture_mode: mode };
        if before == Some(self.context.0) {
            return Ok(entered);
        }
        // SAFETY: the context is retained as long as the device is there.
        unsafe { result::ctx::set_current(self.context.0) }
            .map_err(|e| self.driver_error("cuCtxSetCurrent", e))?;
        entered.previous = Some(before.unwrap_or(std::ptr::null_mut()));
        Ok(entered)
    }

    pub(super) fn driver_error(&self, call: &'static str, error: DriverError) -> CudaError {
        driver_error(self.ordinal, call, error)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if initialize().is_ok() {
            // SAFETY: it was retained when the device was made. What it is told is of no use to anybody.
            let _ = unsafe { result::primary_ctx::release(self.device) };
        }
    }
}

/// A context that is this thread's for a while.
#[must_use]
pub struct ContextGuard {
    previous: Option<sys::CUcontext>,
    capture_mode: Option<sys::CUstreamCaptureMode>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(before) = self.previous {
            // SAFETY: it was this thread's before, or is none.
            let _ = unsafe { result::ctx::set_current(before) };
        }
        let _ = self.capture_mode.map(exchange_capture_mode);
    }
}

/// What this thread may do while others capture, which was something else before.
fn exchange_capture_mode(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: the driver reads the one and writes the other, of its own values.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
        .result()
        .is_ok()
        .then_some(mode)
}

fn query_bus_id(device: sys::CUdevice) -> String {
    let mut text = [0_u8; 32];
    // SAFETY: the driver writes no more than the length says, with an end.
    let said =
        unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, device) };
    let text = said.result().ok().and_then(|()| CStr::from_bytes_until_nul(&text).ok());
    text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn driver_error(ordinal: usize, call: &'static str, error: DriverError) -> CudaError {
    CudaError::Driver { ordinal, call, why: error_text(error) }
}

pub(super) fn error_text(error: DriverError) -> String {
    match error.error_string() {
        Ok(words) => format!("{} ({:?})", words.to_string_lossy(), error.0),
        Err(_) => format!("{:?}", error.0),
    }
}
