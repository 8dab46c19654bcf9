//! Calls for device memory, and for host memory that a device can access.

use super::output::{Out, put};
use crate::codes::{self, Code, Done};
use crate::driver::{Driver, Needs, call};
use crate::host_memory::{self, HostKind};
use crate::settings::{HOST_REGISTER_SUPPORTED, READ_ONLY_HOST_REGISTER_SUPPORTED};
use crate::streams::Work;

/// Allocates device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: Out<'_, u64>, bytes: usize) -> Code {
    call("cuMemAlloc_v2", Needs::Context, |driver| allocate(driver, address, bytes))
}

/// Allocates device memory. It can be used at once, which is more than the interface promises.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(address: Out<'_, u64>, bytes: usize, stream: u64) -> Code {
    call("cuMemAllocAsync", Needs::Context, |driver| {
        driver.stream_here(stream)?;
        allocate(driver, address, bytes)
    })
}

fn allocate(driver: &mut Driver, address: Out<'_, u64>, bytes: usize) -> Done {
    let place = address.filter(|_| bytes > 0).ok_or(codes::INVALID_VALUE)?;
    let device = driver.device_here()?;
    let free = driver.settings.memory.saturating_sub(driver.memory.device.used(device));
    if bytes > free {
        return Err(codes::OUT_OF_MEMORY);
    }
    let here = driver.here;
    place.write(driver.memory.device.allocate(bytes, device, here).ok_or(codes::OUT_OF_MEMORY)?);
    Ok(())
}

/// Frees device memory that nothing queued needs.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> Code {
    call("cuMemFree_v2", Needs::Context, |driver| {
        if address == 0 {
            return Ok(());
        }
        let is_device_address =
            driver.memory.device.live.get(&address).is_none_or(|one| one.context == driver.here);
        let freed = match is_device_address {
            true => driver.free(address),
            false => {
                Err(format!("the device memory at {address:#x} is not of the current context"))
            }
        };
        freed.map_err(|words| driver.fault(codes::INVALID_VALUE, words))
    })
}

/// Queues a free of device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: u64, stream: u64) -> Code {
    call("cuMemFreeAsync", Needs::Context, |driver| {
        if address == 0 {
            return Ok(());
        }
        let stream = driver.stream_here(stream)?;
        let wrong = match driver.memory.device.live.get_mut(&address) {
            Some(one) if !one.ends => {
                one.ends = true;
                driver.streams.queue(stream, Work::Free { address });
                return Ok(());
            }
            Some(_) => format!("{address:#x} is freed a second time"),
            None => match driver.memory.device.find(address, 0) {
                Ok(_) => format!("{address:#x} is not where device memory begins"),
                Err(words) => words,
            },
        };
        Err(driver.fault(codes::INVALID_VALUE, wrong))
    })
}

/// The free and the total bytes of device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> Code {
    call("cuMemGetInfo_v2", Needs::Context, |driver| {
        let used = driver.memory.device.used(driver.device_here()?);
        put(free, driver.settings.memory.saturating_sub(used))?;
        put(total, driver.settings.memory)
    })
}

/// The start and the size of the device memory at an address.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(
    base: Out<'_, u64>,
    bytes: Out<'_, usize>,
    address: u64,
) -> Code {
    call("cuMemGetAddressRange_v2", Needs::Context, |driver| {
        let (start, one) = driver.memory.device.find(address, 0).map_err(|_| codes::NOT_FOUND)?;
        base.map_or(Ok(()), |place| put(Some(place), start))?;
        bytes.map_or(Ok(()), |place| put(Some(place), one.len()))
    })
}

/// Allocates pinned host memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(address: Out<'_, usize>, bytes: usize, _flags: u32) -> Code {
    call("cuMemHostAlloc", Needs::Context, |driver| allocate_host(driver, address, bytes))
}

/// As `cuMemHostAlloc`, without flags.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(address: Out<'_, usize>, bytes: usize) -> Code {
    call("cuMemAllocHost_v2", Needs::Context, |driver| allocate_host(driver, address, bytes))
}

fn allocate_host(driver: &mut Driver, address: Out<'_, usize>, bytes: usize) -> Done {
    let place = address.filter(|_| bytes > 0).ok_or(codes::INVALID_VALUE)?;
    if bytes > driver.settings.pinned.saturating_sub(driver.memory.host.bytes) {
        return Err(codes::OUT_OF_MEMORY);
    }
    place.write(driver.memory.host.allocate(bytes).ok_or(codes::OUT_OF_MEMORY)?);
    Ok(())
}

