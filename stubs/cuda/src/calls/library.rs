//! Calls about the library itself: initialization, its version, its functions, the meaning of codes.

use std::ffi::{CStr, c_char, c_void};

use super::{Out, put, table};
use crate::codes::{self, Code};
use crate::driver::{Needs, call};

table![
    cuInit,
    cuDriverGetVersion,
    cuGetErrorName,
    cuGetErrorString,
    cuGetProcAddress,
    cuGetProcAddress_v2
];

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

/// The address of a function, of its second version where there is one.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress_v2(
    name: Option<&c_char>,
    function: Out<'_, *const c_void>,
    _version: i32,
    _flags: u64,
    status: Out<'_, i32>,
) -> Code {
    call("cuGetProcAddress_v2", Needs::Nothing, |_| {
        const FOUND: i32 = 0;
        const NOT_FOUND: i32 = 1;
        let found = by_name(name)?;
        if let Some(status) = status {
            status.write(if found.is_null() { NOT_FOUND } else { FOUND });
        }
        put(function, found)?;
        if found.is_null() { Err(codes::NOT_FOUND) } else { Ok(()) }
    })
}

/// As the second version, without the reason for a missing one.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress(
    name: Option<&c_char>,
    function: Out<'_, *const c_void>,
    _version: i32,
    _flags: u64,
) -> Code {
    call("cuGetProcAddress", Needs::Nothing, |_| {
        let found = by_name(name)?;
        put(function, found)?;
        if found.is_null() { Err(codes::NOT_FOUND) } else { Ok(()) }
    })
}

fn by_name(name: Option<&c_char>) -> Result<*const c_void, Code> {
    let name = name.ok_or(codes::INVALID_VALUE)?;
    // SAFETY: by the interface this is where a text of C begins.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let found = super::find(&format!("{name}_v2")).or_else(|| super::find(&name));
    Ok(found.map_or(std::ptr::null(), |entry| entry.1))
}
