//! Shows every model checkpoint as one contiguous, safe `.safetensors` file, without converting it.
//!
//! The header is written in memory; the tensor bytes stay on disk. No byte of a pickle is executed.
//!
//! The main modules; docs/design.md has all, and which may import which:
//! - [`source`]: bytes on disk, and whether they have changed;
//! - [`checkpoint`]: the tensors of a checkpoint, and the location of each one's bytes;
//! - [`recipe`]: casts, renames, slices, stacks and splits of tensors, none of which reads or copies them;
//! - [`virtual_file`]: the layout of the virtual file, and reading any part of it;
//! - [`loader`]: loads tensors into memory, also from a mount, or maps them ([`open`]);
//! - [`export`]: writes a virtual file as a real one; [`verify`]: reads one whole, and compares two.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};
//!
//! let checkpoint = ckptfs::checkpoint::open(Path::new("model"), &Default::default())?;
//! let file = Arc::new(VirtualFile::new(checkpoint)?);
//! let reader = VirtualFileReader::open(&file)?;
//! let mut start = vec![0; 4096];
//! let read = reader.read_at(&mut start, 0)?;
//! println!("{read} of {} bytes", file.size());
//! # Ok(())
//! # }
//! ```

#[cfg(any(feature = "cli", feature = "remote"))]
mod byte_size;
pub mod checkpoint;
#[cfg(feature = "mount")]
mod clipped_text;
pub mod export;
#[cfg(feature = "remote")]
pub mod fetch;
mod huge_pages;
pub mod loader;
#[cfg(feature = "mount")]
mod log_throttle;
pub mod mount_info;
#[cfg(any(feature = "mount", feature = "remote"))]
mod private_folder;
pub mod recipe;
mod shell_word;
pub mod source;
mod temp_file;
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
