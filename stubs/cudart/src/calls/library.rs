//! Calls about the library itself: its version, the driver's functions, the meaning of codes.

use std::ffi::c_char;

use super::{Out, forward, put};
use crate::answers::{self, answer};
use crate::codes::{self, Code};
use crate::{devices, driver};

/// The runtime's version of CUDA.
#[unsafe(no_mangle)]
pub extern "C" fn cudaRuntimeGetVersion(version: Out<'_, i32>) -> Code {
    answer(|| put(version, devices::VERSION))
}

/// The driver's version of CUDA; 0 without a driver.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDriverGetVersion(version: Out<'_, i32>) -> Code {
    answer(|| {
        forward(version, |version| match driver::cuDriverGetVersion(version) {
            Err(codes::INSUFFICIENT_DRIVER) => Ok(()),
            done => done,
        })
    })
}

/// A function of the driver.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDriverEntryPointByVersion(
    name: *const c_char,
    function: Out<'_, usize>,
    version: u32,
    flags: u64,
    status: Out<'_, i32>,
) -> Code {
    answer(|| {
        devices::ready()?;
        let mut found = 0;
        let result = forward(function, |function| {
            driver::cuGetProcAddress_v2(name, function, version as i32, flags, &mut found)
        });
        status.map_or(Ok(()), |place| put(Some(place), found))?;
        result
    })
}

/// Takes the last error of the thread.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> Code {
    answers::take_last()
}

/// The last error of the thread.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> Code {
    answers::last()
}

/// The name of a code.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(code: Code) -> *const c_char {
    codes::meaning(code).0.as_ptr()
}

/// The meaning of a code.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(code: Code) -> *const c_char {
    codes::meaning(code).1.as_ptr()
}
