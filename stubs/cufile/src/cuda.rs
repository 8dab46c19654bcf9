//! The calls to the stub of CUDA's driver, which the process has loaded.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

type Current = unsafe extern "C" fn(*mut u64) -> i32;
type Peek = unsafe extern "C" fn(*mut u8, u64, usize) -> i32;
type Write = unsafe extern "C" fn(u64, *const u8, usize) -> i32;

/// The functions of that stub.
struct Driver {
    current: Current,
    peek: Peek,
    write: Write,
}

fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| {
        // SAFETY: a name; nothing is loaded that is not there.
        let library =
            unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        let find = |name: &CStr| {
            // SAFETY: a library, or null, and a name.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            if library.is_null() || found.is_null() {
                eprintln!("stub cuFile: the process has no stub of CUDA with {name:?}");
                std::process::abort();
            }
            found
        };
        // SAFETY: these are their types.
        unsafe {
            Driver {
                current: std::mem::transmute::<*mut c_void, Current>(find(c"cuCtxGetCurrent")),
                peek: std::mem::transmute::<*mut c_void, Peek>(find(c"stub_cuda_peek")),
                write: std::mem::transmute::<*mut c_void, Write>(find(c"stub_cuda_write")),
            }
        }
    })
}

/// Whether a context is current in this thread. An error of this question is no fault of the caller.
pub fn is_in_context() -> bool {
    let mut context = 0;
    // SAFETY: there is room for the answer.
    let done = unsafe { (driver().current)(&raw mut context) };
    done != 0 || context != 0
}

/// Whether a range is allocated device memory.
pub fn is_there(at: u64, len: usize) -> bool {
    let mut bytes = vec![0_u8; len];
    // SAFETY: there is room for so many.
    unsafe { (driver().peek)(bytes.as_mut_ptr(), at, len) == 0 }
}

/// Writes at once, whatever is queued. Returns whether the range was allocated.
pub fn write(at: u64, bytes: &[u8]) -> bool {
    // SAFETY: so many can be read.
    unsafe { (driver().write)(at, bytes.as_ptr(), bytes.len()) == 0 }
}
