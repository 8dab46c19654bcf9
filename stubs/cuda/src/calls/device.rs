//! Calls about devices: their number and their attributes.

use super::output::{Out, put, put_text};
use crate::codes::{self, Code};
use crate::driver::{Needs, call};
use crate::settings::{PCI_BUS_ID, PCI_DEVICE_ID, PCI_DOMAIN_ID};

/// The number of devices.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<'_, i32>) -> Code {
    call("cuDeviceGetCount", Needs::Init, |driver| put(count, driver.settings.devices.len() as i32))
}

/// A device by its number, which is its handle too.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<'_, i32>, ordinal: i32) -> Code {
    call("cuDeviceGet", Needs::Init, |driver| {
        driver.contexts.device(ordinal)?;
        put(device, ordinal)
    })
}

/// The name of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(name: Out<'_, u8>, room: i32, device: i32) -> Code {
    call("cuDeviceGetName", Needs::Init, |driver| {
        let device = driver.contexts.device(device)?;
        put_text(name, room, &format!("Stub device {device}"))
    })
}

/// An attribute of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: Out<'_, i32>, attribute: i32, device: i32) -> Code {
    call("cuDeviceGetAttribute", Needs::Init, |driver| {
        let device = driver.contexts.device(device)?;
        let found = driver.settings.attribute(device, attribute);
        put(value, found.ok_or(codes::INVALID_VALUE)?)
    })
}

/// The PCI address of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetPCIBusId(place: Out<'_, u8>, room: i32, device: i32) -> Code {
    call("cuDeviceGetPCIBusId", Needs::Init, |driver| {
        let device = driver.contexts.device(device)?;
        let [domain, bus, number] = [PCI_DOMAIN_ID, PCI_BUS_ID, PCI_DEVICE_ID]
            .map(|which| driver.settings.attribute(device, which).unwrap_or(0));
        put_text(place, room, &format!("{domain:04x}:{bus:02x}:{number:02x}.0"))
    })
}

/// The identity of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(id: Out<'_, [u8; 16]>, device: i32) -> Code {
    call("cuDeviceGetUuid", Needs::Init, |driver| put(id, uuid(driver.contexts.device(device)?)))
}

/// The identity of a device, by its newer name.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(id: Out<'_, [u8; 16]>, device: i32) -> Code {
    call("cuDeviceGetUuid_v2", Needs::Init, |driver| put(id, uuid(driver.contexts.device(device)?)))
}

fn uuid(device: usize) -> [u8; 16] {
    let mut id = *b"stub CUDA \0\0\0\0\0\0";
    id[15] = device as u8;
    id
}

/// The memory of a device, in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, device: i32) -> Code {
    call("cuDeviceTotalMem_v2", Needs::Init, |driver| {
        driver.contexts.device(device)?;
        put(bytes, driver.settings.memory)
    })
}
