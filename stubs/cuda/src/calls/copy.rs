//! Calls for copies and memsets, done at once or queued on a stream.

use crate::codes::Code;
use crate::driver::{Needs, call};
use crate::memory::Side::{Device, Host};

/// Copies to the device.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(to: u64, from: usize, bytes: usize) -> Code {
    call("cuMemcpyHtoD_v2", Needs::Context, |driver| driver.copy_now(Device(to), Host(from), bytes))
}

/// Queues a copy to the device.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, bytes: usize, stream: u64) -> Code {
    call("cuMemcpyHtoDAsync_v2", Needs::Context, |driver| {
        driver.copy_later(Device(to), Host(from), bytes, stream)
    })
}

/// Copies from the device.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(to: usize, from: u64, bytes: usize) -> Code {
    call("cuMemcpyDtoH_v2", Needs::Context, |driver| driver.copy_now(Host(to), Device(from), bytes))
}

/// Queues a copy from the device.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, bytes: usize, stream: u64) -> Code {
    call("cuMemcpyDtoHAsync_v2", Needs::Context, |driver| {
        driver.copy_later(Host(to), Device(from), bytes, stream)
    })
}

/// Copies within the device.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> Code {
    call("cuMemcpyDtoD_v2", Needs::Context, |driver| {
        driver.copy_now(Device(to), Device(from), bytes)
    })
}

/// Queues a copy within the device.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) -> Code {
    call("cuMemcpyDtoDAsync_v2", Needs::Context, |driver| {
        driver.copy_later(Device(to), Device(from), bytes, stream)
    })
}

/// Copies between any two addresses.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy(to: u64, from: u64, bytes: usize) -> Code {
    call("cuMemcpy", Needs::Context, |driver| {
        driver.copy_now(driver.memory.side(to), driver.memory.side(from), bytes)
    })
}

/// Queues a copy between any two addresses.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) -> Code {
    call("cuMemcpyAsync", Needs::Context, |driver| {
        driver.copy_later(driver.memory.side(to), driver.memory.side(from), bytes, stream)
    })
}

/// Queues a copy from the memory of one context to that of another.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    to_context: u64,
    from: u64,
    from_context: u64,
    bytes: usize,
    stream: u64,
) -> Code {
    call("cuMemcpyPeerAsync", Needs::Context, |driver| {
        driver.copy_between([(to, to_context), (from, from_context)], bytes, stream)
    })
}

/// Fills device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(to: u64, value: u8, bytes: usize) -> Code {
    call("cuMemsetD8_v2", Needs::Context, |driver| driver.fill(to, value, bytes, None))
}

/// Queues a fill of device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: u64) -> Code {
    call("cuMemsetD8Async", Needs::Context, |driver| driver.fill(to, value, bytes, Some(stream)))
}
