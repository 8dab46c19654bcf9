//! Calls about events: points in the work of streams that a program can wait for.

use super::output::{Out, put};
use crate::codes::{self, Code, Done};
use crate::driver::{Driver, Needs, call};
use crate::streams::{Event, Work};

/// The flag of an event without a time.
const DISABLE_TIMING: u32 = 2;

/// Creates an event.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: Out<'_, u64>, flags: u32) -> Code {
    call("cuEventCreate", Needs::Context, |driver| {
        let place = event.filter(|_| flags < 8).ok_or(codes::INVALID_VALUE)?;
        let handle = driver.handles.issue();
        let new = Event { context: driver.here, flags, ..Event::default() };
        driver.streams.events.insert(handle, new);
        place.write(handle);
        Ok(())
    })
}

/// Destroys an event. A queued record of it is a fault, unless the settings allow it.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: u64) -> Code {
    call("cuEventDestroy_v2", Needs::Handle, |driver| {
        driver.event(event)?;
        let needs = |work: &Work| matches!(work, Work::Record { event: of } if *of == event);
        let who = driver.streams.needed_by(needs);
        if let Some(who) = who.filter(|_| driver.settings.destroying_is_a_fault) {
            let words = format!("the event {event:#x} is destroyed and {who}");
            return Err(driver.fault(codes::INVALID_HANDLE, words));
        }
        driver.streams.events.remove(&event);
        Ok(())
    })
}

/// Records the work that a stream has been given.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: u64, stream: u64) -> Code {
    call("cuEventRecord", Needs::Handle, |driver| record(driver, event, stream))
}

/// As `cuEventRecord`, with flags for captured streams.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(event: u64, stream: u64, _flags: u32) -> Code {
    call("cuEventRecordWithFlags", Needs::Handle, |driver| record(driver, event, stream))
}

fn record(driver: &mut Driver, event: u64, stream: u64) -> Done {
    let context = driver.event(event)?.context;
    let id = driver.stream(stream)?;
    if driver.streams.streams.get(&id).is_none_or(|stream| stream.context != context) {
        let words = format!("the event {event:#x} and the stream {stream:#x} differ in context");
        return Err(driver.fault(codes::INVALID_HANDLE, words));
    }
    let point = driver.streams.queue(id, Work::Record { event });
    let event = driver.event(event)?;
    (event.recorded, event.time) = (Some(point), None);
    Ok(())
}

/// Whether the work before an event's record is done. If not, this does one piece of it.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: u64) -> Code {
    call("cuEventQuery", Needs::Handle, |driver| {
        let recorded = driver.event(event)?.recorded;
        driver.poll(recorded.as_slice())
    })
}

/// Waits for the work before an event's record.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: u64) -> Code {
    call("cuEventSynchronize", Needs::Handle, |driver| {
        if let Some(point) = driver.event(event)?.recorded {
            driver.wait_for(point);
        }
        Ok(())
    })
}

/// The milliseconds between two events.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(time: Out<'_, f32>, start: u64, end: u64) -> Code {
    call("cuEventElapsedTime", Needs::Handle, |driver| elapsed(driver, time, start, end))
}

/// The milliseconds between two events, by its newer name.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(time: Out<'_, f32>, start: u64, end: u64) -> Code {
    call("cuEventElapsedTime_v2", Needs::Handle, |driver| elapsed(driver, time, start, end))
}

fn elapsed(driver: &mut Driver, time: Out<'_, f32>, start: u64, end: u64) -> Done {
    let mut times = [None; 2];
    for (found, handle) in times.iter_mut().zip([start, end]) {
        let event = driver.event(handle)?;
        if event.recorded.is_none() || event.flags & DISABLE_TIMING != 0 {
            return Err(codes::INVALID_HANDLE);
        }
        *found = event.time;
    }
    let [Some(start), Some(end)] = times else {
        return Err(codes::NOT_READY);
    };
    put(time, end.saturating_duration_since(start).as_secs_f32() * 1e3)
}
