//! Calls about events: points in the work of streams that a program can wait for.

use super::{Out, forward};
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
        devices::ensure_context()?;
        forward(event, |event| driver::cuEventCreate(event, flags))
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
        forward(milliseconds, |milliseconds| driver::cuEventElapsedTime(milliseconds, start, end))
    })
}

/// Whether the work before an event's record is done.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventQuery(event: u64) -> Code {
    answer(|| {
        devices::ready()?;
        driver::cuEventQuery(event)
    })
}

/// Records the work that a stream has been given.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecord(event: u64, stream: u64) -> Code {
    cudaEventRecordWithFlags(event, stream, 0)
}

/// As `cudaEventRecord`, with flags.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecordWithFlags(event: u64, stream: u64, flags: u32) -> Code {
    answer(|| {
        devices::ensure_context_for(stream)?;
        driver::cuEventRecordWithFlags(event, stream, flags)
    })
}

/// Waits for the work before an event's record.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventSynchronize(event: u64) -> Code {
    answer(|| {
        devices::ready()?;
        driver::cuEventSynchronize(event)
    })
}
