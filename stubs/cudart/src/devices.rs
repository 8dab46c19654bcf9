//! Which device a thread works with, and its primary context. In: a device, or a call that needs one. Out: a
//! context that is current in the thread.
//!
//! The context that is current in the driver decides, whoever made it so. Only where there is none, the
//! device that the thread chose last does, and that is 0 at first.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::codes::{self, Code, Done};
use crate::driver;

/// The version of CUDA that the runtime is of, and the least that its driver may have.
pub const VERSION: i32 = 13020;
const LEAST_OF_DRIVER: i32 = 13000;

thread_local! {
    static CHOSEN: Cell<i32> = const { Cell::new(0) };
}

/// Makes the driver ready, once. As with the real runtime, there is no second try.
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

/// The primary context of a device, which is retained once and until the process ends.
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

/// Sees to it that a context is current in the thread.
pub fn enter() -> Done {
    ready()?;
    match current()? {
        0 => driver::cuCtxSetCurrent(context_of(CHOSEN.get())?),
        _ => Ok(()),
    }
}

/// The same, for a call that names a stream: only those of the context itself need one to be current.
pub fn enter_for(stream: u64) -> Done {
    const LAST_OF_THE_CONTEXT: u64 = 2;
    if stream <= LAST_OF_THE_CONTEXT { enter() } else { ready() }
}

fn current() -> Result<u64, Code> {
    let mut context = 0;
    driver::cuCtxGetCurrent(&mut context)?;
    Ok(context)
}

/// Chooses the device of the thread, and makes its context current.
pub fn choose(device: i32) -> Done {
    known(device)?;
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

/// The number of a device that is there.
pub fn known(device: i32) -> Result<i32, Code> {
    ready()?;
    let mut found = 0;
    driver::cuDeviceGet(&mut found, device)?;
    Ok(found)
}

/// Does something with a context that need not be the current one.
pub fn within(context: u64, body: impl FnOnce() -> Done) -> Done {
    driver::cuCtxPushCurrent_v2(context)?;
    let done = body();
    let mut popped = 0;
    driver::cuCtxPopCurrent_v2(&mut popped)?;
    done
}
