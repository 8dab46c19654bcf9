//! The library, and the calls to it.
//!
//! In: descriptors, and addresses of device memory. Out: handles, bytes at the addresses, or what is missing. The
//! library is loaded once, and stays; it is open as long as somebody has a [`Session`], and closed once for each
//! time that it was opened. In a process that was forked nothing of its parent's is called.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock};

use libloading::Library;

use super::GdsUnavailable;
use super::abi::{self, CufileStatus, DriverProperties, FileDescription};
use crate::cuda::driver::DriverHandle;
use crate::threads::lock;

/// What programs are linked with, and then what a system for developing may have alone.
const LIBRARY_NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];

/// `CU_FILE_DRIVER_ALREADY_OPEN`.
const DRIVER_ALREADY_OPEN: i32 = 5026;
/// `CU_FILE_CUDA_DRIVER_ERROR`.
const CUDA_DRIVER_ERROR: i32 = 5011;

/// The functions that are called.
struct CufileFunctions {
    open: abi::DriverCall,
    /// The one before this closed the library for everybody in the process, and so is not used.
    close: Option<abi::DriverCall>,
    properties: abi::GetProperties,
    register_file: abi::HandleRegister,
    deregister_file: abi::HandleDeregister,
    register_memory: abi::BufRegister,
    deregister_memory: abi::BufDeregister,
    read: abi::FileRead,
}

/// Looked for once.
fn functions() -> Result<&'static CufileFunctions, GdsUnavailable> {
    static CALLS: OnceLock<Result<CufileFunctions, GdsUnavailable>> = OnceLock::new();
    CALLS.get_or_init(load_functions).as_ref().map_err(GdsUnavailable::clone)
}

fn load_functions() -> Result<CufileFunctions, GdsUnavailable> {
    // SAFETY: loads NVIDIA's library, whose initialisers are the system's.
    let open = |name| unsafe { Library::new(name) };
    let library = open(LIBRARY_NAMES[0]).or_else(|first| open(LIBRARY_NAMES[1]).map_err(|_| first));
    let library = library.map_err(|error| {
        let why = error.to_string();
        let is_it = why.starts_with("libcufile.so") && why.contains("No such file");
        if is_it { GdsUnavailable::Library } else { GdsUnavailable::Unloadable { why } }
    })?;
    // What is found below is used until the process ends.
    let library: &'static Library = Box::leak(Box::new(library));
    fn find<T: Copy>(library: &Library, name: &'static CStr) -> Result<T, GdsUnavailable> {
        // SAFETY: the types are those of the header, function by function.
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

/// Who has the library open in this process.
static DRIVER_STATE: Mutex<DriverState> =
    Mutex::new(DriverState { sessions: 0, pid: 0, is_owned: false });

struct DriverState {
    sessions: usize,
    pid: u32,
    /// It was opened here, and so is to be closed here.
    is_owned: bool,
}

/// The library, open.
pub struct CufileSession {
    functions: &'static CufileFunctions,
    pid: u32,
    properties: DriverProperties,
}

impl CufileSession {
    /// Opens it, if nobody has.
    pub fn open() -> Result<Arc<CufileSession>, GdsUnavailable> {
        let (calls, process) = (functions()?, std::process::id());
        // Held while it opens: who comes meanwhile needs it open too.
        let mut open = lock(&DRIVER_STATE);
        if open.sessions == 0 {
            // SAFETY: it is the library's, and takes nothing.
            let status = unsafe { (calls.open)() };
            if status.error != DRIVER_ALREADY_OPEN {
                check_status("cuFileDriverOpen", status)?;
            }
            (open.pid, open.is_owned) = (process, status.error != DRIVER_ALREADY_OPEN);
        } else if open.pid != process {
            return Err(GdsUnavailable::Forked);
        }
        open.sessions += 1;
        drop(open);
        let mut session = CufileSession {
            functions: calls,
            pid: process,
            properties: DriverProperties::default(),
        };
        // SAFETY: there is room for all of the properties, and some to spare.
        let status = unsafe { (calls.properties)(&raw mut session.properties) };
        check_status("cuFileDriverGetProperties", status)?;
        Ok(Arc::new(session))
    }

    /// What it says of itself and of the kernel.
    pub fn properties(&self) -> &DriverProperties {
        &self.properties
    }

    /// Whether this is the process that opened it.
    pub fn is_current_process(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Lets it read a file, whose descriptor must stay until the handle is given up.
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
        // SAFETY: both are there, and the descriptor is open.
        let status =
            unsafe { (self.functions.register_file)(&raw mut handle, &raw mut description) };
        check_status("cuFileHandleRegister", status)?;
        Ok(DriverHandle(handle))
    }

    /// Gives a handle up.
    ///
    /// # Safety
    ///
    /// It must be of this session, given up once, and nobody may be reading by it.
    pub unsafe fn deregister_file(&self, handle: DriverHandle<abi::CufileHandle>) {
        // SAFETY: the caller's word.
        unsafe { (self.functions.deregister_file)(handle.0) };
    }

    /// Lets storage write to memory of the device whose context is current.
    pub fn register_memory(&self, at: u64, len: usize) -> Result<(), GdsUnavailable> {
        // SAFETY: it is only looked at, and refused if it is none.
        check_status("cuFileBufRegister", unsafe {
            (self.functions.register_memory)(at as *const c_void, len, 0)
        })
    }

    /// The end of that.
    pub fn deregister_memory(&self, at: u64) -> Result<(), GdsUnavailable> {
        // SAFETY: as above.
        check_status("cuFileBufDeregister", unsafe {
            (self.functions.deregister_memory)(at as *const c_void)
        })
    }

    /// Reads so many bytes of a file from `offset` on into registered memory that begins at `base`, from `at` on
    /// there; how many it were. The device's context is current.
    ///
    /// # Safety
    ///
    /// The handle must be of this session, and the memory as long and nobody else's. No stream is waited for.
    pub unsafe fn read(
        &self,
        handle: DriverHandle<abi::CufileHandle>,
        (base, at): (u64, usize),
        len: usize,
        offset: u64,
    ) -> Result<usize, GdsUnavailable> {
        let to = base as *mut c_void;
        // SAFETY: the caller's word.
        let read = unsafe { (self.functions.read)(handle.0, to, len, offset as i64, at as i64) };
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
        let mut open = lock(&DRIVER_STATE);
        open.sessions -= 1;
        if open.sessions == 0
            && open.is_owned
            && let Some(close) = self.functions.close
        {
            // SAFETY: it was opened here, and everything of it was given back.
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

/// What the header says of an error, for those that a user can do something about.
fn error_text(error: i32) -> String {
    let words = match error.abs() {
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
    format!("{words} ({})", error.abs())
}
