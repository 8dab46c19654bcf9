//! Events: points in the work of streams that can be waited for.

use super::{Out, fetch};
use crate::answers::answer;
use crate::codes::Code;
use crate::{devices, driver};

/// Creates an event.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreate(event: Out<'_, u64>) -> Code {
    cudaEventCreateWithFlags(event, 0)
}

/// Creates an event with flags.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreateWithFlags(event: Out<'_, u64>, flags: u32) -> Code {
    answer(|| {
        devices::enter()?;
        fetch(event, |event| driver::cuEventCreate(event, flags))
    })
}

/// Destroys an event.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventDestroy(event: u64) -> Code {
    answer(|| {
        devices::ready()?;
        driver::cuEventDestroy_v2(event)
    })
}

/// The milliseconds between two events.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventElapsedTime(milliseconds: Out<'_, f32>, start: u64, end: u64) -> Code {
    answer(|| {
        devices::ready()?;
        fetch(milliseconds, |milliseconds| driver::cuEventElapsedTime(milliseconds, start, end))
    })
}

/// Whether all is done that an event was recorded after.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventQuery(event: u64) -> Code {
    answer(|| {
        devices::ready()?;
        driver::cuEventQuery(event)
    })
}

/// Records what a stream was given until now.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecord(event: u64, stream: u64) -> Code {
    cudaEventRecordWithFlags(event, stream, 0)
}

/// The same, with flags.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecordWithFlags(event: u64, stream: u64, flags: u32) -> Code {
    answer(|| {
        devices::enter_for(stream)?;
        driver::cuEventRecordWithFlags(event, stream, flags)
    })
}

/// Waits until all is done that an event was recorded after.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventSynchronize(event: u64) -> Code {
    answer(|| {
        devices::ready()?;
        driver::cuEventSynchronize(event)
    })
}
