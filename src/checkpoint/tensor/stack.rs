//! Stacks tensors along a new first axis, and takes single steps of an axis: arithmetic on places. Nothing is read.

use super::bytes::{TensorBox, TensorBytes};
use super::slice::{AxisSlice, SliceError};
use super::{Shape, Tensor, TensorName};

/// Tensors that cannot be stacked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StackError {
    /// There is nothing to stack.
    #[error("there is no tensor")]
    Empty,
    /// A tensor of another type or shape than the first.
    #[error("`{other}` is of another type or shape than `{first}`")]
    Differs {
        /// The name of the first tensor.
        first: String,
        /// The name of the tensor that differs.
        other: String,
    },
    /// Several values share a byte that no tensor has alone.
    #[error("its elements share bytes, and its rows do not end at byte boundaries")]
    SubByte,
}

impl Tensor {
    /// The stack of tensors of one type and shape, along a new first axis.
    pub fn stack(name: TensorName, tensors: Vec<Tensor>) -> Result<Tensor, StackError> {
        let first = tensors.first().ok_or(StackError::Empty)?;
        let is_same = |other: &&Tensor| other.dtype == first.dtype && other.shape == first.shape;
        if let Some(other) = tensors.iter().find(|other| !is_same(other)) {
            let (first, other) = (first.name.to_string(), other.name.to_string());
            return Err(StackError::Differs { first, other });
        }
        let (dtype, count) = (first.dtype, tensors.len() as u64);
        let shape: Shape = std::iter::once(count).chain(first.shape.iter().copied()).collect();
        if first.bytes.is_empty() {
            return Ok(Tensor { name, dtype, bytes: first.bytes.clone(), shape });
        }
        let (inner, item_bytes) = byte_dims(first).ok_or(StackError::SubByte)?;
        let dims: Shape = std::iter::once(count).chain(inner.iter().copied()).collect();
        let mut boxes = Vec::new();
        for (step, tensor) in (0..).zip(tensors) {
            let prefixed = |first: u64, rest: &[u64]| -> Shape {
                std::iter::once(first).chain(rest.iter().copied()).collect()
            };
            match tensor.bytes {
                TensorBytes::Boxes(parts) => {
                    let parts = parts.boxes().iter().map(|part| TensorBox {
                        start: prefixed(step, &part.start),
                        counts: prefixed(1, &part.counts),
                        bytes: part.bytes.clone(),
                    });
                    boxes.extend(parts);
                }
                bytes => boxes.push(TensorBox {
                    start: prefixed(step, &vec![0; inner.len()]),
                    counts: prefixed(1, &inner),
                    bytes,
                }),
            }
        }
        let bytes = TensorBytes::from_boxes(dims, item_bytes, boxes);
        Ok(Tensor { name, dtype, shape, bytes })
    }

    /// One step of an axis, without the axis.
    pub fn select(&self, axis: usize, step: u64) -> Result<Tensor, SliceError> {
        let whole = self.shape.iter().map(|&size| AxisSlice::range(0..size));
        let mut slices: Vec<AxisSlice> = whole.collect();
        let (requested, has) = (axis + 1, slices.len());
        let slice = slices.get_mut(axis).ok_or(SliceError::TooManyAxes { requested, has })?;
        *slice = AxisSlice::range(step..step + 1);
        let mut selected = self.slice(&slices)?;
        selected.shape.remove(axis);
        selected.bytes = selected.bytes.without_axis(axis);
        Ok(selected)
    }
}

/// The shape in units of whole bytes, and the bytes of a unit; `None` if a row ends within a byte.
fn byte_dims(tensor: &Tensor) -> Option<(Shape, u64)> {
    let (bits, mut dims) = (u64::from(tensor.dtype.bits()), tensor.shape.clone());
    if bits.is_multiple_of(8) {
        return Some((dims, bits / 8));
    }
    let last = dims.last_mut()?;
    let row_bits = last.checked_mul(bits)?;
    *last = row_bits / 8;
    row_bits.is_multiple_of(8).then_some((dims, 1))
}
