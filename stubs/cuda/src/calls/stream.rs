//! Calls about streams, whose work is done in order once something waits for it.

use std::cell::Cell;

use super::output::{Out, put};
use crate::codes::{self, Code, Done};
use crate::driver::{Driver, Needs, call};
use crate::streams::{Point, Stream, StreamKind, Work};

/// Creates a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: Out<'_, u64>, flags: u32) -> Code {
    call("cuStreamCreate", Needs::Context, |driver| create(driver, stream, flags, 0))
}

/// Creates a stream with a priority, which has no effect here.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(
    stream: Out<'_, u64>,
    flags: u32,
    priority: i32,
) -> Code {
    call("cuStreamCreateWithPriority", Needs::Context, |driver| {
        create(driver, stream, flags, priority)
    })
}

fn create(driver: &mut Driver, stream: Out<'_, u64>, flags: u32, priority: i32) -> Done {
    let place = stream.filter(|_| flags <= 1).ok_or(codes::INVALID_VALUE)?;
    let handle = driver.handles.issue();
    let new = Stream::new(driver.here, flags, priority, StreamKind::Created);
    driver.streams.streams.insert(handle, new);
    place.write(handle);
    Ok(())
}

/// Destroys a stream. Its queued copies are a fault, unless the settings allow them: then a later wait does them.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: u64) -> Code {
    call("cuStreamDestroy_v2", Needs::Handle, |driver| {
        let id = driver.stream(stream)?;
        if id != stream {
            return Err(codes::INVALID_HANDLE);
        }
        let context = about(driver, stream)?.context;
        let left = driver.streams.pending(context, Some(id));
        if left > 0 && driver.settings.destroying_is_a_fault {
            let words = format!("the stream {id:#x} is destroyed with {left} operations to do");
            return Err(driver.fault(codes::INVALID_HANDLE, words));
        }
        if left == 0 {
            driver.wait_for(driver.streams.end_of(id));
            driver.streams.streams.remove(&id);
        } else if let Some(stream) = driver.streams.streams.get_mut(&id) {
            stream.kind = StreamKind::Destroyed;
        }
        Ok(())
    })
}

/// The point at which a stream has done all its work.
fn all(driver: &mut Driver, stream: u64) -> Result<Vec<Point>, Code> {
    let id = driver.stream(stream)?;
    let found = driver.streams.streams.get(&id).ok_or(codes::INVALID_HANDLE)?;
    Ok(match found.kind {
        StreamKind::Legacy => driver.streams.before_legacy(found.context),
        _ => vec![driver.streams.end_of(id)],
    })
}

/// Whether a stream has no work left. If it has, this does one piece of it.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: u64) -> Code {
    call("cuStreamQuery", Needs::Handle, |driver| {
        let all = all(driver, stream)?;
        driver.poll(&all)
    })
}

/// Waits for all work of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: u64) -> Code {
    call("cuStreamSynchronize", Needs::Handle, |driver| {
        all(driver, stream)?.into_iter().for_each(|point| driver.wait_for(point));
        Ok(())
    })
}

/// Exchanges the capture mode of a thread for another. There are no captures here.
#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(mode: Out<'_, i32>) -> Code {
    const MODES: std::ops::Range<i32> = 0..3;
    thread_local! {
        static MODE: Cell<i32> = const { Cell::new(0) };
    }
    call("cuThreadExchangeStreamCaptureMode", Needs::Init, |_| {
        let mode = mode.ok_or(codes::INVALID_VALUE)?;
        // SAFETY: the caller says in it what it wants.
        let wanted = unsafe { mode.assume_init_read() };
        if !MODES.contains(&wanted) {
            return Err(codes::INVALID_VALUE);
        }
        put(Some(mode), MODE.replace(wanted))
    })
}

/// Makes later work of a stream wait for an event's last record.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: u32) -> Code {
    call("cuStreamWaitEvent", Needs::Handle, |driver| {
        let recorded = driver.event(event)?.recorded;
        let stream = driver.stream(stream)?;
        if let Some(point) = recorded.filter(|&point| !driver.streams.is_done(point)) {
            driver.streams.queue(stream, Work::Wait(point));
        }
        Ok(())
    })
}

/// The context of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCtx(stream: u64, context: Out<'_, u64>) -> Code {
    call("cuStreamGetCtx", Needs::Handle, |driver| put(context, about(driver, stream)?.context))
}

/// The flags of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetFlags(stream: u64, flags: Out<'_, u32>) -> Code {
    call("cuStreamGetFlags", Needs::Handle, |driver| put(flags, about(driver, stream)?.flags))
}

/// The priority of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetPriority(stream: u64, priority: Out<'_, i32>) -> Code {
    call("cuStreamGetPriority", Needs::Handle, |driver| {
        put(priority, about(driver, stream)?.priority)
    })
}

/// Whether a stream is being captured, which none is.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: u64, status: Out<'_, i32>) -> Code {
    call("cuStreamIsCapturing", Needs::Handle, |driver| {
        about(driver, stream)?;
        put(status, 0)
    })
}

fn about(driver: &mut Driver, stream: u64) -> Result<&Stream, Code> {
    let id = driver.stream(stream)?;
    driver.streams.streams.get(&id).ok_or(codes::INVALID_HANDLE)
}
