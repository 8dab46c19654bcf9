//! What the real driver leaves undefined, or reports by an error that a caller can overlook, ends the process here with
//! a message.

mod support;

use support::*;

const BYTES: usize = 64;

fn queued() -> (u64, usize, u64) {
    let (stream, from, to) = (stream(), pinned(BYTES, 7), device_memory(BYTES));
    ok(cuMemcpyHtoDAsync_v2(to, from, BYTES, stream));
    (stream, from, to)
}

#[test]
fn writing_beside_memory_is_found_when_it_is_freed() {
    let test = "writing_beside_memory_is_found_when_it_is_freed";
    faults(test, &[], "cuMemFree_v2: somebody wrote beside the 64 bytes", || {
        begin(0);
        let memory = device_memory(BYTES);
        ok(stub_cuda_poke(memory, -1, 0));
        cuMemFree_v2(memory);
    });
}

#[test]
fn writing_beside_memory_is_found_at_the_end() {
    let test = "writing_beside_memory_is_found_at_the_end";
    faults(test, &[], "the end of the process: somebody wrote beside", || {
        begin(0);
        ok(stub_cuda_poke(device_memory(BYTES), BYTES as isize, 0));
    });
}

#[test]
fn writing_inside_memory_is_no_fault() {
    in_own_process("writing_inside_memory_is_no_fault", &[], || {
        begin(0);
        let memory = device_memory(BYTES);
        ok(stub_cuda_poke(memory, 0, 1));
        ok(stub_cuda_poke(memory, BYTES as isize - 1, 1));
        ok(cuMemFree_v2(memory));
    });
}

#[test]
fn freed_device_memory_is_not_used() {
    let words = "lies in 64 bytes of device memory";
    faults("freed_device_memory_is_not_used", &[], words, || {
        begin(0);
        let (from, memory) = (pinned(BYTES, 7), device_memory(BYTES));
        ok(cuMemFree_v2(memory));
        device_memory(BYTES); // No address comes back.
        cuMemcpyHtoD_v2(memory + 8, from, 8);
    });
}

#[test]
fn device_memory_is_freed_once() {
    faults("device_memory_is_freed_once", &[], "that were freed", || {
        begin(0);
        let memory = device_memory(BYTES);
        ok(cuMemFree_v2(memory));
        cuMemFree_v2(memory);
    });
}

#[test]
fn device_memory_that_a_stream_gives_back_is_not_used() {
    let test = "device_memory_that_a_stream_gives_back_is_not_used";
    faults(test, &[], "was given back by cuMemFreeAsync", || {
        begin(0);
        let (stream, _, to) = queued();
        ok(cuMemFreeAsync(to, stream));
        cuMemsetD8Async(to, 0, BYTES, stream);
    });
}

#[test]
fn a_copy_does_not_leave_its_memory() {
    faults("a_copy_does_not_leave_its_memory", &[], "16 bytes at", || {
        begin(0);
        let (stream, from, to) = queued();
        ok(cuMemcpyHtoDAsync_v2(to + 48, from, 16, stream));
        cuMemcpyHtoDAsync_v2(to + 49, from, 16, stream);
    });
}

#[test]
fn a_copy_does_not_leave_pinned_memory() {
    faults("a_copy_does_not_leave_pinned_memory", &[], "bytes of pinned memory", || {
        begin(0);
        let (stream, from, to) = queued();
        ok(cuMemcpyHtoDAsync_v2(to, from + 48, 16, stream));
        cuMemcpyHtoDAsync_v2(to, from + 49, 16, stream);
    });
}

#[test]
fn freed_pinned_memory_is_not_used() {
    faults("freed_pinned_memory_is_not_used", &[], "of pinned memory at", || {
        begin(0);
        let (stream, from, to) = queued();
        ok(cuStreamSynchronize(stream));
        ok(cuMemFreeHost(from));
        cuMemcpyHtoDAsync_v2(to, from, BYTES, stream);
    });
}

#[test]
fn pinned_memory_is_freed_once() {
    faults("pinned_memory_is_freed_once", &[], "is freed and it was freed before", || {
        begin(0);
        let memory = pinned(BYTES, 0);
        ok(cuMemFreeHost(memory));
        cuMemFreeHost(memory);
    });
}

#[test]
fn queued_work_keeps_device_memory() {
    faults("queued_work_keeps_device_memory", &[], "is freed and a copy that is queued", || {
        begin(0);
        cuMemFree_v2(queued().2);
    });
}

#[test]
fn queued_work_of_another_stream_keeps_device_memory() {
    let test = "queued_work_of_another_stream_keeps_device_memory";
    faults(test, &[], "is freed and a copy that is queued", || {
        begin(0);
        let ((_, _, to), other) = (queued(), stream());
        ok(cuMemFreeAsync(to, other));
        cuStreamSynchronize(other);
    });
}

#[test]
fn queued_work_keeps_pinned_memory() {
    faults("queued_work_keeps_pinned_memory", &[], "is freed and a copy that is queued", || {
        begin(0);
        cuMemFreeHost(queued().1);
    });
}

#[test]
fn queued_work_keeps_registered_memory() {
    let words = "is unregistered and a copy that is queued";
    faults("queued_work_keeps_registered_memory", &[], words, || {
        begin(0);
        let (stream, to, from) = (stream(), device_memory(BYTES), vec![7_u8; BYTES]);
        let address = from.as_ptr() as usize;
        ok(cuMemHostRegister_v2(address, BYTES, 0));
        ok(cuMemcpyHtoDAsync_v2(to, address + 8, 8, stream));
        cuMemHostUnregister(address);
    });
}

