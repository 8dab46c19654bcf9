//! The result codes of the runtime, with their names and meanings. The numbers are the driver's.

use std::ffi::CStr;

/// A result code; 0 is success.
pub type Code = i32;

/// The result inside a call.
pub type Done = Result<(), Code>;

pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const INVALID_MEMCPY_DIRECTION: Code = 21;
pub const INSUFFICIENT_DRIVER: Code = 35;
pub const CALL_REQUIRES_NEWER_DRIVER: Code = 36;
pub const NOT_SUPPORTED: Code = 801;
pub const UNKNOWN: Code = 999;

/// The name and the meaning of a code.
pub fn meaning(code: Code) -> (&'static CStr, &'static CStr) {
    match code {
        0 => (c"cudaSuccess", c"no error"),
        1 => (c"cudaErrorInvalidValue", c"invalid argument"),
        2 => (c"cudaErrorMemoryAllocation", c"out of memory"),
        3 => (c"cudaErrorInitializationError", c"initialization error"),
        4 => (c"cudaErrorCudartUnloading", c"driver shutting down"),
        21 => (c"cudaErrorInvalidMemcpyDirection", c"invalid copy direction for memcpy"),
        35 => (
            c"cudaErrorInsufficientDriver",
            c"CUDA driver version is insufficient for CUDA runtime version",
        ),
        36 => (
            c"cudaErrorCallRequiresNewerDriver",
            c"API call is not supported in the installed CUDA driver",
        ),
        46 => {
            (c"cudaErrorDevicesUnavailable", c"CUDA-capable device(s) is/are busy or unavailable")
        }
        100 => (c"cudaErrorNoDevice", c"no CUDA-capable device is detected"),
        101 => (c"cudaErrorInvalidDevice", c"invalid device ordinal"),
        201 => (c"cudaErrorDeviceUninitialized", c"invalid device context"),
        214 => (c"cudaErrorECCUncorrectable", c"uncorrectable ECC error encountered"),
        304 => {
            (c"cudaErrorOperatingSystem", c"OS call failed or operation not supported on this OS")
        }
        400 => (c"cudaErrorInvalidResourceHandle", c"invalid resource handle"),
        500 => (c"cudaErrorSymbolNotFound", c"named symbol not found"),
        600 => (c"cudaErrorNotReady", c"device not ready"),
        700 => (c"cudaErrorIllegalAddress", c"an illegal memory access was encountered"),
        702 => (c"cudaErrorLaunchTimeout", c"the launch timed out and was terminated"),
        709 => (c"cudaErrorContextIsDestroyed", c"context is destroyed"),
        710 => (c"cudaErrorAssert", c"device-side assert triggered"),
        712 => (
            c"cudaErrorHostMemoryAlreadyRegistered",
            c"part or all of the requested memory range is already mapped",
        ),
        713 => (
            c"cudaErrorHostMemoryNotRegistered",
            c"pointer does not correspond to a registered memory region",
        ),
        714 => (c"cudaErrorHardwareStackError", c"hardware stack error"),
        715 => (c"cudaErrorIllegalInstruction", c"an illegal instruction was encountered"),
        716 => (c"cudaErrorMisalignedAddress", c"misaligned address"),
        717 => (
            c"cudaErrorInvalidAddressSpace",
            c"operation not supported on global/shared address space",
        ),
        718 => (c"cudaErrorInvalidPc", c"invalid program counter"),
        719 => (c"cudaErrorLaunchFailure", c"unspecified launch failure"),
        800 => (c"cudaErrorNotPermitted", c"operation not permitted"),
        801 => (c"cudaErrorNotSupported", c"operation not supported"),
        802 => (c"cudaErrorSystemNotReady", c"system not yet initialized"),
        803 => (
            c"cudaErrorSystemDriverMismatch",
            c"system has unsupported display driver / cuda driver combination",
        ),
        999 => (c"cudaErrorUnknown", c"unknown error"),
        _ => (c"unrecognized error code", c"unrecognized error code"),
    }
}
