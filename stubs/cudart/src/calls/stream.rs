//! Calls about streams, none of which is ever captured.

use std::cell::Cell;

use super::{Out, forward};
use crate::answers::answer;
use crate::codes::{self, Code};
use crate::{devices, driver};

/// Creates a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreate(stream: Out<'_, u64>) -> Code {
    cudaStreamCreateWithPriority(stream, 0, 0)
}

/// Creates a stream with flags.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreateWithFlags(stream: Out<'_, u64>, flags: u32) -> Code {
    cudaStreamCreateWithPriority(stream, flags, 0)
}

/// Creates a stream with flags and a priority.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreateWithPriority(
    stream: Out<'_, u64>,
    flags: u32,
    priority: i32,
) -> Code {
    answer(|| {
        devices::ensure_context()?;
        forward(stream, |stream| driver::cuStreamCreateWithPriority(stream, flags, priority))
    })
}

/// Destroys a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamDestroy(stream: u64) -> Code {
    answer(|| {
        devices::ensure_context_for(stream)?;
        driver::cuStreamDestroy_v2(stream)
    })
}

/// The priority of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetPriority(stream: u64, priority: Out<'_, i32>) -> Code {
    answer(|| {
        devices::ensure_context_for(stream)?;
        forward(priority, |priority| driver::cuStreamGetPriority(stream, priority))
    })
}

/// Whether a stream has no work left.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamQuery(stream: u64) -> Code {
    answer(|| {
        devices::ensure_context_for(stream)?;
        driver::cuStreamQuery(stream)
    })
}

/// Waits for all work of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamSynchronize(stream: u64) -> Code {
    answer(|| {
        devices::ensure_context_for(stream)?;
        driver::cuStreamSynchronize(stream)
    })
}

/// Makes later work of a stream wait for an event's last record.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamWaitEvent(stream: u64, event: u64, flags: u32) -> Code {
    answer(|| {
        devices::ensure_context_for(stream)?;
        driver::cuStreamWaitEvent(stream, event, flags)
    })
}

/// Whether a stream is being captured.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamIsCapturing(stream: u64, status: Out<'_, i32>) -> Code {
    answer(|| {
        devices::ensure_context_for(stream)?;
        forward(status, |status| driver::cuStreamIsCapturing(stream, status))
    })
}

/// As `cudaStreamIsCapturing`. The outputs about a capture stay as they are, since there is none.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetCaptureInfo(
    stream: u64,
    status: Out<'_, i32>,
    _id: Out<'_, u64>,
    _graph: Out<'_, u64>,
    _dependencies: Out<'_, u64>,
    _edges: Out<'_, u64>,
    _count: Out<'_, usize>,
) -> Code {
    cudaStreamIsCapturing(stream, status)
}

/// Exchanges the capture mode of a thread for another.
#[unsafe(no_mangle)]
pub extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: Option<&mut i32>) -> Code {
    const MODES: std::ops::Range<i32> = 0..3;
    thread_local! {
        static MODE: Cell<i32> = const { Cell::new(0) };
    }
    answer(|| {
        let mode = mode.filter(|mode| MODES.contains(mode)).ok_or(codes::INVALID_VALUE)?;
        *mode = MODE.replace(*mode);
        Ok(())
    })
}
