//! A tensor: its name, type and shape, and the places of its bytes.

mod bytes;
mod cast;
mod dtype;
mod name;
mod origin;
mod overlaps;
mod patched;
mod slice;
mod stack;
mod tiling;

use smallvec::SmallVec;

pub use bytes::{
    Axis, Boxes, ByteRun, Grid, OriginId, TensorBox, TensorBytes, TensorPart, value_index,
};
pub use cast::{CastError, cast_kernel};
pub use dtype::{Dtype, MAX_ELEMENT_BYTES, StorageElement};
pub use name::TensorName;
pub use origin::Origin;
pub use overlaps::{MAX_OVERLAP_COUNT, find_overlaps};
pub use patched::{
    ChecksumFormat, DeltaEncoding, PatchDamage, PatchId, PatchLayer, PatchedBytes, TensorChecksum,
};
pub use slice::{AxisSlice, SliceError};
pub(super) use slice::{slice_by_items, strides_of_items};
pub use stack::StackError;
pub use tiling::{TilingError, boxes_of_values, join_boxes, next_box};

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
    /// Joins the boxes of a tensor. `shape` and the boxes count elements as torch does.
    pub fn join(
        name: TensorName,
        dtype: Dtype,
        shape: &[u64],
        boxes: Vec<TensorBox>,
    ) -> Result<Tensor, TilingError> {
        let whole = dtype.safetensors_shape(shape).ok_or(TilingError::Overflow)?;
        dtype.byte_len(&whole).ok_or(TilingError::Overflow)?;
        let bytes = join_boxes(shape, dtype.torch_item_bytes(), boxes)?;
        Ok(Tensor { name, dtype, shape: whole, bytes })
    }

    /// The shape in elements as torch counts them.
    pub fn torch_shape(&self) -> Shape {
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last /= self.dtype.torch_packing();
        }
        shape
    }

    /// The kind of its layout, given its checkpoint's origins.
    pub fn layout_kind(&self, origins: &[Origin]) -> LayoutKind {
        let OriginId(origin) = self.bytes.first_extent().origin;
        match origins.get(origin as usize) {
            Some(Origin::Memory(_)) => return LayoutKind::Memory,
            Some(Origin::Patched(_)) => return LayoutKind::Patched,
            Some(Origin::File(_)) | None => {}
        }
        match &self.bytes {
            TensorBytes::Run(_) => LayoutKind::Run,
            TensorBytes::Swapped { .. } => LayoutKind::Swapped,
            TensorBytes::Cast { .. } => LayoutKind::Cast,
            TensorBytes::Grid(grid) if grid.has_repeats() => LayoutKind::Expanded,
            TensorBytes::Grid(_) => LayoutKind::Strided,
            TensorBytes::Boxes(_) => LayoutKind::Boxes,
        }
    }

    /// The slice that takes some steps of each axis. Axes that are not named are whole.
    pub fn slice(&self, axes: &[AxisSlice]) -> Result<Tensor, SliceError> {
        let (shape, bytes) = slice::slice_bytes(&self.bytes, self.dtype, &self.shape, axes)?;
        Ok(Tensor { name: self.name.clone(), dtype: self.dtype, shape, bytes })
    }

    /// The same values as another type.
    pub fn cast(self, to: Dtype) -> Result<Tensor, CastError> {
        let bytes = self.bytes.cast(self.dtype, to)?;
        Ok(Tensor { dtype: to, bytes, ..self })
    }

    /// The span of a strided tensor as a tensor of bytes, and the grid by which the caller puts them in order.
    /// The span is one read.
    pub fn strided_span(&self) -> Option<(Tensor, &Grid)> {
        let TensorBytes::Grid(grid) = &self.bytes else { return None };
        let run = self.bytes.first_extent();
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
    /// In boxes in several places.
    Boxes,
    /// In the other byte order.
    Swapped,
    /// Cast from another type.
    Cast,
    /// Unpacked into memory.
    Memory,
    /// Changed by deltas.
    Patched,
}
