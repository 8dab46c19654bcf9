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

use super::Error;

/// A device, and its primary context: the one that torch and everything else that uses the runtime has.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    device: sys::CUdevice,
    context: Handle<sys::CUcontext>,
    is_integrated: bool,
    bus: String,
}

/// A handle of the driver's, which takes calls from any thread.
#[derive(Clone, Copy, Debug)]
pub struct Handle<T>(pub T);

// SAFETY: contexts, streams and events are names for what the driver has, which does its own locking.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// The process that the driver was begun in: in one that was forked from it nothing of it may be called.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Begins the driver, if that was not done.
fn begin() -> Result<(), Error> {
    match PROCESS.load(Ordering::Acquire) {
        0 => {}
        process if process == std::process::id() => return Ok(()),
        _ => return Err(Error::Forked),
    }
    // SAFETY: loads the driver's library, whose initialisers are the system's.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    match result::init() {
        Ok(()) => PROCESS.store(std::process::id(), Ordering::Release),
        Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            return Err(Error::NoDevice { ordinal: 0, count: 0 });
        }
        Err(e) => return Err(fault(0, "cuInit", e)),
    }
    Ok(())
}

/// Whether there is a driver with devices.
pub fn is_there() -> bool {
    count().is_ok_and(|count| count > 0)
}

/// How many devices there are.
pub fn count() -> Result<usize, Error> {
    match begin() {
        Err(Error::NoDevice { .. }) => return Ok(0),
        begun => begun?,
    }
    let count = result::device::get_count().map_err(|e| fault(0, "cuDeviceGetCount", e))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Device {
    /// The device of a number.
    pub fn at(ordinal: usize) -> Result<Arc<Device>, Error> {
        let count = count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let device =
            result::device::get(ordinal as i32).map_err(|e| fault(ordinal, "cuDeviceGet", e))?;
        let integrated = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED;
        // SAFETY: the device is one that the driver has just named.
        let is_integrated = unsafe { result::device::get_attribute(device, integrated) }
            .map_err(|e| fault(ordinal, "cuDeviceGetAttribute", e))?
            != 0;
        // SAFETY: the device is one that the driver has just named.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| fault(ordinal, "cuDevicePrimaryCtxRetain", e))?;
        Ok(Arc::new(Device {
            ordinal,
            device,
            context: Handle(context),
            is_integrated,
            bus: bus(device),
        }))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Its address on the bus, or nothing if the driver does not say it.
    pub(super) fn bus(&self) -> &str {
        &self.bus
    }

    /// Whether it has no memory of its own but uses the host's.
    pub fn is_integrated(&self) -> bool {
        self.is_integrated
    }

    /// Waits until all work of its context is done.
    pub(super) fn finish(&self) -> Result<(), Error> {
        let _entered = self.enter()?;
        result::ctx::synchronize().map_err(|e| self.fault("cuCtxSynchronize", e))
    }

    /// That it has no memory, or what else the driver said.
    pub(super) fn no_room(&self, bytes: usize, call: &'static str, error: DriverError) -> Error {
        if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return self.fault(call, error);
        }
        let (free, total) = result::mem_get_info().unwrap_or((0, 0));
        Error::Memory { ordinal: self.ordinal, bytes, free, total }
    }

    /// Makes its context that of this thread until what is returned is dropped. Meanwhile what this thread does
    /// spoils no graph that another thread captures.
    pub fn enter(&self) -> Result<Entered, Error> {
        begin()?;
        let before = result::ctx::get_current().map_err(|e| self.fault("cuCtxGetCurrent", e))?;
        let mode = exchanged(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
        let mut entered = Entered { back: None, mode };
        if before == Some(self.context.0) {
            return Ok(entered);
        }
        // SAFETY: the context is retained as long as the device is there.
        unsafe { result::ctx::set_current(self.context.0) }
            .map_err(|e| self.fault("cuCtxSetCurrent", e))?;
        entered.back = Some(before.unwrap_or(std::ptr::null_mut()));
        Ok(entered)
    }

    pub(super) fn fault(&self, call: &'static str, error: DriverError) -> Error {
        fault(self.ordinal, call, error)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if begin().is_ok() {
            // SAFETY: it was retained when the device was made. What it is told is of no use to anybody.
            let _ = unsafe { result::primary_ctx::release(self.device) };
        }
    }
}

/// A context that is this thread's for a while.
#[must_use]
pub struct Entered {
    back: Option<sys::CUcontext>,
    mode: Option<sys::CUstreamCaptureMode>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.back {
            // SAFETY: it was this thread's before, or is none.
            let _ = unsafe { result::ctx::set_current(before) };
        }
        let _ = self.mode.map(exchanged);
    }
}

/// What this thread may do while others capture, which was something else before.
fn exchanged(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: the driver reads the one and writes the other, of its own values.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
        .result()
        .is_ok()
        .then_some(mode)
}

fn bus(device: sys::CUdevice) -> String {
    let mut text = [0_u8; 32];
    // SAFETY: the driver writes no more than the length says, with an end.
    let said =
        unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, device) };
    let text = said.result().ok().and_then(|()| CStr::from_bytes_until_nul(&text).ok());
    text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn fault(ordinal: usize, call: &'static str, error: DriverError) -> Error {
    Error::Driver { ordinal, call, why: words(error) }
}

pub(super) fn words(error: DriverError) -> String {
    match error.error_string() {
        Ok(words) => format!("{} ({:?})", words.to_string_lossy(), error.0),
        Err(_) => format!("{:?}", error.0),
    }
}
