//! Kernels, of which there are none. Programs register theirs when they are loaded, and that is only noted;
//! a launch answers "not supported", and its name is told on standard error, the first time.

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

/// The sizes of grid and block, the bytes of shared memory, and the stream of a launch.
type Launch = (Sizes, Sizes, usize, u64);

thread_local! {
    static PUSHED: RefCell<Vec<Launch>> = const { RefCell::new(Vec::new()) };
}

/// The functions of the host that launch kernels, and where the kernels' names are.
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

/// Takes a program's kernels, and leaves them alone.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(kernels: u64) -> u64 {
    kernels
}

/// There are no more of them.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_kernels: u64) {}

/// The program ends.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(_kernels: u64) {}

/// Notes the name of a kernel.
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

/// A variable of kernels is nowhere.
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

/// Keeps how the next kernel is to be launched.
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

/// Gives it back.
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

/// The kernel of a function of the host, under the function's own address.
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

// Each is called with more than the kernel, which comes first; what follows is not looked at.
launches! { __cudaLaunchKernel cudaLaunchKernel cudaLaunchCooperativeKernel }

/// Refuses to launch a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchKernelExC(_launch: u64, kernel: u64) -> Code {
    answer(|| refuse(kernel))
}
