//! The driver, `libcuda.so.1`, by the public names of its functions. Its result codes mean the same in the runtime.

#![allow(non_snake_case)] // The names are NVIDIA's.

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use crate::codes::{self, Code, Done};

/// The address of a function of the driver.
fn find(name: &str) -> Result<usize, Code> {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        // SAFETY: a name of C. What the library does when it is loaded is its own affair.
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) as usize }
    });
    if library == 0 {
        return Err(codes::INSUFFICIENT_DRIVER);
    }
    let name = CStr::from_bytes_with_nul(name.as_bytes()).map_err(|_| codes::UNKNOWN)?;
    // SAFETY: a library that was opened and is never closed, and a name of C.
    match unsafe { libc::dlsym(library as *mut _, name.as_ptr()) } as usize {
        0 => Err(codes::CALL_REQUIRES_NEWER_DRIVER),
        address => Ok(address),
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {$(
        pub fn $name($($argument: $kind),*) -> Done {
            static FOUND: OnceLock<Result<usize, Code>> = OnceLock::new();
            let address = (*FOUND.get_or_init(|| find(concat!(stringify!($name), "\0"))))?;
            type Function = unsafe extern "C" fn($($kind),*) -> Code;
            // SAFETY: the driver's interface says that a function of this name is of this type.
            let function = unsafe { std::mem::transmute::<usize, Function>(address) };
            // SAFETY: places for answers are references. What is promised of an address, the caller of the
            // runtime promises in the same words as the driver asks for.
            match unsafe { function($($argument),*) } {
                codes::SUCCESS => Ok(()),
                code => Err(code),
            }
        }
    )*};
}

functions! {
    cuInit(flags: u32);
    cuDriverGetVersion(version: &mut i32);
    cuGetProcAddress_v2(name: *const c_char, function: &mut usize, version: i32, flags: u64, status: &mut i32);
    cuDeviceGetCount(count: &mut i32);
    cuDeviceGet(device: &mut i32, ordinal: i32);
    cuDeviceGetAttribute(value: &mut i32, attribute: i32, device: i32);
    cuDeviceGetName(name: *mut c_char, room: i32, device: i32);
    cuDeviceGetPCIBusId(place: *mut c_char, room: i32, device: i32);
    cuDeviceGetUuid_v2(id: &mut [u8; 16], device: i32);
    cuDeviceTotalMem_v2(bytes: &mut usize, device: i32);
    cuDevicePrimaryCtxRetain(context: &mut u64, device: i32);
    cuCtxGetCurrent(context: &mut u64);
    cuCtxSetCurrent(context: u64);
    cuCtxPushCurrent_v2(context: u64);
    cuCtxPopCurrent_v2(context: &mut u64);
    cuCtxGetDevice(device: &mut i32);
    cuCtxGetStreamPriorityRange(least: &mut i32, greatest: &mut i32);
    cuCtxSynchronize();
    cuMemAlloc_v2(address: &mut u64, bytes: usize);
    cuMemFree_v2(address: u64);
    cuMemGetInfo_v2(free: &mut usize, total: &mut usize);
    cuMemHostAlloc(address: &mut u64, bytes: usize, flags: u32);
    cuMemFreeHost(address: u64);
    cuMemHostRegister_v2(address: u64, bytes: usize, flags: u32);
    cuMemHostUnregister(address: u64);
    cuPointerGetAttribute(value: &mut u64, attribute: i32, address: u64);
    cuMemcpy(to: u64, from: u64, bytes: usize);
    cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64);
    cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize);
    cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64);
    cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize);
    cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: u64);
    cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64);
    cuMemcpyPeerAsync(to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize, stream: u64);
    cuMemsetD8_v2(to: u64, value: u8, bytes: usize);
    cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: u64);
    cuStreamCreateWithPriority(stream: &mut u64, flags: u32, priority: i32);
    cuStreamDestroy_v2(stream: u64);
    cuStreamGetPriority(stream: u64, priority: &mut i32);
    cuStreamIsCapturing(stream: u64, status: &mut i32);
    cuStreamQuery(stream: u64);
    cuStreamSynchronize(stream: u64);
    cuStreamWaitEvent(stream: u64, event: u64, flags: u32);
    cuEventCreate(event: &mut u64, flags: u32);
    cuEventDestroy_v2(event: u64);
    cuEventElapsedTime(milliseconds: &mut f32, start: u64, end: u64);
    cuEventQuery(event: u64);
    cuEventRecordWithFlags(event: u64, stream: u64, flags: u32);
    cuEventSynchronize(event: u64);
}
