//! Reads the bytes of a tensor from its origins, in the order of the tensor.

use crate::checkpoint::tensor::{OriginId, TensorBytes};
use crate::source::{ReadAt, SourceError};

use super::boxes_read::read_boxes;
use super::cast_read::read_cast;
use super::strided_read::read_strided;
use super::swapped_read::read_swapped;

/// Fills `out` with the bytes of a tensor from `offset` on. `origin` returns the bytes of an origin.
pub fn read_from<'a>(
    bytes: &TensorBytes,
    offset: u64,
    out: &mut [u8],
    origin: &impl Fn(OriginId) -> &'a dyn ReadAt,
) -> Result<(), SourceError> {
    match bytes {
        TensorBytes::Run(run) => origin(run.origin).read_exact_at(out, run.offset + offset),
        TensorBytes::Grid(grid) => read_strided(origin(grid.origin), grid, offset, out),
        TensorBytes::Boxes(boxes) => {
            let read =
                |bytes: &TensorBytes, offset, out: &mut [u8]| read_from(bytes, offset, out, origin);
            read_boxes(boxes, offset, out, &read)
        }
        TensorBytes::Swapped { unit_bytes, inner } => {
            let read = |out: &mut [u8], offset: u64| read_from(inner, offset, out, origin);
            read_swapped(*unit_bytes, offset, out, read)
        }
        TensorBytes::Cast { from, to, inner } => {
            let read = |out: &mut [u8], offset: u64| read_from(inner, offset, out, origin);
            let borrow = |len: usize, offset: u64| match &**inner {
                TensorBytes::Run(run) => origin(run.origin).borrow_at(len, run.offset + offset),
                _ => None,
            };
            read_cast((*from, *to), offset, out, inner.is_strided(), borrow, read)
        }
    }
}
