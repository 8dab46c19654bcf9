//! Shows every model checkpoint as one contiguous, safe `.safetensors` file, without converting it.
//!
//! The header is written in memory; the tensor bytes stay where they are on disk. No byte of a
//! pickle is executed.
//!
//! The rooms, each importing only those before it:
//! - [`source`]: bytes on disk, with the identity that tells whether they changed;
//! - [`checkpoint`]: what a checkpoint holds and where each tensor's bytes lie;
//! - [`virtual_file`]: the virtual file: its layout, and reading any part of it;
//! - [`loader`]: tensors into memory, from files of a mount too, or used where they lie ([`open`]);
//! - [`export`]: a virtual file as a real file; [`verify`]: reading one whole, and comparing two.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::path::Path;
//!
//! let checkpoint = ckptfs::checkpoint::open(Path::new("model"), &Default::default())?;
//! let virtual_file = std::sync::Arc::new(ckptfs::virtual_file::VirtualFile::new(checkpoint)?);
//! let reader = virtual_file.open()?;
//! let mut start = vec![0; 4096];
//! let read = reader.read_at(&mut start, 0)?;
//! println!("{read} of {} bytes", virtual_file.size());
//! # Ok(())
//! # }
//! ```

pub mod checkpoint;
pub mod export;
mod huge_pages;
pub mod loader;
#[cfg(feature = "mount")]
mod log_throttle;
pub mod mount_info;
pub mod source;
mod threads;
pub mod verify;
pub mod view;
pub mod virtual_file;

#[cfg(feature = "mount")]
pub mod cache;
#[cfg(feature = "mount")]
pub mod mount;

#[cfg(feature = "cuda")]
pub mod cuda;

#[cfg(feature = "cli")]
pub mod cli;

#[cfg(feature = "python")]
mod python;

pub use loader::open;
