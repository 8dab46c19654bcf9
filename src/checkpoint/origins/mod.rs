//! Reads tensor bytes from the sources of a checkpoint.

mod boxes_read;
mod cast_read;
mod converted_run;
mod open_origins;
mod patched_read;
mod plain_origins;
mod scatter;
mod strided_read;
mod swapped_read;
mod tensor_read;
mod whole_units;

pub(crate) use converted_run::ConvertedRun;
pub use open_origins::OpenOrigins;
pub(crate) use scatter::{Scatter, scatters_of};
