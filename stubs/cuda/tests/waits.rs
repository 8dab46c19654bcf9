//! The work of a stream is done when something waits for it, and only then.

mod support;

use support::*;

const BYTES: usize = 64;

/// A copy from pinned memory to the device, queued: the stream, the pinned memory, the device memory.
fn queued(value: u8) -> (u64, usize, u64) {
    let (stream, from, to) = (stream(), pinned(BYTES, value), device_memory(BYTES));
    ok(cuMemcpyHtoDAsync_v2(to, from, BYTES, stream));
    (stream, from, to)
}

#[test]
fn memory_is_poison_until_a_copy_was_waited_for() {
    in_own_process("memory_is_poison_until_a_copy_was_waited_for", &[], || {
        begin(0);
        let (stream, _, to) = queued(7);
        assert_eq!(peek(to, BYTES), [POISON; BYTES]);
        ok(cuStreamSynchronize(stream));
        assert_eq!(peek(to, BYTES), [7; BYTES]);
    });
}

#[test]
fn a_queued_copy_sees_what_is_written_later() {
    in_own_process("a_queued_copy_sees_what_is_written_later", &[], || {
        begin(0);
        let (stream, from, to) = queued(7);
        write(from, BYTES, 8);
        ok(cuStreamSynchronize(stream));
        assert_eq!(peek(to, BYTES), [8; BYTES]);
    });
}

#[test]
fn a_stream_does_not_wait_for_another() {
    in_own_process("a_stream_does_not_wait_for_another", &[], || {
        begin(0);
        let ((one, _, to_one), (_, _, to_two)) = (queued(1), queued(2));
        ok(cuStreamSynchronize(one));
        assert_eq!([peek(to_one, 1), peek(to_two, 1)], [[1], [POISON]]);
        ok(cuCtxSynchronize());
        assert_eq!(peek(to_two, 1), [2]);
    });
}

#[test]
fn an_event_waits_for_what_it_was_recorded_after() {
    in_own_process("an_event_waits_for_what_it_was_recorded_after", &[], || {
        begin(0);
        let (stream, from, to) = queued(7);
        let (event, after) = (event(), device_memory(BYTES));
        ok(cuEventSynchronize(event)); // Not recorded: nothing to wait for.
        assert_eq!(peek(to, 1), [POISON]);
        ok(cuEventRecord(event, stream));
        ok(cuMemcpyHtoDAsync_v2(after, from, BYTES, stream));
        ok(cuEventSynchronize(event));
        assert_eq!([peek(to, 1), peek(after, 1)], [[7], [POISON]]);
    });
}

#[test]
fn a_synchronous_copy_waits_for_streams_that_block() {
    in_own_process("a_synchronous_copy_waits_for_streams_that_block", &[], || {
        begin(0);
        let (_, from, beside) = queued(7);
        let blocking = out(|stream| cuStreamCreate(stream, 0));
        let [by_blocking, by_default, now] = [(); 3].map(|()| device_memory(BYTES));
        ok(cuMemcpyHtoDAsync_v2(by_blocking, from, BYTES, blocking));
        ok(cuMemcpyHtoDAsync_v2(by_default, from, BYTES, 0));
        assert_eq!([peek(by_blocking, 1), peek(by_default, 1)], [[POISON]; 2]);
        ok(cuMemcpyHtoD_v2(now, from, BYTES));
        assert_eq!([by_blocking, by_default, now].map(|at| peek(at, 1)), [[7]; 3]);
        assert_eq!(peek(beside, 1), [POISON]);
    });
}

#[test]
fn the_default_stream_and_those_that_block_wait_for_each_other() {
    in_own_process("the_default_stream_and_those_that_block_wait_for_each_other", &[], || {
        begin(0);
        let blocking = out(|stream| cuStreamCreate(stream, 0));
        let to = device_memory(4);
        ok(cuMemsetD8Async(to, 1, 4, blocking));
        ok(cuMemsetD8Async(to, 2, 3, 0));
        ok(cuMemsetD8Async(to, 3, 2, blocking));
        ok(cuStreamSynchronize(blocking));
        assert_eq!(peek(to, 4), [3, 3, 2, 1]);
    });
}

