//! Calls about kernels, which are not supported.
//!
//! Programs register theirs when they are loaded, and only the names are kept. A launch fails with "not supported", and
//! the first prints the kernel's name on standard error.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::sync::{Mutex, PoisonError};

use super::{Out, put};
use crate::answers::answer;
use crate::codes::{self, Code, Done};

/// Three sizes of a grid or a block.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Sizes([u32; 3]);

/// The configuration of a launch: grid, block, bytes of shared memory, and stream.
type Launch = (Sizes, Sizes, usize, u64);

thread_local! {
    static PUSHED: RefCell<Vec<Launch>> = const { RefCell::new(Vec::new()) };
}

/// The host functions that launch kernels, and the addresses of the kernels' names.
static NAMES: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// Refuses a kernel.
fn refuse(kernel: u64) -> Done {
    let name = NAMES.lock().unwrap_or_else(PoisonError::into_inner).insert(kernel, 0);
    match name {
        Some(0) => {}
        // SAFETY: by the interface the name is a text of C that stays while the program does.
        Some(name) => eprintln!("stub CUDA: there are no kernels, as {:?}", unsafe {
            CStr::from_ptr(name as *const c_char)
        }),
        None => eprintln!("stub CUDA: there are no kernels, as the one at {kernel:#x}"),
    }
    Err(codes::NOT_SUPPORTED)
}

/// Registers a program's kernels, without an effect.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(kernels: u64) -> u64 {
    kernels
}

/// Ends the registration.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_kernels: u64) {}

/// Unregisters a program's kernels.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(_kernels: u64) {}

/// Keeps the name of a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFunction(
    _kernels: u64,
    host: u64,
    _device: u64,
    name: usize,
    _thread_limit: i32,
    _thread: u64,
    _block: u64,
    _block_sizes: u64,
    _grid_sizes: u64,
    _warp: u64,
) {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner).insert(host, name);
}

/// Registers a variable of kernels, without an effect.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterVar(
    _kernels: u64,
    _host: u64,
    _device: u64,
    _name: usize,
    _is_external: i32,
    _bytes: usize,
    _is_constant: i32,
    _is_global: i32,
) {
}

/// Pushes the configuration of the next launch.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(
    grid: Sizes,
    block: Sizes,
    shared: usize,
    stream: u64,
) -> u32 {
    PUSHED.with_borrow_mut(|pushed| pushed.push((grid, block, shared, stream)));
    0
}

/// Pops the configuration of the next launch.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaPopCallConfiguration(
    grid: Out<'_, Sizes>,
    block: Out<'_, Sizes>,
    shared: Out<'_, usize>,
    stream: Out<'_, u64>,
) -> Code {
    const MISSING_CONFIGURATION: Code = 52;
    answer(|| {
        let launch = PUSHED.with_borrow_mut(Vec::pop).ok_or(MISSING_CONFIGURATION)?;
        put(grid, launch.0)?;
        put(block, launch.1)?;
        put(shared, launch.2)?;
        put(stream, launch.3)
    })
}

/// The kernel of a host function, which is the function's own address.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaGetKernel(kernel: Out<'_, u64>, host: u64) -> Code {
    answer(|| put(kernel, host))
}

macro_rules! launches {
    ($($name:ident)*) => {$(
        /// Refuses to launch a kernel.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(kernel: u64) -> Code {
            answer(|| refuse(kernel))
        }
    )*};
}

// The kernel is the first argument, and the others are not read.
launches! { __cudaLaunchKernel cudaLaunchKernel cudaLaunchCooperativeKernel }

/// Refuses to launch a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchKernelExC(_launch: u64, kernel: u64) -> Code {
    answer(|| refuse(kernel))
}
