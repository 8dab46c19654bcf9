//! Calls for a test in the same process, which the real driver does not have. They are not counted and need no
//! context.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::codes::{self, Code};
use crate::driver::driver;
use crate::names;

fn text(place: Option<&c_char>) -> Option<&CStr> {
    // SAFETY: by the interface this is where a text of C begins.
    place.map(|place| unsafe { CStr::from_ptr(place) })
}

/// Makes the nth call of a name, counted from now, fail with a code.
#[unsafe(no_mangle)]
pub extern "C" fn stub_cuda_fail(name: Option<&c_char>, nth: u64, code: Code) -> Code {
    let name = text(name).and_then(|name| name.to_str().ok());
    match name.filter(|name| nth > 0 && names::is_known(name)) {
        Some(name) => {
            driver().plan_failure(name.to_owned(), nth, code);
            codes::SUCCESS
        }
        None => codes::INVALID_VALUE,
    }
}

/// Writes the report to a path; `/dev/fd/N` is an open file.
#[unsafe(no_mangle)]
pub extern "C" fn stub_cuda_report(path: Option<&c_char>) -> Code {
    let Some(path) = text(path) else {
        return codes::INVALID_VALUE;
    };
    let written = driver().report().write_to(Path::new(OsStr::from_bytes(path.to_bytes())));
    written.map_or(codes::OPERATING_SYSTEM, |()| codes::SUCCESS)
}

/// The number of faults so far.
#[unsafe(no_mangle)]
pub extern "C" fn stub_cuda_faults() -> u64 {
    driver().faults.len() as u64
}

/// Reads device memory as it is now, without doing queued work.
///
/// # Safety
///
/// `bytes` bytes can be written at `to`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_cuda_peek(to: *mut u8, from: u64, bytes: usize) -> Code {
    match driver().memory.device.bytes(from, bytes) {
        Ok(found) => {
            // SAFETY: by the caller, and so many bytes were found.
            unsafe { std::ptr::copy_nonoverlapping(found.as_ptr(), to, bytes) };
            codes::SUCCESS
        }
        Err(_) => codes::INVALID_VALUE,
    }
}

/// Writes to device memory at once, as other hardware does: it waits for no queued work.
///
/// # Safety
///
/// `bytes` bytes can be read at `from`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_cuda_write(to: u64, from: *const u8, bytes: usize) -> Code {
    match driver().memory.device.bytes_mut(to, bytes) {
        Ok(place) => {
            // SAFETY: by the caller, and so many bytes were found.
            unsafe { std::ptr::copy_nonoverlapping(from, place.as_mut_ptr(), bytes) };
            codes::SUCCESS
        }
        Err(_) => codes::INVALID_VALUE,
    }
}

/// Sets a byte of the device memory that begins at `base`, or of the guards on both sides.
#[unsafe(no_mangle)]
pub extern "C" fn stub_cuda_poke(base: u64, offset: isize, value: u8) -> Code {
    match driver().memory.device.unchecked_mut(base, offset, 1) {
        Ok(place) => {
            place.fill(value);
            codes::SUCCESS
        }
        Err(_) => codes::INVALID_VALUE,
    }
}
