//! Calls for modules, each of one kernel, and for launches of it.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use super::output::{Out, put};
use crate::codes::{self, Code};
use crate::driver::{Module, Needs, call};
use crate::kernels::{Kernel, Launch};
use crate::streams::Work;

/// Loads a module from the text of a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(module: Out<'_, u64>, image: Option<&c_char>) -> Code {
    call("cuModuleLoadData", Needs::Context, |driver| {
        let image = image.ok_or(codes::INVALID_VALUE)?;
        // SAFETY: by the interface this is where a text of C begins.
        let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
        let kernel = Kernel::parse(&text).map_err(|line| {
            eprintln!("stub CUDA: unsupported PTX: {}", line.0);
            codes::INVALID_PTX
        })?;
        let handle = driver.handles.issue();
        driver.modules.insert(handle, Module { context: driver.here, kernel: Arc::new(kernel) });
        put(module, handle)
    })
}

/// The kernel of a module. Its handle is that of the module.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(
    function: Out<'_, u64>,
    module: u64,
    name: Option<&c_char>,
) -> Code {
    call("cuModuleGetFunction", Needs::Context, |driver| {
        let name = name.ok_or(codes::INVALID_VALUE)?;
        // SAFETY: by the interface this is where a text of C begins.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let found = driver.modules.get(&module).ok_or(codes::INVALID_HANDLE)?;
        if found.kernel.name != name {
            return Err(codes::NOT_FOUND);
        }
        put(function, module)
    })
}

/// Unloads a module. No work that is queued may need it.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: u64) -> Code {
    call("cuModuleUnload", Needs::Context, |driver| {
        let Some(Module { kernel, .. }) = driver.modules.remove(&module) else {
            let words = driver.handles.describe_missing(module, "a module");
            return Err(driver.fault(codes::INVALID_HANDLE, words));
        };
        let needs = |work: &Work| matches!(work, Work::Run { kernel: queued, .. } if Arc::ptr_eq(queued, &kernel));
        match driver.streams.needed_by(needs) {
            Some(work) => {
                let words = format!("the module {module:#x} is unloaded and {work}");
                Err(driver.fault(codes::INVALID_HANDLE, words))
            }
            None => Ok(()),
        }
    })
}

/// Queues a kernel on a stream, in one dimension.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared_bytes: u32,
    stream: u64,
    params: Option<&*const c_void>,
    extra: *const c_void,
) -> Code {
    call("cuLaunchKernel", Needs::Context, |driver| {
        let module = driver.modules.get(&function).ok_or(codes::INVALID_HANDLE)?;
        if module.context != driver.here {
            let words = format!("the kernel {function:#x} is not of the current context");
            return Err(driver.fault(codes::INVALID_HANDLE, words));
        }
        let kernel = Arc::clone(&module.kernel);
        const MAX_THREADS: u32 = 1024;
        let is_flat = [grid_y, grid_z, block_y, block_z] == [1; 4] && shared_bytes == 0;
        let is_valid = grid_x > 0 && (1..=MAX_THREADS).contains(&block_x);
        if !is_flat || !is_valid || !extra.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let places = std::ptr::from_ref(params.ok_or(codes::INVALID_VALUE)?);
        // SAFETY: by the interface there is an address of each parameter, which has 64 bits.
        let read = |index: usize| unsafe { (*places.add(index)).cast::<u64>().read_unaligned() };
        let params = (0..kernel.param_count).map(read).collect();
        let launch = Launch { blocks: grid_x, threads: block_x, params };
        let stream = driver.stream_here(stream)?;
        driver.streams.queue(stream, Work::Run { kernel, launch });
        Ok(())
    })
}
