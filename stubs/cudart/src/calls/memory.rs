//! Calls for device memory, and for host memory that a device can access.

use super::{Out, forward, put, query};
use crate::answers::answer;
use crate::codes::{self, Code};
use crate::{devices, driver};

/// Attributes of an address, by the driver's numbers.
pub const CONTEXT: i32 = 1;
const MEMORY_TYPE: i32 = 2;
const DEVICE_ORDINAL: i32 = 9;

/// Allocates device memory; null for no bytes.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc(address: Out<'_, u64>, bytes: usize) -> Code {
    answer(|| {
        devices::ensure_context()?;
        match bytes {
            0 => put(address, 0),
            _ => forward(address, |address| driver::cuMemAlloc_v2(address, bytes)),
        }
    })
}

/// Frees device memory once all earlier work of its device is done. PyTorch relies on that wait: it frees memory that
/// work of its own streams may still need.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(address: u64) -> Code {
    answer(|| {
        devices::ensure_context()?;
        if address == 0 {
            return Ok(());
        }
        match query(|value| driver::cuPointerGetAttribute(value, CONTEXT, address)) {
            Ok(context) => devices::with_context(context, || {
                driver::cuCtxSynchronize()?;
                driver::cuMemFree_v2(address)
            }),
            // The driver reports what is wrong with the address.
            Err(_) => driver::cuMemFree_v2(address),
        }
    })
}

/// The free and the total bytes of device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemGetInfo(free: Out<'_, usize>, total: Out<'_, usize>) -> Code {
    answer(|| {
        devices::ensure_context()?;
        let (mut left, mut all) = (0, 0);
        driver::cuMemGetInfo_v2(&mut left, &mut all)?;
        put(free, left)?;
        put(total, all)
    })
}

/// Allocates pinned host memory; null for no bytes.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostAlloc(address: Out<'_, u64>, bytes: usize, flags: u32) -> Code {
    answer(|| {
        devices::ensure_context()?;
        match bytes {
            0 => put(address, 0),
            _ => forward(address, |address| driver::cuMemHostAlloc(address, bytes, flags)),
        }
    })
}

/// As `cudaHostAlloc`, without flags.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocHost(address: Out<'_, u64>, bytes: usize) -> Code {
    cudaHostAlloc(address, bytes, 0)
}

/// Frees pinned host memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeHost(address: u64) -> Code {
    answer(|| {
        devices::ensure_context()?;
        match address {
            0 => Ok(()),
            _ => driver::cuMemFreeHost(address),
        }
    })
}

/// Pins existing host memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(address: u64, bytes: usize, flags: u32) -> Code {
    answer(|| {
        devices::ensure_context()?;
        driver::cuMemHostRegister_v2(address, bytes, flags)
    })
}

/// Unpins host memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(address: u64) -> Code {
    answer(|| {
        devices::ensure_context()?;
        driver::cuMemHostUnregister(address)
    })
}

/// `cudaPointerAttributes` of CUDA 13.
#[repr(C)]
pub struct Attributes {
    kind: i32,
    device: i32,
    device_address: u64,
    host_address: u64,
    reserved: [i64; 8],
}

/// The kind of memory at an address: device memory, pinned or registered host memory, or neither.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPointerGetAttributes(attributes: Out<'_, Attributes>, address: u64) -> Code {
    const UNREGISTERED: i32 = 0;
    const HOST: i32 = 1;
    const NO_DEVICE: i32 = -2;
    answer(|| {
        devices::ensure_context()?;
        let ask = |which| query(|value| driver::cuPointerGetAttribute(value, which, address));
        let (kind, device) = match ask(MEMORY_TYPE) {
            Ok(kind) => (kind as i32, ask(DEVICE_ORDINAL)? as i32),
            Err(codes::INVALID_VALUE) => (UNREGISTERED, NO_DEVICE),
            Err(code) => return Err(code),
        };
        let device_address = if kind == UNREGISTERED { 0 } else { address };
        let host_address = if kind == HOST { address } else { 0 };
        put(attributes, Attributes { kind, device, device_address, host_address, reserved: [0; 8] })
    })
}
