//! Streams. None is ever captured.

use std::cell::Cell;

use super::{Out, fetch};
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
        devices::enter()?;
        fetch(stream, |stream| driver::cuStreamCreateWithPriority(stream, flags, priority))
    })
}

/// Destroys a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamDestroy(stream: u64) -> Code {
    answer(|| {
        devices::enter_for(stream)?;
        driver::cuStreamDestroy_v2(stream)
    })
}

/// The priority of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetPriority(stream: u64, priority: Out<'_, i32>) -> Code {
    answer(|| {
        devices::enter_for(stream)?;
        fetch(priority, |priority| driver::cuStreamGetPriority(stream, priority))
    })
}

/// Whether a stream has nothing to do.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamQuery(stream: u64) -> Code {
    answer(|| {
        devices::enter_for(stream)?;
        driver::cuStreamQuery(stream)
    })
}

/// Waits for all that a stream has to do.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamSynchronize(stream: u64) -> Code {
    answer(|| {
        devices::enter_for(stream)?;
        driver::cuStreamSynchronize(stream)
    })
}

/// Lets what a stream is given from now on wait for what an event was last recorded after.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamWaitEvent(stream: u64, event: u64, flags: u32) -> Code {
    answer(|| {
        devices::enter_for(stream)?;
        driver::cuStreamWaitEvent(stream, event, flags)
    })
}

/// Whether a stream is captured.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamIsCapturing(stream: u64, status: Out<'_, i32>) -> Code {
    answer(|| {
        devices::enter_for(stream)?;
        fetch(status, |status| driver::cuStreamIsCapturing(stream, status))
    })
}

/// The same. The places for more about a capture are left as they are, since there is none.
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

/// Exchanges what a thread says of captures that other threads begin: the mode that it had comes back.
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
