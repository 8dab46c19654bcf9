//! Calls for copies and memsets, done at once or queued on a stream.

use super::memory::CONTEXT;
use super::query;
use crate::answers::answer;
use crate::codes::{self, Code, Done};
use crate::{devices, driver};

/// The kinds of memory that a copy goes from and to, by the runtime's numbers.
const HOST_TO_HOST: i32 = 0;
const HOST_TO_DEVICE: i32 = 1;
const DEVICE_TO_HOST: i32 = 2;
const DEVICE_TO_DEVICE: i32 = 3;
const BY_ADDRESS: i32 = 4;

/// Copies before it returns.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy(to: u64, from: u64, bytes: usize, kind: i32) -> Code {
    answer(|| {
        devices::ensure_context()?;
        match kind {
            _ if bytes == 0 => Ok(()),
            HOST_TO_DEVICE => driver::cuMemcpyHtoD_v2(to, from, bytes),
            DEVICE_TO_HOST => driver::cuMemcpyDtoH_v2(to, from, bytes),
            DEVICE_TO_DEVICE => driver::cuMemcpyDtoD_v2(to, from, bytes),
            HOST_TO_HOST | BY_ADDRESS => driver::cuMemcpy(to, from, bytes),
            _ => Err(codes::INVALID_MEMCPY_DIRECTION),
        }
    })
}

/// Queues a copy on a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyAsync(
    to: u64,
    from: u64,
    bytes: usize,
    kind: i32,
    stream: u64,
) -> Code {
    answer(|| {
        devices::ensure_context()?;
        queue_copy(to, from, bytes, kind, stream)
    })
}

fn queue_copy(to: u64, from: u64, bytes: usize, kind: i32, stream: u64) -> Done {
    match kind {
        _ if bytes == 0 => Ok(()),
        HOST_TO_DEVICE => driver::cuMemcpyHtoDAsync_v2(to, from, bytes, stream),
        DEVICE_TO_HOST => driver::cuMemcpyDtoHAsync_v2(to, from, bytes, stream),
        DEVICE_TO_DEVICE => match [to, from].map(owner) {
            [Ok(of_to), Ok(of_from)] if of_to != of_from => {
                driver::cuMemcpyPeerAsync(to, of_to, from, of_from, bytes, stream)
            }
            _ => driver::cuMemcpyDtoDAsync_v2(to, from, bytes, stream),
        },
        HOST_TO_HOST | BY_ADDRESS => driver::cuMemcpyAsync(to, from, bytes, stream),
        _ => Err(codes::INVALID_MEMCPY_DIRECTION),
    }
}

/// The context of device memory.
fn owner(address: u64) -> Result<u64, Code> {
    query(|value| driver::cuPointerGetAttribute(value, CONTEXT, address))
}

/// Queues a copy from one device to another.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyPeerAsync(
    to: u64,
    to_device: i32,
    from: u64,
    from_device: i32,
    bytes: usize,
    stream: u64,
) -> Code {
    answer(|| {
        devices::ensure_context()?;
        let to_context = devices::context_of(devices::existing(to_device)?)?;
        let from_context = devices::context_of(devices::existing(from_device)?)?;
        driver::cuMemcpyPeerAsync(to, to_context, from, from_context, bytes, stream)
    })
}

/// Fills device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemset(to: u64, value: i32, bytes: usize) -> Code {
    answer(|| {
        devices::ensure_context()?;
        match bytes {
            0 => Ok(()),
            _ => driver::cuMemsetD8_v2(to, value as u8, bytes),
        }
    })
}

/// Queues a fill of device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemsetAsync(to: u64, value: i32, bytes: usize, stream: u64) -> Code {
    answer(|| {
        devices::ensure_context()?;
        match bytes {
            0 => Ok(()),
            _ => driver::cuMemsetD8Async(to, value as u8, bytes, stream),
        }
    })
}
