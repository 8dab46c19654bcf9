//! Reads tensor bytes from the sources of a checkpoint.

mod boxes_read;
mod open_origins;
mod patched_read;
mod strided_read;
mod swapped_read;
mod whole_units;

pub use open_origins::OpenOrigins;
