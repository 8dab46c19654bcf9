//! The library `libcufile`, and calls to it.
//!
//! It is loaded once, and stays loaded. It is open as long as there is a [`CufileSession`]. In a process that was
//! forked from one with a session, the library is not called.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock};

use libloading::Library;

use super::abi::{self, CufileStatus, DriverProperties, FileDescription};
use super::unavailable::GdsUnavailable;
use crate::cuda::driver::DriverHandle;
use crate::threads::lock;

/// The name that programs are linked with, and the one that a development system may have alone.
const LIBRARY_NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];

/// `CU_FILE_DRIVER_ALREADY_OPEN` of the header.
const DRIVER_ALREADY_OPEN: i32 = 5026;
/// `CU_FILE_CUDA_DRIVER_ERROR` of the header.
const CUDA_DRIVER_ERROR: i32 = 5011;

/// The functions of the library.
struct CufileFunctions {
    open: abi::DriverCall,
    /// `cuFileDriverClose_v2`. The version before it closes the library for the whole process, and is not used.
    close: Option<abi::DriverCall>,
    properties: abi::GetProperties,
    register_file: abi::HandleRegister,
    deregister_file: abi::HandleDeregister,
    register_memory: abi::BufRegister,
    deregister_memory: abi::BufDeregister,
    read: abi::FileRead,
}

/// Loads the library once.
fn functions() -> Result<&'static CufileFunctions, GdsUnavailable> {
    static FUNCTIONS: OnceLock<Result<CufileFunctions, GdsUnavailable>> = OnceLock::new();
    FUNCTIONS.get_or_init(load_functions).as_ref().map_err(GdsUnavailable::clone)
}

fn load_functions() -> Result<CufileFunctions, GdsUnavailable> {
    // SAFETY: loads NVIDIA's library, which is part of the system.
    let open = |name| unsafe { Library::new(name) };
    let library = open(LIBRARY_NAMES[0]).or_else(|first| open(LIBRARY_NAMES[1]).map_err(|_| first));
    let library = library.map_err(|error| {
        let why = error.to_string();
        let is_missing = why.starts_with("libcufile.so") && why.contains("No such file");
        if is_missing { GdsUnavailable::Library } else { GdsUnavailable::Unloadable { why } }
    })?;
    // The functions are used until the process ends.
    let library: &'static Library = Box::leak(Box::new(library));
    fn find<T: Copy>(library: &Library, name: &'static CStr) -> Result<T, GdsUnavailable> {
        // SAFETY: each call below names the type of its function in the header.
        let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
        let call = name.to_str().unwrap_or_default();
        found.map(|found| *found).map_err(|_| GdsUnavailable::Function { call })
    }
    Ok(CufileFunctions {
        open: find(library, c"cuFileDriverOpen")?,
        close: find(library, c"cuFileDriverClose_v2").ok(),
        properties: find(library, c"cuFileDriverGetProperties")?,
        register_file: find(library, c"cuFileHandleRegister")?,
        deregister_file: find(library, c"cuFileHandleDeregister")?,
        register_memory: find(library, c"cuFileBufRegister")?,
        deregister_memory: find(library, c"cuFileBufDeregister")?,
        read: find(library, c"cuFileRead")?,
    })
}

/// The sessions of this process.
static DRIVER_STATE: Mutex<DriverState> =
    Mutex::new(DriverState { sessions: 0, pid: 0, is_owned: false });

struct DriverState {
    sessions: usize,
    pid: u32,
    /// We have opened the library, and so must close it.
    is_owned: bool,
}

/// The open library.
pub struct CufileSession {
    functions: &'static CufileFunctions,
    pid: u32,
    properties: DriverProperties,
}

impl CufileSession {
    /// Opens the library, if it is not open yet.
    pub fn open() -> Result<Arc<CufileSession>, GdsUnavailable> {
        let (functions, pid) = (functions()?, std::process::id());
        // Locked while it opens: other threads need it open too.
        let mut state = lock(&DRIVER_STATE);
        if state.sessions == 0 {
            // SAFETY: the function has no arguments.
            let status = unsafe { (functions.open)() };
            if status.error != DRIVER_ALREADY_OPEN {
                check_status("cuFileDriverOpen", status)?;
            }
            (state.pid, state.is_owned) = (pid, status.error != DRIVER_ALREADY_OPEN);
        } else if state.pid != pid {
            return Err(GdsUnavailable::Forked);
        }
        state.sessions += 1;
        drop(state);
        let mut session = CufileSession { functions, pid, properties: DriverProperties::default() };
        // SAFETY: the structure is larger than the one that the library writes.
        let status = unsafe { (functions.properties)(&raw mut session.properties) };
        check_status("cuFileDriverGetProperties", status)?;
        Ok(Arc::new(session))
    }