#[test]
fn queued_work_keeps_its_stream() {
    faults("queued_work_keeps_its_stream", &[], "is destroyed with 1 operations to do", || {
        begin(0);
        cuStreamDestroy_v2(queued().0);
    });
}

#[test]
fn a_queued_record_keeps_its_event() {
    faults("a_queued_record_keeps_its_event", &[], "is destroyed and a record", || {
        begin(0);
        let event = event();
        ok(cuEventRecord(event, queued().0));
        cuEventDestroy_v2(event);
    });
}

#[test]
fn queued_work_keeps_its_context() {
    faults(
        "queued_work_keeps_its_context",
        &[],
        "released for good with 1 operations to do",
        || {
            begin(0);
            queued();
            cuDevicePrimaryCtxRelease_v2(0);
        },
    );
}

#[test]
fn a_queued_free_harms_nobody() {
    in_own_process("a_queued_free_harms_nobody", &[], || {
        begin(0);
        let stream = stream();
        ok(cuMemFreeAsync(device_memory(BYTES), stream));
        ok(cuStreamDestroy_v2(stream));
        let memory = device_memory(BYTES);
        ok(cuMemFreeAsync(memory, 0));
        ok(cuDevicePrimaryCtxRelease_v2(0));
        let mut byte = 0;
        // SAFETY: there is room for one byte.
        let gone = unsafe { stub_cuda_peek(&mut byte, memory, 1) };
        assert_eq!(gone, codes::INVALID_VALUE);
    });
}

#[test]
fn destroying_early_may_be_allowed() {
    in_own_process("destroying_early_may_be_allowed", &[("DESTROY", "allow")], || {
        begin(0);
        let ((one, _, to), event, two) = (queued(), event(), stream());
        ok(cuEventRecord(event, one));
        ok(cuStreamWaitEvent(two, event, 0));
        ok(cuEventDestroy_v2(event));
        ok(cuStreamDestroy_v2(one));
        assert_eq!(peek(to, 1), [POISON]);
        ok(cuStreamSynchronize(two));
        assert_eq!(peek(to, 1), [7]);
    });
}

#[test]
fn a_destroyed_stream_is_not_used() {
    faults("a_destroyed_stream_is_not_used", &[], "is no longer a stream", || {
        begin(0);
        let stream = stream();
        ok(cuStreamDestroy_v2(stream));
        cuStreamSynchronize(stream);
    });
}

#[test]
fn a_context_must_be_current() {
    faults("a_context_must_be_current", &[], "no context is current in this thread", || {
        begin(0);
        std::thread::scope(|threads| {
            threads.spawn(|| refused(|address| cuMemAlloc_v2(address, BYTES)));
        });
    });
}

#[test]
fn the_current_context_must_be_there() {
    faults("the_current_context_must_be_there", &[], "was released for good", || {
        begin(0);
        ok(cuDevicePrimaryCtxRelease_v2(0));
        refused(|address| cuMemAlloc_v2(address, BYTES));
    });
}

#[test]
fn the_current_context_must_be_the_right_one() {
    let words = "is not of the current context";
    faults("the_current_context_must_be_the_right_one", &[("DEVICES", "2")], words, || {
        begin(1);
        let (from, other) = (pinned(BYTES, 0), device_memory(BYTES));
        begin(0);
        cuMemcpyHtoDAsync_v2(other, from, BYTES, stream());
    });
}

#[test]
fn the_host_cannot_touch_device_memory() {
    let test = "the_host_cannot_touch_device_memory";
    let body = || {
        begin(0);
        write(device_memory(BYTES) as usize, 1, 0);
    };
    if let Some(output) = in_child(test, |_| {}, body) {
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
    }
}

#[test]
fn copying_from_pageable_memory_may_be_a_fault() {
    let test = "copying_from_pageable_memory_may_be_a_fault";
    faults(test, &[("PAGEABLE", "fault")], "has a host side that is not pinned", || {
        begin(0);
        let from = [0_u8; BYTES];
        cuMemcpyHtoDAsync_v2(device_memory(BYTES), from.as_ptr() as usize, BYTES, stream());
    });
}

#[test]
fn a_fault_may_be_an_answer() {
    in_own_process("a_fault_may_be_an_answer", &[("FAULTS", "count")], || {
        begin(0);
        let (stream, _, to) = queued();
        assert_eq!(cuMemFree_v2(to), codes::INVALID_VALUE);
        assert_eq!(cuMemcpyHtoD_v2(to, 16, BYTES + 1), codes::INVALID_VALUE);
        assert_eq!(stub_cuda_faults(), 2);
        // The refused calls have changed nothing.
        ok(cuStreamSynchronize(stream));
        assert_eq!(peek(to, 1), [7]);
        ok(cuMemFree_v2(to));
    });
}

#[test]
fn a_fault_in_queued_work_is_told_to_who_waits() {
    let test = "a_fault_in_queued_work_is_told_to_who_waits";
    in_own_process(test, &[("FAULTS", "count")], || {
        begin(0);
        let ((_, _, to), other) = (queued(), stream());
        ok(cuMemFreeAsync(to, other));
        assert_eq!(stub_cuda_faults(), 0);
        assert_eq!(cuStreamSynchronize(other), codes::ILLEGAL_ADDRESS);
        assert_eq!(stub_cuda_faults(), 1);
        assert_eq!(cuCtxSynchronize(), codes::ILLEGAL_ADDRESS);
    });
}
