//! Calls about devices: their number, their properties, and the device of a thread.

use std::ffi::c_char;

use super::properties::Properties;
use super::{Out, forward, put, query};
use crate::answers::answer;
use crate::codes::{self, Code};
use crate::{devices, driver};

/// The number of devices; an error without one.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceCount(count: Out<'_, i32>) -> Code {
    answer(|| {
        let place = count.ok_or(codes::INVALID_VALUE)?;
        place.write(0);
        devices::ready()?;
        place.write(query(driver::cuDeviceGetCount)?);
        Ok(())
    })
}

/// The device of the thread.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDevice(device: Out<'_, i32>) -> Code {
    answer(|| put(device, devices::chosen()?))
}

/// Chooses the device of the thread.
#[unsafe(no_mangle)]
pub extern "C" fn cudaSetDevice(device: i32) -> Code {
    answer(|| devices::choose(device))
}

/// Waits for all work of the thread's device.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSynchronize() -> Code {
    answer(|| {
        devices::ensure_context()?;
        driver::cuCtxSynchronize()
    })
}

/// An attribute of a device; the numbers are the driver's.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetAttribute(value: Out<'_, i32>, attribute: i32, device: i32) -> Code {
    answer(|| {
        let device = devices::existing(device)?;
        forward(value, |value| driver::cuDeviceGetAttribute(value, attribute, device))
    })
}

/// The properties of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceProperties(properties: Out<'_, Properties>, device: i32) -> Code {
    answer(|| {
        let device = devices::existing(device)?;
        put(properties, Properties::of(device)?)
    })
}

/// The PCI address of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetPCIBusId(place: *mut c_char, room: i32, device: i32) -> Code {
    answer(|| {
        let device = devices::existing(device)?;
        driver::cuDeviceGetPCIBusId(place, room, device)
    })
}

/// The least and the greatest priority of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetStreamPriorityRange(
    least: Out<'_, i32>,
    greatest: Out<'_, i32>,
) -> Code {
    answer(|| {
        devices::ensure_context()?;
        let (mut from, mut to) = (0, 0);
        driver::cuCtxGetStreamPriorityRange(&mut from, &mut to)?;
        least.map_or(Ok(()), |place| put(Some(place), from))?;
        greatest.map_or(Ok(()), |place| put(Some(place), to))
    })
}

/// Whether a device can reach the memory of another, which none can.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceCanAccessPeer(can: Out<'_, i32>, device: i32, peer: i32) -> Code {
    answer(|| {
        devices::existing(device)?;
        devices::existing(peer)?;
        put(can, 0)
    })
}
