//! Reasons why GPUDirect Storage is not used. Never an error of a load, which then goes through pinned memory.

/// Why GPUDirect Storage is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GdsUnavailable {
    /// The loader was told not to use it.
    #[error("GPUDirect Storage: is switched off")]
    Disabled,
    /// The library is not installed.
    #[error("GPUDirect Storage: libcufile is not installed")]
    Library,
    /// The system cannot load the library.
    #[error("GPUDirect Storage: libcufile cannot be loaded: {why}")]
    Unloadable { why: String },
    /// The library lacks a function.
    #[error("GPUDirect Storage: this libcufile has no {call}")]
    Function { call: &'static str },
    /// The kernel module is not loaded.
    #[error("GPUDirect Storage: the kernel module nvidia-fs is not loaded")]
    Module,
    /// The library is configured to read through the host's memory.
    #[error("GPUDirect Storage: libcufile is set to read all files by POSIX (posix_io_mode)")]
    Posix,
    /// The filesystem does not support it.
    #[error("GPUDirect Storage: not for files of {filesystem}")]
    Filesystem { filesystem: String },
    /// The kernel module does not support the storage.
    #[error("GPUDirect Storage: nvidia-fs does not support {storage}")]
    Storage { storage: &'static str },
    /// It is unknown whether the disk supports it: the library may read through the host's memory.
    #[error(
        "GPUDirect Storage: not known for the disk {disk}, and libcufile may read it by POSIX (allow_compat_mode)"
    )]
    Disk { disk: String },
    /// The file cannot be opened for direct reads.
    #[error("GPUDirect Storage: the file cannot be opened with O_DIRECT")]
    DirectOpen,
    /// Bytes of one extent belong to several devices.
    #[error("GPUDirect Storage: not for bytes that lie together and belong to several devices")]
    SeveralDevices,
    /// This process was forked from the one that opened the library.
    #[error("GPUDirect Storage: not in a process that was forked from one that uses it")]
    Forked,
    /// The device lacks memory for chunks.
    #[error("GPUDirect Storage: no chunks on the device: {why}")]
    ChunkMemory { why: String },
    /// A call to the library failed.
    #[error("GPUDirect Storage: {call}: {why}")]
    Call { call: &'static str, why: String },
    /// A read returned fewer bytes than the file has, or more than were requested.
    #[error("GPUDirect Storage: cuFileRead: read {read} of {wanted} bytes")]
    ShortRead { read: usize, wanted: usize },
}