    /// The properties of the library and of the kernel module.
    pub fn properties(&self) -> &DriverProperties {
        &self.properties
    }

    /// Whether this process opened the session.
    pub fn is_current_process(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Registers a file. Its descriptor must stay open until the handle is deregistered.
    pub fn register_file(
        &self,
        file: BorrowedFd<'_>,
    ) -> Result<DriverHandle<abi::CufileHandle>, GdsUnavailable> {
        let mut description = FileDescription {
            kind: abi::HANDLE_TYPE_FD,
            _before: 0,
            descriptor: file.as_raw_fd(),
            _rest: 0,
            operations: std::ptr::null(),
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: both structures outlive the call, and the descriptor is open.
        let status =
            unsafe { (self.functions.register_file)(&raw mut handle, &raw mut description) };
        check_status("cuFileHandleRegister", status)?;
        Ok(DriverHandle(handle))
    }

    /// Deregisters a file.
    ///
    /// # Safety
    ///
    /// The handle must be of this session, and no read may use it any more.
    pub unsafe fn deregister_file(&self, handle: DriverHandle<abi::CufileHandle>) {
        // SAFETY: the caller guarantees the handle.
        unsafe { (self.functions.deregister_file)(handle.0) };
    }

    /// Registers memory of the device whose context is current, so that storage can write to it.
    pub fn register_memory(&self, at: u64, len: usize) -> Result<(), GdsUnavailable> {
        // SAFETY: the library checks the address, and refuses one that is not of device memory.
        check_status("cuFileBufRegister", unsafe {
            (self.functions.register_memory)(at as *const c_void, len, 0)
        })
    }

    /// Deregisters memory of the device whose context is current.
    pub fn deregister_memory(&self, at: u64) -> Result<(), GdsUnavailable> {
        // SAFETY: as above.
        check_status("cuFileBufDeregister", unsafe {
            (self.functions.deregister_memory)(at as *const c_void)
        })
    }

    /// Reads `len` bytes of a file from `offset` on into registered memory at `base + start`, and returns the number
    /// of bytes read. The device's context must be current.
    ///
    /// # Safety
    ///
    /// The handle must be of this session. The memory must be long enough, and no other work may use it: the library
    /// waits for no stream.
    pub unsafe fn read(
        &self,
        handle: DriverHandle<abi::CufileHandle>,
        (base, start): (u64, usize),
        len: usize,
        offset: u64,
    ) -> Result<usize, GdsUnavailable> {
        let to = base as *mut c_void;
        // SAFETY: the caller guarantees the handle and the memory.
        let read = unsafe { (self.functions.read)(handle.0, to, len, offset as i64, start as i64) };
        usize::try_from(read).map_err(|_| {
            let why = match read {
                -1 => std::io::Error::last_os_error().to_string(),
                error => error_text(error.unsigned_abs() as i32),
            };
            GdsUnavailable::Call { call: "cuFileRead", why }
        })
    }
}

impl Drop for CufileSession {
    fn drop(&mut self) {
        if !self.is_current_process() {
            return;
        }
        let mut state = lock(&DRIVER_STATE);
        state.sessions -= 1;
        if state.sessions == 0
            && state.is_owned
            && let Some(close) = self.functions.close
        {
            // SAFETY: we opened the library, and no session is left.
            let _ = unsafe { close() };
        }
    }
}

impl std::fmt::Debug for CufileSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("properties", &self.properties).finish_non_exhaustive()
    }
}

fn check_status(call: &'static str, status: CufileStatus) -> Result<(), GdsUnavailable> {
    let why = match status.error {
        0 => return Ok(()),
        CUDA_DRIVER_ERROR => format!("{} {}", error_text(CUDA_DRIVER_ERROR), status.driver_error),
        error => error_text(error),
    };
    Err(GdsUnavailable::Call { call, why })
}

/// The description of an error in the header, for errors that a user can act on.
fn error_text(error: i32) -> String {
    let description = match error.abs() {
        5001 => "nvidia-fs driver is not loaded",
        5004 => "nvidia-fs driver version mismatch",
        5007 => "GPUDirect Storage not supported on current platform",
        5008 => "GPUDirect Storage not supported on current file",
        5009 => "GPUDirect Storage not supported on current GPU",
        5010 => "nvidia-fs driver ioctl error",
        CUDA_DRIVER_ERROR => "CUDA driver error",
        5016 => "access beyond maximum pinned size",
        5025 => "driver or file access error",
        5030 => "internal error",
        5034 => "GPUDirect Storage disabled by config on current file",
        5036 => "failed to allocate pinned GPU memory",
        5044 => "cufile io error",
        _ => "error",
    };
    format!("{description} ({})", error.abs())
}
