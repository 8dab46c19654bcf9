//! Devices: how many there are, what they are like, and the one of a thread.

use std::ffi::c_char;

use super::properties::Properties;
use super::{Out, asked, fetch, put};
use crate::answers::answer;
use crate::codes::{self, Code};
use crate::{devices, driver};

/// How many devices there are; without one, that is an error.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceCount(count: Out<'_, i32>) -> Code {
    answer(|| {
        let place = count.ok_or(codes::INVALID_VALUE)?;
        place.write(0);
        devices::ready()?;
        place.write(asked(driver::cuDeviceGetCount)?);
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

/// Waits for all that the device of the thread has to do.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSynchronize() -> Code {
    answer(|| {
        devices::enter()?;
        driver::cuCtxSynchronize()
    })
}

/// An attribute of a device; the numbers are the driver's.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetAttribute(value: Out<'_, i32>, attribute: i32, device: i32) -> Code {
    answer(|| {
        let device = devices::known(device)?;
        fetch(value, |value| driver::cuDeviceGetAttribute(value, attribute, device))
    })
}

/// All that a device is like.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceProperties(properties: Out<'_, Properties>, device: i32) -> Code {
    answer(|| {
        let device = devices::known(device)?;
        put(properties, Properties::of(device)?)
    })
}

/// Where a device sits.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetPCIBusId(place: *mut c_char, room: i32, device: i32) -> Code {
    answer(|| {
        let device = devices::known(device)?;
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
        devices::enter()?;
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
        devices::known(device)?;
        devices::known(peer)?;
        put(can, 0)
    })
}