/// Frees pinned host memory that nothing queued needs.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: usize) -> Code {
    call("cuMemFreeHost", Needs::Context, |driver| {
        let wrong = match driver.memory.host.pinned.get(&address) {
            Some(&bytes) => driver.streams.host_memory_needed_by(address, bytes),
            None if driver.memory.host.was_freed(address) => Some("it was freed before".to_owned()),
            None => Some("it is not where pinned memory begins".to_owned()),
        };
        if let Some(words) = wrong {
            let words = format!("the pinned memory at {address:#x} is freed and {words}");
            return Err(driver.fault(codes::INVALID_VALUE, words));
        }
        driver.memory.host.free(address);
        Ok(())
    })
}

/// Pins existing host memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: u32) -> Code {
    call("cuMemHostRegister_v2", Needs::Context, |driver| {
        const READ_ONLY: u32 = 8;
        let device = driver.device_here()?;
        let has = |which| driver.settings.attribute(device, which).is_some_and(|value| value != 0);
        let may_be = flags & READ_ONLY == 0 || has(READ_ONLY_HOST_REGISTER_SUPPORTED);
        if !has(HOST_REGISTER_SUPPORTED) || !may_be {
            return Err(codes::NOT_SUPPORTED);
        }
        if bytes == 0 || !host_memory::is_mapped(address, bytes) {
            return Err(codes::INVALID_VALUE);
        }
        if driver.memory.host.touches(address, bytes) {
            return Err(codes::HOST_MEMORY_ALREADY_REGISTERED);
        }
        if bytes > driver.settings.pinned.saturating_sub(driver.memory.host.bytes) {
            return Err(codes::OUT_OF_MEMORY);
        }
        driver.memory.host.register(address, bytes);
        Ok(())
    })
}

/// Unpins host memory that nothing queued needs.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(address: usize) -> Code {
    call("cuMemHostUnregister", Needs::Context, |driver| {
        let (code, wrong) = match driver.memory.host.registered.get(&address) {
            Some(&bytes) => {
                (codes::INVALID_VALUE, driver.streams.host_memory_needed_by(address, bytes))
            }
            None => (
                codes::HOST_MEMORY_NOT_REGISTERED,
                Some("it is not where registered memory begins".to_owned()),
            ),
        };
        if let Some(words) = wrong {
            let words = format!("the host memory at {address:#x} is unregistered and {words}");
            return Err(driver.fault(code, words));
        }
        driver.memory.host.unregister(address);
        Ok(())
    })
}

/// The device's address of pinned or registered memory, which is the host's.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetDevicePointer_v2(
    address: Out<'_, u64>,
    host: usize,
    flags: u32,
) -> Code {
    call("cuMemHostGetDevicePointer_v2", Needs::Context, |driver| {
        match driver.memory.host.kind(host, 1) {
            HostKind::Pinned(..) | HostKind::Registered(..) if flags == 0 => {
                put(address, host as u64)
            }
            _ => Err(codes::INVALID_VALUE),
        }
    })
}

/// The kind of memory at an address: device memory, or pinned or registered host memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(value: Out<'_, u8>, attribute: i32, address: u64) -> Code {
    const HOST: u32 = 1;
    const DEVICE: u32 = 2;
    call("cuPointerGetAttribute", Needs::Context, |driver| {
        let place = value.ok_or(codes::INVALID_VALUE)?.as_mut_ptr();
        let (kind, base, bytes, context) = match driver.memory.device.find(address, 1) {
            Ok((base, one)) => (DEVICE, base, one.len(), one.context),
            Err(_) => match driver.memory.host.kind(address as usize, 1) {
                HostKind::Pinned(base, bytes) | HostKind::Registered(base, bytes) => {
                    (HOST, base as u64, bytes, driver.here)
                }
                _ => return Err(codes::INVALID_VALUE),
            },
        };
        let device = driver.contexts.device_of(context).unwrap_or(0);
        let (value, size) = match attribute {
            1 => (context, 8),
            2 => (u64::from(kind), 4),
            3 => (address, 8),
            4 if kind == HOST => (address, 8),
            4 => return Err(codes::INVALID_VALUE),
            8 => (0, 4),
            9 => (device as u64, 4),
            11 => (base, 8),
            12 => (bytes as u64, 8),
            _ => return Err(codes::NOT_SUPPORTED),
        };
        let value = value.to_le_bytes();
        // SAFETY: by the interface there is room for what this attribute has as its value.
        unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), place, size) };
        Ok(())
    })
}
