//! Calls fail when a test says so, and only then.

mod support;

use std::mem::MaybeUninit;

use support::*;

const BYTES: usize = 64;

#[test]
fn the_call_that_the_environment_names_fails() {
    let settings = [("FAIL", "cuMemHostAlloc:2=2,cuMemAlloc_v2:1=999")];
    in_own_process("the_call_that_the_environment_names_fails", &settings, || {
        begin(0);
        let ask = || refused(|address| cuMemHostAlloc(address, BYTES, 0));
        assert_eq!([ask(), ask(), ask()], [0, codes::OUT_OF_MEMORY, 0]);
        assert_eq!(refused(|address| cuMemAlloc_v2(address, BYTES)), codes::UNKNOWN);
        device_memory(BYTES);
    });
}

#[test]
fn a_test_makes_a_call_fail() {
    in_own_process("a_test_makes_a_call_fail", &[], || {
        begin(0);
        let (name, none) = (c"cuStreamSynchronize", c"cuStreamSynchronise");
        let of = |name: &'static std::ffi::CStr| {
            // SAFETY: a text has a first byte, be it its zero.
            Some(unsafe { &*name.as_ptr() })
        };
        let stream = stream();
        ok(cuStreamSynchronize(stream));
        ok(stub_cuda_fail(of(name), 2, codes::LAUNCH_FAILED));
        let answers = [(); 3].map(|()| cuStreamSynchronize(stream));
        assert_eq!(answers, [0, codes::LAUNCH_FAILED, codes::LAUNCH_FAILED]);
        assert_eq!(stub_cuda_fail(of(none), 1, 1), codes::INVALID_VALUE);
    });
}

#[test]
fn an_error_that_spoils_the_context_stays() {
    let settings = [("FAIL", "cuMemcpyHtoDAsync_v2:2=700")];
    in_own_process("an_error_that_spoils_the_context_stays", &settings, || {
        begin(0);
        let (stream, from, to) = (stream(), pinned(BYTES, 7), device_memory(BYTES));
        let copy = || cuMemcpyHtoDAsync_v2(to, from, BYTES, stream);
        assert_eq!([copy(), copy(), copy()], [0, 700, 700]);
        let others = [
            cuStreamSynchronize(stream),
            cuStreamDestroy_v2(stream),
            cuMemFree_v2(to),
            cuMemFreeHost(from),
            refused(|event| cuEventCreate(event, 0)),
        ];
        assert_eq!(others, [codes::ILLEGAL_ADDRESS; 5]);
        assert_eq!(peek(to, 1), [POISON]);
        // Calls that need no context still succeed.
        assert_eq!(out(|count| cuDeviceGetCount(count)), 1);
        assert_eq!(stub_cuda_faults(), 0);
    });
}

#[test]
fn memory_comes_to_an_end() {
    let settings = [("MEMORY", "1000"), ("PINNED", "100")];
    in_own_process("memory_comes_to_an_end", &settings, || {
        begin(0);
        let first = device_memory(600);
        let info = || {
            let (mut free, mut total) = (MaybeUninit::new(0), MaybeUninit::new(0));
            ok(cuMemGetInfo_v2(Some(&mut free), Some(&mut total)));
            // SAFETY: both had a value from the beginning.
            unsafe { (free.assume_init(), total.assume_init()) }
        };
        assert_eq!(info(), (400, 1000));
        assert_eq!(refused(|address| cuMemAlloc_v2(address, 401)), codes::OUT_OF_MEMORY);
        ok(cuMemFree_v2(first));
        assert_eq!(info(), (1000, 1000));
        let first = pinned(60, 0);
        assert_eq!(refused(|address| cuMemHostAlloc(address, 41, 0)), codes::OUT_OF_MEMORY);
        ok(cuMemFreeHost(first));
        pinned(100, 0);
    });
}

#[test]
fn nothing_answers_before_cuinit() {
    in_own_process("nothing_answers_before_cuinit", &[], || {
        assert_eq!(refused(|count| cuDeviceGetCount(count)), codes::NOT_INITIALIZED);
    });
}

#[test]
fn a_machine_may_have_no_device() {
    in_own_process("a_machine_may_have_no_device", &[("DEVICES", "0")], || {
        assert_eq!(cuInit(0), codes::NO_DEVICE);
    });
}
