//! What we ask of CUDA's driver, which is found when it is first needed.
//!
//! In: the number of a device. Out: a [`Device`], with torch's own context of it. Whatever is here may be used by
//! any thread.

#![allow(unsafe_code)]

use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::Error;

/// A device, and its primary context: the one that torch and everything else that uses the runtime has.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    device: sys::CUdevice,
    context: Handle<sys::CUcontext>,
}

/// A handle of the driver's, which takes calls from any thread.
#[derive(Clone, Copy, Debug)]
pub struct Handle<T>(pub T);

// SAFETY: contexts, streams and events are names for what the driver has, which does its own locking.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// Whether there is a driver. It is looked for once.
pub fn is_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| {
        // SAFETY: loads the driver's library, whose initialisers are the system's.
        unsafe { sys::is_culib_present() && result::init().is_ok() }
    })
}

/// How many devices there are.
pub fn count() -> Result<usize, Error> {
    if !is_there() {
        return Err(Error::NoDriver);
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
        // SAFETY: the device is one that the driver has just named.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| fault(ordinal, "cuDevicePrimaryCtxRetain", e))?;
        Ok(Arc::new(Device { ordinal, device, context: Handle(context) }))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Makes its context that of this thread until what is returned is dropped.
    pub fn enter(&self) -> Result<Entered, Error> {
        let before = result::ctx::get_current().map_err(|e| self.fault("cuCtxGetCurrent", e))?;
        if before == Some(self.context.0) {
            return Ok(Entered { back: None });
        }
        // SAFETY: the context is retained as long as the device is there.
        unsafe { result::ctx::set_current(self.context.0) }
            .map_err(|e| self.fault("cuCtxSetCurrent", e))?;
        Ok(Entered { back: Some(before.unwrap_or(std::ptr::null_mut())) })
    }

    pub(super) fn fault(&self, call: &'static str, error: DriverError) -> Error {
        fault(self.ordinal, call, error)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: it was retained when the device was made. What it is told is of no use to anybody.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A context that is this thread's for a while.
#[must_use]
pub struct Entered {
    back: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.back {
            // SAFETY: it was this thread's before, or is none.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
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