#[test]
fn each_query_does_one_thing() {
    in_own_process("each_query_does_one_thing", &[], || {
        begin(0);
        let (stream, from, to) = queued(7);
        let (event, after) = (event(), device_memory(BYTES));
        ok(cuEventRecord(event, stream));
        ok(cuMemcpyHtoDAsync_v2(after, from, BYTES, stream));
        assert_eq!(cuEventQuery(event), codes::NOT_READY); // The copy.
        assert_eq!([peek(to, 1), peek(after, 1)], [[7], [POISON]]);
        assert_eq!(cuEventQuery(event), codes::NOT_READY); // The record.
        ok(cuEventQuery(event));
        assert_eq!(peek(after, 1), [POISON]);
        assert_eq!(cuStreamQuery(stream), codes::NOT_READY); // The copy behind it.
        ok(cuStreamQuery(stream));
        assert_eq!(peek(after, 1), [7]);
    });
}

#[test]
fn a_stream_waits_for_the_event_of_another() {
    in_own_process("a_stream_waits_for_the_event_of_another", &[], || {
        begin(0);
        let ((one, from, to), two) = (queued(7), stream());
        let (event, twice) = (event(), device_memory(BYTES));
        ok(cuEventRecord(event, one));
        ok(cuStreamWaitEvent(two, event, 0));
        ok(cuMemcpyDtoDAsync_v2(twice, to, BYTES, two));
        // Work behind the event is not waited for.
        let behind = device_memory(BYTES);
        ok(cuMemcpyHtoDAsync_v2(behind, from, BYTES, one));
        ok(cuStreamSynchronize(two));
        assert_eq!([to, twice, behind].map(|at| peek(at, 1)), [[7], [7], [POISON]]);
    });
}

#[test]
fn a_query_goes_on_with_what_is_waited_for() {
    in_own_process("a_query_goes_on_with_what_is_waited_for", &[], || {
        begin(0);
        let ((one, _, to), two) = (queued(7), stream());
        let event = event();
        ok(cuEventRecord(event, one));
        ok(cuStreamWaitEvent(two, event, 0));
        ok(cuMemsetD8Async(to, 8, 1, two));
        let polls = (1..10).find(|_| cuStreamQuery(two) == codes::SUCCESS);
        assert_eq!(polls, Some(5)); // The copy, the record, the wait, the memset; and then none.
        assert_eq!(peek(to, 2), [8, 7]);
    });
}

#[test]
fn a_copy_from_the_device_is_late_too() {
    in_own_process("a_copy_from_the_device_is_late_too", &[], || {
        begin(0);
        let (stream, from, to) = queued(7);
        let back = pinned(BYTES, 0);
        ok(cuMemcpyDtoHAsync_v2(back, to, BYTES, stream));
        write(from, BYTES, 9);
        assert_eq!(read(back, BYTES), [0; BYTES]);
        ok(cuStreamSynchronize(stream));
        assert_eq!(read(back, BYTES), [9; BYTES]);
    });
}

#[test]
fn pageable_memory_is_copied_when_it_is_given() {
    in_own_process("pageable_memory_is_copied_when_it_is_given", &[], || {
        begin(0);
        let (stream, to) = (stream(), device_memory(BYTES));
        let mut from = [7_u8; BYTES];
        ok(cuMemcpyHtoDAsync_v2(to, from.as_ptr() as usize, BYTES, stream));
        from.fill(8);
        assert_eq!(peek(to, 1), [POISON]);
        let mut back = vec![0_u8; BYTES];
        ok(cuMemcpyDtoHAsync_v2(back.as_mut_ptr() as usize, to, BYTES, stream));
        assert_eq!(back, [7; BYTES]);
    });
}

#[test]
fn registered_memory_is_as_good_as_pinned() {
    in_own_process("registered_memory_is_as_good_as_pinned", &[], || {
        begin(0);
        let (stream, to, from) = (stream(), device_memory(BYTES), vec![7_u8; BYTES]);
        let address = from.as_ptr() as usize;
        ok(cuMemHostRegister_v2(address, BYTES, 0));
        let again = codes::HOST_MEMORY_ALREADY_REGISTERED;
        assert_eq!(cuMemHostRegister_v2(address + 1, 1, 0), again);
        ok(cuMemcpyHtoDAsync_v2(to, address, BYTES, stream));
        write(address, BYTES, 8);
        ok(cuStreamSynchronize(stream));
        assert_eq!(peek(to, BYTES), [8; BYTES]);
        ok(cuMemHostUnregister(address));
    });
}
