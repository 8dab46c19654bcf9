//! The result codes of the driver, with their names and meanings.

use std::ffi::CStr;

/// A result code; 0 is success.
pub type Code = i32;

/// The result inside a call.
pub type Done = Result<(), Code>;

macro_rules! codes {
    ($($name:ident = $code:literal, $c_name:literal, $words:literal;)*) => {
        $(#[doc = $words] pub const $name: Code = $code;)*

        /// The name and the meaning of a code, if it exists.
        pub fn meaning(code: Code) -> Option<(&'static CStr, &'static CStr)> {
            const fn c(bytes: &'static [u8]) -> &'static CStr {
                match CStr::from_bytes_with_nul(bytes) {
                    Ok(text) => text,
                    Err(_) => panic!("a text of C ends with its only zero"),
                }
            }
            match code {
                $($code => Some((
                    const { c(concat!($c_name, "\0").as_bytes()) },
                    const { c(concat!($words, "\0").as_bytes()) },
                )),)*
                _ => None,
            }
        }
    };
}

codes! {
    SUCCESS = 0, "CUDA_SUCCESS", "no error";
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument";
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory";
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error";
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down";
    DEVICE_UNAVAILABLE = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable";
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal";
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context";
    ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered";
    INVALID_PTX = 218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed";
    OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle";
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND", "named symbol not found";
    NOT_READY = 600, "CUDA_ERROR_NOT_READY", "device not ready";
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered";
    LAUNCH_TIMEOUT = 702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated";
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed";
    ASSERT = 710, "CUDA_ERROR_ASSERT", "device-side assert triggered";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region";
    HARDWARE_STACK_ERROR = 714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error";
    ILLEGAL_INSTRUCTION = 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered";
    MISALIGNED_ADDRESS = 716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address";
    INVALID_ADDRESS_SPACE = 717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space";
    INVALID_PC = 718, "CUDA_ERROR_INVALID_PC", "invalid program counter";
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure";
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted";
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported";
    SYSTEM_NOT_READY = 802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized";
    SYSTEM_DRIVER_MISMATCH = 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination";
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN", "unknown error";
}

/// Whether a code corrupts its context, whose later calls then all give it.
pub fn is_sticky(code: Code) -> bool {
    matches!(code, ECC_UNCORRECTABLE | ILLEGAL_ADDRESS | LAUNCH_TIMEOUT | ASSERT)
        || (HARDWARE_STACK_ERROR..=LAUNCH_FAILED).contains(&code)
}
