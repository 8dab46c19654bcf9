//! Files of this machine: opened beneath a directory by the kernel, and held by a descriptor.

mod directory;
mod file;
mod long_path;

pub use directory::{LocalDirectory, is_hub_repository};
pub use file::{LocalFile, read_available};
