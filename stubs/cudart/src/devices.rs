//! The device of a thread, and its primary context.
//!
//! It is the device of the driver's current context. Without a current context it is the device that the thread chose
//! last, and 0 at first.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::codes::{self, Code, Done};
use crate::driver;

/// The runtime's version of CUDA, and the oldest that its driver may have.
pub const VERSION: i32 = 13020;
const LEAST_OF_DRIVER: i32 = 13000;

thread_local! {
    static CHOSEN: Cell<i32> = const { Cell::new(0) };
}

/// Initializes the driver, once. As with the real runtime, there is no second try.
pub fn ready() -> Done {
    static READY: OnceLock<Done> = OnceLock::new();
    *READY.get_or_init(|| {
        let mut version = 0;
        driver::cuDriverGetVersion(&mut version)?;
        match version < LEAST_OF_DRIVER {
            true => Err(codes::INSUFFICIENT_DRIVER),
            false => driver::cuInit(0),
        }
    })
}

/// The primary context of a device, retained once until the process ends.
pub fn context_of(device: i32) -> Result<u64, Code> {
    static RETAINED: Mutex<BTreeMap<i32, u64>> = Mutex::new(BTreeMap::new());
    let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&context) = retained.get(&device) {
        return Ok(context);
    }
    let mut context = 0;
    driver::cuDevicePrimaryCtxRetain(&mut context, device)?;
    retained.insert(device, context);
    Ok(context)
}

/// Ensures that a context is current in the thread.
pub fn ensure_context() -> Done {
    ready()?;
    match current()? {
        0 => driver::cuCtxSetCurrent(context_of(CHOSEN.get())?),
        _ => Ok(()),
    }
}

/// Ensures a context for a call that names a stream: only the context's own streams need one.
pub fn ensure_context_for(stream: u64) -> Done {
    const LAST_OF_THE_CONTEXT: u64 = 2;
    if stream <= LAST_OF_THE_CONTEXT { ensure_context() } else { ready() }
}

fn current() -> Result<u64, Code> {
    let mut context = 0;
    driver::cuCtxGetCurrent(&mut context)?;
    Ok(context)
}

/// Chooses the device of the thread, and makes its context current.
pub fn choose(device: i32) -> Done {
    existing(device)?;
    driver::cuCtxSetCurrent(context_of(device)?)?;
    CHOSEN.set(device);
    Ok(())
}

/// The device of the thread.
pub fn chosen() -> Result<i32, Code> {
    ready()?;
    let mut device = CHOSEN.get();
    if current()? != 0 {
        driver::cuCtxGetDevice(&mut device)?;
    }
    Ok(device)
}

/// The number of an existing device.
pub fn existing(device: i32) -> Result<i32, Code> {
    ready()?;
    let mut found = 0;
    driver::cuDeviceGet(&mut found, device)?;
    Ok(found)
}

/// Calls a function with a context that need not be the current one.
pub fn with_context(context: u64, body: impl FnOnce() -> Done) -> Done {
    driver::cuCtxPushCurrent_v2(context)?;
    let done = body();
    let mut popped = 0;
    driver::cuCtxPopCurrent_v2(&mut popped)?;
    done
}
