//! Devices are what the settings say, and functions are found by their names.

#![allow(clippy::unwrap_used)] // In helper functions too: a failure fails the test.

mod support;

use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;

use support::*;

/// The first byte of a C string.
fn of(text: &CStr) -> Option<&c_char> {
    // SAFETY: a text has a first byte, be it its zero.
    Some(unsafe { &*text.as_ptr() })
}

/// The text that a call writes to a buffer of this size.
fn text(room: usize, call: impl FnOnce(Out<'_, u8>, i32) -> Code) -> String {
    let mut bytes = vec![MaybeUninit::new(b'!'); room];
    ok(call(bytes.first_mut(), room as i32));
    // SAFETY: all had a value from the beginning.
    let bytes: Vec<u8> = bytes.into_iter().map(|byte| unsafe { byte.assume_init() }).collect();
    CStr::from_bytes_until_nul(&bytes).unwrap().to_str().unwrap().to_owned()
}

#[test]
fn devices_are_as_the_settings_say() {
    let settings = [
        ("DEVICES", "2"),
        ("DRIVER_VERSION", "13010"),
        ("ATTRIBUTES", "1.INTEGRATED=1,1.PCI_BUS_ID=202,HOST_REGISTER_SUPPORTED=0"),
    ];
    in_own_process("devices_are_as_the_settings_say", &settings, || {
        begin(1);
        assert_eq!(out(|version| cuDriverGetVersion(version)), 13010);
        assert_eq!(out(|count| cuDeviceGetCount(count)), 2);
        assert_eq!(refused(|device| cuDeviceGet(device, 2)), codes::INVALID_DEVICE);
        let attribute = |device, which| out(|value| cuDeviceGetAttribute(value, which, device));
        assert_eq!([attribute(0, 18), attribute(1, 18)], [0, 1]);
        let place = |device| text(13, |place, room| cuDeviceGetPCIBusId(place, room, device));
        assert_eq!([place(0), place(1)], ["0000:01:00.0", "0000:ca:00.0"]);
        assert_eq!(text(100, |name, room| cuDeviceGetName(name, room, 1)), "Stub device 1");
        assert_eq!(text(6, |name, room| cuDeviceGetName(name, room, 1)), "Stub ");
        let from = [0_u8; 8];
        assert_eq!(cuMemHostRegister_v2(from.as_ptr() as usize, 8, 0), codes::NOT_SUPPORTED);
        let memory = device_memory(8);
        let mut device = MaybeUninit::new([0_u8; 4]);
        // SAFETY: this attribute has four bytes, and so has the place.
        let place = unsafe { &mut *device.as_mut_ptr().cast::<MaybeUninit<u8>>() };
        ok(cuPointerGetAttribute(Some(place), 9, memory));
        // SAFETY: it had a value from the beginning.
        assert_eq!(i32::from_le_bytes(unsafe { device.assume_init() }), 1);
    });
}

#[test]
fn the_primary_context_is_counted() {
    in_own_process("the_primary_context_is_counted", &[], || {
        let context = begin(0);
        let is_active = || {
            out(|active| cuDevicePrimaryCtxGetState(0, Some(&mut MaybeUninit::uninit()), active))
        };
        assert_eq!(out(|again| cuDevicePrimaryCtxRetain(again, 0)), context);
        ok(cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!(is_active(), 1);
        ok(cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!(is_active(), 0);
        assert_ne!(out(|again| cuDevicePrimaryCtxRetain(again, 0)), context);
    });
}

#[test]
fn contexts_are_pushed_and_popped() {
    in_own_process("contexts_are_pushed_and_popped", &[("DEVICES", "2")], || {
        let (one, two) = (begin(0), begin(1));
        let current = || out(|context| cuCtxGetCurrent(context));
        ok(cuCtxPushCurrent_v2(one));
        assert_eq!(current(), one);
        assert_eq!(out(|device| cuCtxGetDevice(device)), 0);
        assert_eq!(out(|context| cuCtxPopCurrent_v2(context)), one);
        assert_eq!(current(), two);
        let elsewhere = std::thread::scope(|threads| threads.spawn(current).join());
        assert_eq!(elsewhere.unwrap(), 0);
    });
}

#[test]
fn devices_copy_to_each_other() {
    in_own_process("devices_copy_to_each_other", &[("DEVICES", "2")], || {
        let one = begin(0);
        let (first, from) = (device_memory(8), pinned(8, 7));
        ok(cuMemcpyHtoD_v2(first, from, 8));
        let two = begin(1);
        let (second, stream) = (device_memory(8), stream());
        ok(cuMemcpyPeerAsync(second, two, first, one, 8, stream));
        assert_eq!(peek(second, 8), [POISON; 8]);
        ok(cuStreamSynchronize(stream));
        assert_eq!(peek(second, 8), [7; 8]);
    });
}

#[test]
fn a_copy_between_devices_names_the_contexts_of_its_memory() {
    let test = "a_copy_between_devices_names_the_contexts_of_its_memory";
    faults(test, &[("DEVICES", "2")], "is not of the context named", || {
        let one = begin(0);
        let first = device_memory(8);
        let two = begin(1);
        let second = device_memory(8);
        cuMemcpyPeerAsync(second, one, first, two, 8, 0);
    });
}

#[test]
fn functions_are_found_by_name() {
    in_own_process("functions_are_found_by_name", &[], || {
        let find = |name| {
            let mut status = MaybeUninit::new(9);
            let mut function = MaybeUninit::new(std::ptr::null::<c_void>());
            let place = Some(&mut function);
            let code = cuGetProcAddress_v2(of(name), place, 12080, 0, Some(&mut status));
            // SAFETY: both had a value from the beginning.
            unsafe { (code, function.assume_init(), status.assume_init()) }
        };
        let version = cuDriverGetVersion as *const c_void;
        assert_eq!(find(c"cuDriverGetVersion"), (codes::SUCCESS, version, 0));
        let newest = cuMemFree_v2 as *const c_void;
        assert_eq!(find(c"cuMemFree"), (codes::SUCCESS, newest, 0));
        let nothing = std::ptr::null();
        assert_eq!(find(c"cuNothing"), (codes::NOT_FOUND, nothing, 1));
    });
}

#[test]
fn answers_have_names() {
    in_own_process("answers_have_names", &[], || {
        let name = out(|name| cuGetErrorName(codes::OUT_OF_MEMORY, name));
        // SAFETY: a call that went well gives a text that stays.
        assert_eq!(unsafe { CStr::from_ptr(name) }, c"CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(refused(|words| cuGetErrorString(12345, words)), codes::INVALID_VALUE);
    });
}
