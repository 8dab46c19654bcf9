//! Memory of the device, and host memory that it can copy from by itself.

use super::{Out, asked, fetch, put};
use crate::answers::answer;
use crate::codes::{self, Code};
use crate::{devices, driver};

/// Attributes of an address, by the driver's numbers.
pub const CONTEXT: i32 = 1;
const MEMORY_TYPE: i32 = 2;
const DEVICE_ORDINAL: i32 = 9;

/// Allocates device memory; of no bytes, none.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc(address: Out<'_, u64>, bytes: usize) -> Code {
    answer(|| {
        devices::enter()?;
        match bytes {
            0 => put(address, 0),
            _ => fetch(address, |address| driver::cuMemAlloc_v2(address, bytes)),
        }
    })
}

/// Frees device memory, once all is done that its device was given until now. PyTorch relies on that wait:
/// it frees memory that work of its own streams may still need.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(address: u64) -> Code {
    answer(|| {
        devices::enter()?;
        if address == 0 {
            return Ok(());
        }
        match asked(|value| driver::cuPointerGetAttribute(value, CONTEXT, address)) {
            Ok(context) => devices::within(context, || {
                driver::cuCtxSynchronize()?;
                driver::cuMemFree_v2(address)
            }),
            // What is wrong with the address, the driver knows.
            Err(_) => driver::cuMemFree_v2(address),
        }
    })
}

/// How much memory of the device is free, and how much there is.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemGetInfo(free: Out<'_, usize>, total: Out<'_, usize>) -> Code {
    answer(|| {
        devices::enter()?;
        let (mut left, mut all) = (0, 0);
        driver::cuMemGetInfo_v2(&mut left, &mut all)?;
        put(free, left)?;
        put(total, all)
    })
}

/// Allocates pinned host memory; of no bytes, none.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostAlloc(address: Out<'_, u64>, bytes: usize, flags: u32) -> Code {
    answer(|| {
        devices::enter()?;
        match bytes {
            0 => put(address, 0),
            _ => fetch(address, |address| driver::cuMemHostAlloc(address, bytes, flags)),
        }
    })
}

/// The same, without flags.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocHost(address: Out<'_, u64>, bytes: usize) -> Code {
    cudaHostAlloc(address, bytes, 0)
}

/// Frees pinned host memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeHost(address: u64) -> Code {
    answer(|| {
        devices::enter()?;
        match address {
            0 => Ok(()),
            _ => driver::cuMemFreeHost(address),
        }
    })
}

/// Pins host memory that is there.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(address: u64, bytes: usize, flags: u32) -> Code {
    answer(|| {
        devices::enter()?;
        driver::cuMemHostRegister_v2(address, bytes, flags)
    })
}

/// Lets go of it.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(address: u64) -> Code {
    answer(|| {
        devices::enter()?;
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

/// What an address is: of device memory, of host memory that is pinned or registered, or of neither.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPointerGetAttributes(attributes: Out<'_, Attributes>, address: u64) -> Code {
    const UNREGISTERED: i32 = 0;
    const HOST: i32 = 1;
    const NO_DEVICE: i32 = -2;
    answer(|| {
        devices::enter()?;
        let ask = |which| asked(|value| driver::cuPointerGetAttribute(value, which, address));
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
