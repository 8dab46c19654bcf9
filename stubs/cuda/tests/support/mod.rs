//! Helpers that call the stub from tests, each in a process of its own, since the stub's state is the process's.

#![allow(dead_code, unused_imports)] // Each test file uses a part of it.

#[path = "../../../../tests/common/child.rs"]
mod child;

use std::mem::MaybeUninit;
use std::os::unix::process::ExitStatusExt;

pub use child::{in_child, must_pass};
pub use cuda::calls::Out;
pub use cuda::calls::{
    context::*, copy::*, device::*, event::*, library::*, lookup::*, memory::*, stream::*, test::*,
};
pub use cuda::codes::{self, Code};

/// The content of device memory before anything is written to it.
pub const POISON: u8 = 0xD5;

pub const NON_BLOCKING: u32 = 1;

/// The settings of a test, without the common start of their names.
pub type Settings<'a> = &'a [(&'a str, &'a str)];

/// Runs a test, which must pass, in a process with settings.
#[track_caller]
pub fn in_own_process(test: &str, settings: Settings, body: impl FnOnce()) {
    if let Some(output) = in_child(test, |command| set(command, settings), body) {
        must_pass(&output);
    }
}

/// Runs code that must end its process with a fault of these words.
#[track_caller]
pub fn faults(test: &str, settings: Settings, words: &str, body: impl FnOnce()) {
    if let Some(output) = in_child(test, |command| set(command, settings), body) {
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{told}");
        assert!(told.contains("stub CUDA: fault in ") && told.contains(words), "{told}");
    }
}

fn set(command: &mut std::process::Command, settings: Settings) {
    command.envs(settings.iter().map(|(name, value)| (format!("STUB_CUDA_{name}"), value)));
}

/// The value that a call writes to its output pointer.
#[track_caller]
pub fn out<T>(call: impl FnOnce(Out<'_, T>) -> Code) -> T {
    let mut place = MaybeUninit::uninit();
    ok(call(Some(&mut place)));
    // SAFETY: a call that went well has written its answer.
    unsafe { place.assume_init() }
}

/// The code of a call that fails.
pub fn refused<T>(call: impl FnOnce(Out<'_, T>) -> Code) -> Code {
    call(Some(&mut MaybeUninit::uninit()))
}

#[track_caller]
pub fn ok(code: Code) {
    assert_eq!(code, codes::SUCCESS);
}

/// Makes the context of a device current.
#[track_caller]
pub fn begin(device: i32) -> u64 {
    ok(cuInit(0));
    let context = out(|context| cuDevicePrimaryCtxRetain(context, device));
    ok(cuCtxSetCurrent(context));
    context
}

#[track_caller]
pub fn stream() -> u64 {
    out(|stream| cuStreamCreate(stream, NON_BLOCKING))
}

#[track_caller]
pub fn event() -> u64 {
    out(|event| cuEventCreate(event, 2))
}

#[track_caller]
pub fn device_memory(bytes: usize) -> u64 {
    out(|address| cuMemAlloc_v2(address, bytes))
}

/// Pinned memory, filled.
#[track_caller]
pub fn pinned(bytes: usize, value: u8) -> usize {
    let address = out(|address| cuMemHostAlloc(address, bytes, 0));
    write(address, bytes, value);
    address
}

/// Fills host memory.
pub fn write(address: usize, bytes: usize, value: u8) {
    // SAFETY: the tests give pinned memory of theirs.
    unsafe { std::ptr::write_bytes(address as *mut u8, value, bytes) };
}

/// The bytes of host memory.
pub fn read(address: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: the tests give pinned memory of theirs.
    unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec()
}

/// Device memory as it is, without doing queued work.
#[track_caller]
pub fn peek(address: u64, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    // SAFETY: there is room for so many bytes.
    ok(unsafe { stub_cuda_peek(found.as_mut_ptr(), address, bytes) });
    found
}
