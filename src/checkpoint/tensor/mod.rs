//! A tensor: its name, type and shape, and the places of its bytes.

mod bytes;
mod dtype;
mod name;
mod overlaps;
mod slice;

use smallvec::SmallVec;

pub use bytes::{Axis, ByteRun, Grid, Origin, OriginId, TensorBytes};
pub use dtype::{Dtype, StorageElement};
pub use name::TensorName;
pub use overlaps::{MAX_OVERLAP_COUNT, find_overlaps};
pub use slice::{AxisSlice, SliceError};

/// A shape. The shape of nearly every weight takes no memory of its own.
pub type Shape = SmallVec<[u64; 2]>;

/// A named tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The name, unique in its checkpoint.
    pub name: TensorName,
    /// The element type.
    pub dtype: Dtype,
    /// The shape; empty for a scalar.
    pub shape: Shape,
    /// The places of its bytes, in C order and little-endian.
    pub bytes: TensorBytes,
}

impl Tensor {
    /// The kind of its layout, given its checkpoint's origins.
    pub fn layout_kind(&self, origins: &[Origin]) -> LayoutKind {
        let OriginId(origin) = self.bytes.extent().origin;
        if matches!(origins.get(origin as usize), Some(Origin::Memory(_))) {
            return LayoutKind::Memory;
        }
        match &self.bytes {
            TensorBytes::Run(_) => LayoutKind::Run,
            TensorBytes::Swapped { .. } => LayoutKind::Swapped,
            TensorBytes::Grid(grid) if grid.has_repeats() => LayoutKind::Expanded,
            TensorBytes::Grid(_) => LayoutKind::Strided,
        }
    }

    /// The slice that takes some steps of each axis. Axes that are not named are whole.
    pub fn slice(&self, axes: &[AxisSlice]) -> Result<Tensor, SliceError> {
        let (shape, bytes) = slice::slice_bytes(&self.bytes, self.dtype, &self.shape, axes)?;
        Ok(Tensor { name: self.name.clone(), dtype: self.dtype, shape, bytes })
    }

    /// The span of a strided tensor as a tensor of bytes, and the grid by which the caller puts them in order.
    /// The span is one read.
    pub fn strided_span(&self) -> Option<(Tensor, &Grid)> {
        let TensorBytes::Grid(grid) = &self.bytes else { return None };
        let run = self.bytes.extent();
        let (name, shape) = (self.name.clone(), Shape::from_slice(&[run.len]));
        Some((Tensor { name, dtype: Dtype::U8, shape, bytes: TensorBytes::Run(run) }, grid))
    }
}

/// The layout of a tensor's bytes, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LayoutKind {
    /// Contiguous in a file.
    Run,
    /// Strided, each byte read once.
    Strided,
    /// Strided, some bytes read more than once.
    Expanded,
    /// In the other byte order.
    Swapped,
    /// Unpacked into memory.
    Memory,
}
