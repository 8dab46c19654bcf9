//! Casts of tensors: which types can be cast to which, and how values are converted.

mod kernels;
mod small_floats;

use super::dtype::Dtype;

pub use kernels::cast_kernel;

/// A cast that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{from} is not cast to {to}: {reason}")]
pub struct CastError {
    /// The type of the tensor.
    pub from: Dtype,
    /// The requested type.
    pub to: Dtype,
    reason: &'static str,
}

impl CastError {
    /// Fails unless the cast exists. A type is always cast to itself.
    pub fn check(from: Dtype, to: Dtype) -> Result<(), CastError> {
        if from == to || cast_kernel(from, to).is_some() {
            return Ok(());
        }
        let reason = match (is_float(from), is_float(to)) {
            (true, false) => "floats are cast only to floats",
            (false, _) if is_integer(from) => "the new type does not hold every value",
            _ => "there is no such cast",
        };
        Err(CastError { from, to, reason })
    }
}

fn is_float(dtype: Dtype) -> bool {
    cast_kernel(dtype, Dtype::F8E8M0).is_some() || dtype == Dtype::F8E8M0
}

fn is_integer(dtype: Dtype) -> bool {
    use Dtype::{Bool, I8, I16, I32, I64, U8, U16, U32, U64};
    matches!(dtype, Bool | I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64)
}
