//! Why bytes do not come by GPUDirect Storage, in words. Never an error of a load, which then goes another way.

/// What is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GdsUnavailable {
    /// Whoever made the loader wants none of it.
    #[error("GPUDirect Storage: is switched off")]
    Disabled,
    /// There is no library.
    #[error("GPUDirect Storage: libcufile is not installed")]
    Library,
    /// There is one, which the system does not load.
    #[error("GPUDirect Storage: libcufile cannot be loaded: {why}")]
    Unloadable { why: String },
    /// Not all that is called is there.
    #[error("GPUDirect Storage: this libcufile has no {call}")]
    Function { call: &'static str },
    /// The library's part in the kernel.
    #[error("GPUDirect Storage: the kernel module nvidia-fs is not loaded")]
    Module,
    /// The library is set to read by the host's memory.
    #[error("GPUDirect Storage: libcufile is set to read all files by POSIX (posix_io_mode)")]
    Posix,
    /// A filesystem that has none.
    #[error("GPUDirect Storage: not for files of {filesystem}")]
    Filesystem { filesystem: String },
    /// One that could, if the kernel's part could.
    #[error("GPUDirect Storage: nvidia-fs does not support {storage}")]
    Storage { storage: &'static str },
    /// A disk of which it is not known, so that the library may read by the host's memory.
    #[error(
        "GPUDirect Storage: not known for the disk {disk}, and libcufile may read it by POSIX (allow_compat_mode)"
    )]
    Disk { disk: String },
    /// The file cannot be opened past the page cache.
    #[error("GPUDirect Storage: the file cannot be opened with O_DIRECT")]
    DirectOpen,
    /// What lies together in the file is to be on several devices.
    #[error("GPUDirect Storage: not for bytes that lie together and belong to several devices")]
    SeveralDevices,
    /// A process that was forked has nothing of its parent's.
    #[error("GPUDirect Storage: not in a process that was forked from one that uses it")]
    Forked,
    /// The device has no memory for chunks.
    #[error("GPUDirect Storage: no chunks on the device: {why}")]
    ChunkMemory { why: String },
    /// A call failed.
    #[error("GPUDirect Storage: {call}: {why}")]
    Call { call: &'static str, why: String },
    /// A read gave less than is there, or more than was asked for.
    #[error("GPUDirect Storage: cuFileRead: read {read} of {wanted} bytes")]
    ShortRead { read: usize, wanted: usize },
}
