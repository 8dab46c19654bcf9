//! Calls about the library itself: initialization, its version, the meaning of codes.

use std::ffi::c_char;

use super::output::{Out, put};
use crate::codes::{self, Code};
use crate::driver::{Needs, call};

/// Initializes the library, which fails without a device.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> Code {
    call("cuInit", Needs::Nothing, |driver| match flags {
        0 if driver.settings.devices.is_empty() => Err(codes::NO_DEVICE),
        0 => {
            driver.initialised = true;
            Ok(())
        }
        _ => Err(codes::INVALID_VALUE),
    })
}

/// The driver's version of CUDA.
#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<'_, i32>) -> Code {
    call("cuDriverGetVersion", Needs::Nothing, |driver| {
        put(version, driver.settings.driver_version)
    })
}

/// The name of a code.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: Code, name: Out<'_, *const c_char>) -> Code {
    call("cuGetErrorName", Needs::Nothing, |_| match codes::meaning(code) {
        Some((found, _)) => put(name, found.as_ptr()),
        None => put(name, std::ptr::null()).and(Err(codes::INVALID_VALUE)),
    })
}

/// The meaning of a code.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: Code, words: Out<'_, *const c_char>) -> Code {
    call("cuGetErrorString", Needs::Nothing, |_| match codes::meaning(code) {
        Some((_, found)) => put(words, found.as_ptr()),
        None => put(words, std::ptr::null()).and(Err(codes::INVALID_VALUE)),
    })
}
