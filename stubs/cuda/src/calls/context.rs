//! Calls about contexts: the primary one of each device, and the current one of a thread.

use super::output::{Out, put};
use crate::codes::{self, Code, Done};
use crate::contexts;
use crate::driver::{Driver, Needs, call};

/// Retains the primary context of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, u64>, device: i32) -> Code {
    call("cuDevicePrimaryCtxRetain", Needs::Init, |driver| {
        let device = driver.contexts.device(device)?;
        let place = context.ok_or(codes::INVALID_VALUE)?;
        place.write(driver.contexts.retain(device, &mut driver.handles));
        Ok(())
    })
}

/// Releases the primary context of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> Code {
    call("cuDevicePrimaryCtxRelease_v2", Needs::Init, |driver| {
        let device = driver.contexts.device(device)?;
        driver.release(device)
    })
}

/// Whether the primary context of a device is retained, and its flags.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: i32,
    flags: Out<'_, u32>,
    active: Out<'_, i32>,
) -> Code {
    call("cuDevicePrimaryCtxGetState", Needs::Init, |driver| {
        let device = driver.contexts.device(device)?;
        let primary = &driver.contexts.primary[device];
        put(flags, primary.flags)?;
        put(active, i32::from(primary.retained > 0))
    })
}

/// Sets the flags of the primary context of a device.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) -> Code {
    call("cuDevicePrimaryCtxSetFlags_v2", Needs::Init, |driver| {
        let device = driver.contexts.device(device)?;
        driver.contexts.primary[device].flags = flags;
        Ok(())
    })
}

/// The context that is current in this thread; null if none is.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: Out<'_, u64>) -> Code {
    call("cuCtxGetCurrent", Needs::Init, |driver| put(context, driver.here))
}

/// Replaces the current context; null leaves none.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: u64) -> Code {
    call("cuCtxSetCurrent", Needs::Init, |driver| {
        if context != 0 {
            check(driver, context)?;
        }
        contexts::set_current(context);
        Ok(())
    })
}

/// Makes a context current until it is popped.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: u64) -> Code {
    call("cuCtxPushCurrent_v2", Needs::Init, |driver| {
        check(driver, context)?;
        contexts::push(context);
        Ok(())
    })
}

/// Pops the current context, and returns it where a place for it is given.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: Out<'_, u64>) -> Code {
    call("cuCtxPopCurrent_v2", Needs::Context, |_| {
        let popped = contexts::pop().ok_or(codes::INVALID_CONTEXT)?;
        context.map_or(Ok(()), |place| put(Some(place), popped))
    })
}

fn check(driver: &mut Driver, context: u64) -> Done {
    if driver.contexts.device_of(context).is_some() {
        return Ok(());
    }
    let words = driver.handles.describe_missing(context, "a context");
    Err(driver.fault(codes::INVALID_CONTEXT, words))
}

/// The device of the current context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: Out<'_, i32>) -> Code {
    call("cuCtxGetDevice", Needs::Context, |driver| put(device, driver.device_here()? as i32))
}

/// The flags of the current context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetFlags(flags: Out<'_, u32>) -> Code {
    call("cuCtxGetFlags", Needs::Context, |driver| {
        let device = driver.device_here()?;
        put(flags, driver.contexts.primary[device].flags)
    })
}

/// Sets the flags of the current context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetFlags(flags: u32) -> Code {
    call("cuCtxSetFlags", Needs::Context, |driver| {
        let device = driver.device_here()?;
        driver.contexts.primary[device].flags = flags;
        Ok(())
    })
}

/// The version of the interface of a context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetApiVersion(context: u64, version: Out<'_, u32>) -> Code {
    call("cuCtxGetApiVersion", Needs::Init, |driver| {
        if context != 0 {
            check(driver, context)?;
        }
        put(version, 3020)
    })
}

/// The least and the greatest priority of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(least: Out<'_, i32>, greatest: Out<'_, i32>) -> Code {
    call("cuCtxGetStreamPriorityRange", Needs::Context, |_| {
        least.map_or(Ok(()), |place| put(Some(place), 0))?;
        greatest.map_or(Ok(()), |place| put(Some(place), -5))
    })
}

/// Waits for all work of the current context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Code {
    call("cuCtxSynchronize", Needs::Context, |driver| {
        driver.finish(driver.here);
        Ok(())
    })
}
