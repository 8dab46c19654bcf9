//! The part of `cufile.h` that is used: layouts, constants and function types.
//!
//! They are those of the header of libcufile 1.17 (the wheel `nvidia-cufile` 1.17.1.22), on 64-bit Linux.

use std::ffi::{c_int, c_void};

/// `CUfileError_t`, which is returned by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CufileStatus {
    /// 0, or one of the library's own errors, which are above 5000.
    pub error: c_int,
    /// The error of CUDA's driver, if `error` says that it failed.
    pub driver_error: c_int,
}

/// `CUfileDescr_t`. Its union of a descriptor and a pointer is written as the descriptor and padding.
#[repr(C)]
pub struct FileDescription {
    pub kind: c_int,
    pub _before: c_int,
    pub descriptor: c_int,
    pub _rest: c_int,
    pub operations: *const c_void,
}

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD` of the header.
pub const HANDLE_TYPE_FD: c_int = 1;

/// `CUfileDrvProps_t` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DriverProperties {
    /// The version of nvidia-fs; the fields up to `control` also describe nvidia-fs.
    pub major: u32,
    pub minor: u32,
    pub poll_threshold: usize,
    pub max_direct: usize,
    /// A bit for each supported kind of storage.
    pub status: u32,
    /// A bit for each setting.
    pub control: u32,
    pub features: u32,
    pub device_cache: u32,
    pub buffer_cache: u32,
    pub pinned: u32,
    pub batch: u32,
    pub batch_timeout: u32,
    /// Room for what later versions may write.
    pub _later: [u64; 16],
}

/// Bits of `status` (`CUfileDriverStatusFlags_t`).
pub mod status {
    pub const LUSTRE: u32 = 0x1;
    pub const NFS: u32 = 0x4;
    pub const GPFS: u32 = 0x8;
    pub const NVME: u32 = 0x10;
    pub const NVME_OVER_FABRICS: u32 = 0x20;
    pub const SCSI: u32 = 0x40;
    pub const SCALEFLUX: u32 = 0x80;
    pub const NVMESH: u32 = 0x100;
    pub const BEEGFS: u32 = 0x200;
}

/// Bits of `control` (`CUfileDriverControlFlags_t`).
pub mod control {
    /// The library may read through the host's memory where it must, and does not report it.
    pub const ALLOW_COMPAT: u32 = 0x2;
    /// The library always reads through the host's memory.
    pub const POSIX_IO: u32 = 0x4;
    /// The library repeats failed reads through the host's memory.
    pub const FALLBACK_IO: u32 = 0x10;
}

pub type CufileHandle = *mut c_void;

pub type DriverCall = unsafe extern "C" fn() -> CufileStatus;
pub type GetProperties = unsafe extern "C" fn(*mut DriverProperties) -> CufileStatus;
pub type HandleRegister =
    unsafe extern "C" fn(*mut CufileHandle, *mut FileDescription) -> CufileStatus;
pub type HandleDeregister = unsafe extern "C" fn(CufileHandle);
pub type BufRegister = unsafe extern "C" fn(*const c_void, usize, c_int) -> CufileStatus;
pub type BufDeregister = unsafe extern "C" fn(*const c_void) -> CufileStatus;
pub type FileRead = unsafe extern "C" fn(CufileHandle, *mut c_void, usize, i64, i64) -> isize;

// The layouts of a C compiler.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<CufileStatus>() == 8 && size_of::<FileDescription>() == 24);
    assert!(
        offset_of!(FileDescription, descriptor) == 8
            && offset_of!(FileDescription, operations) == 16
    );
    assert!(
        offset_of!(DriverProperties, max_direct) == 16
            && offset_of!(DriverProperties, status) == 24
    );
    assert!(
        offset_of!(DriverProperties, features) == 32 && offset_of!(DriverProperties, _later) == 56
    );
};
