//! Slices tensors: the places of some steps of each axis, as arithmetic on those of the whole. Nothing is read.

use std::ops::Range;

use super::Shape;
use super::bytes::{Axis, Boxes, ByteRun, OriginId, TensorBox, TensorBytes};
use super::dtype::Dtype;

/// Some steps of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisSlice {
    /// The first step.
    pub start: u64,
    /// The number of steps.
    pub count: u64,
    /// The distance from one step to the next; at least 1.
    pub step: u64,
}

impl AxisSlice {
    /// Every step of a range.
    pub fn range(range: Range<u64>) -> AxisSlice {
        AxisSlice { start: range.start, count: range.end.saturating_sub(range.start), step: 1 }
    }
}

/// Why there is no such slice.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// More axes than the tensor has.
    #[error("{requested} axes were asked for, and it has {has}")]
    TooManyAxes {
        /// The number of axes in the request.
        requested: usize,
        /// The number of axes of the tensor.
        has: usize,
    },
    /// Steps past the end of an axis.
    #[error("axis {axis} has {size} steps, and step {last} was asked for")]
    OutOfBounds {
        axis: usize,
        /// The number of its steps.
        size: u64,
        /// The last step in the request.
        last: u64,
    },
    /// Several values share a byte.
    #[error("its elements share bytes, and the slice does not begin and end at byte boundaries")]
    SubByte,
}

/// The shape and the bytes of a slice. Axes that are not named are whole.
pub fn slice_bytes(
    bytes: &TensorBytes,
    dtype: Dtype,
    shape: &[u64],
    axes: &[AxisSlice],
) -> Result<(Shape, TensorBytes), SliceError> {
    let has = shape.len();
    if axes.len() > has {
        return Err(SliceError::TooManyAxes { requested: axes.len(), has });
    }
    let rest = shape[axes.len()..].iter().map(|&size| AxisSlice::range(0..size));
    let mut slices: Vec<AxisSlice> = axes.iter().copied().chain(rest).collect();
    for (axis, (slice, &size)) in slices.iter().zip(shape).enumerate() {
        let span = slice.count.saturating_sub(1).saturating_mul(slice.step.max(1));
        let last = slice.start.saturating_add(span);
        if (slice.count > 0 && last >= size) || slice.start > size {
            return Err(SliceError::OutOfBounds { axis, size, last });
        }
    }
    let sliced_shape = slices.iter().map(|slice| slice.count).collect();
    let is_whole = |(slice, size): (&AxisSlice, &u64)| {
        slice.start == 0 && slice.count == *size && slice.step == 1
    };
    if slices.iter().zip(shape).all(is_whole) {
        return Ok((sliced_shape, bytes.clone()));
    }
    let ByteRun { origin, offset, .. } = bytes.first_extent();
    if slices.iter().any(|slice| slice.count == 0) {
        return Ok((sliced_shape, TensorBytes::Run(ByteRun { origin, offset, len: 0 })));
    }
    let bits = u64::from(dtype.bits());
    let mut sizes = shape.to_vec();
    let item_bytes = if bits.is_multiple_of(8) {
        bits / 8
    } else {
        to_byte_units(bits, &mut sizes, &mut slices).ok_or(SliceError::SubByte)?;
        1
    };
    let sliced = slice_by_items(bytes, &sizes, &slices, item_bytes)?;
    Ok((sliced_shape, sliced))
}

/// Turns the last axis from values of less than a byte into bytes; `None` unless the slice begins and ends with one.
fn to_byte_units(bits: u64, sizes: &mut [u64], slices: &mut [AxisSlice]) -> Option<()> {
    let (size, slice) = (sizes.last_mut()?, slices.last_mut()?);
    let to_bytes = |count: u64| {
        let all_bits = count.checked_mul(bits)?;
        all_bits.is_multiple_of(8).then_some(all_bits / 8)
    };
    if slice.step != 1 {
        return None;
    }
    *size = to_bytes(*size)?;
    *slice = AxisSlice { start: to_bytes(slice.start)?, count: to_bytes(slice.count)?, step: 1 };
    Some(())
}

/// The bytes of a slice that is neither whole nor empty, of a tensor whose values are whole bytes.
pub fn slice_by_items(
    bytes: &TensorBytes,
    sizes: &[u64],
    slices: &[AxisSlice],
    item_bytes: u64,
) -> Result<TensorBytes, SliceError> {
    match bytes {
        TensorBytes::Swapped { unit_bytes, inner } => Ok(TensorBytes::Swapped {
            unit_bytes: *unit_bytes,
            inner: Box::new(slice_strided(inner, sizes, slices, item_bytes)?),
        }),
        TensorBytes::Cast { from, to, inner } => {
            let item_bytes = u64::from(from.bits()) / 8;
            let inner = Box::new(slice_by_items(inner, sizes, slices, item_bytes)?);
            Ok(TensorBytes::Cast { from: *from, to: *to, inner })
        }
        TensorBytes::Boxes(boxes) => slice_boxes(boxes, slices, item_bytes),
        bytes => slice_strided(bytes, sizes, slices, item_bytes),
    }
}

/// Slices each box that has a part of the slice.
fn slice_boxes(
    boxes: &Boxes,
    slices: &[AxisSlice],
    item_bytes: u64,
) -> Result<TensorBytes, SliceError> {
    if boxes.item_bytes() != item_bytes {
        return Err(SliceError::SubByte);
    }
    let mut sliced = Vec::new();
    for part in boxes.boxes() {
        let mut start = Shape::new();
        let mut inner = Vec::with_capacity(slices.len());
        for ((first, count), slice) in part.axes().zip(slices) {
            let step = slice.step.max(1);
            // The steps of the slice that lie in the box, by their number in the slice.
            let before = first.saturating_sub(slice.start).div_ceil(step);
            let until = (first + count).saturating_sub(slice.start).div_ceil(step);
            let range = before..until.min(slice.count);
            if range.is_empty() {
                break;
            }
            start.push(range.start);
            inner.push(AxisSlice {
                start: slice.start + range.start * step - first,
                count: range.end - range.start,
                step,
            });
        }
        if inner.len() == slices.len() {
            let bytes = slice_by_items(&part.bytes, &part.counts, &inner, item_bytes)?;
            let counts = inner.iter().map(|slice| slice.count).collect();
            sliced.push(TensorBox { start, counts, bytes });
        }
    }
    let dims = slices.iter().map(|slice| slice.count).collect();
    Ok(TensorBytes::from_boxes(dims, item_bytes, sliced))
}

fn slice_strided(
    bytes: &TensorBytes,
    sizes: &[u64],
    slices: &[AxisSlice],
    item_bytes: u64,
) -> Result<TensorBytes, SliceError> {
    let (origin, base, strides) =
        strides_of_items(bytes, sizes, item_bytes).ok_or(SliceError::SubByte)?;
    let axes = || slices.iter().zip(&strides);
    let base = axes().fold(base, |at, (slice, stride)| at + slice.start * stride);
    let axes = axes()
        .filter(|(slice, _)| slice.count > 1)
        .map(|(slice, stride)| Axis { count: slice.count, stride: slice.step.max(1) * stride });
    Ok(TensorBytes::from_axes(origin, base, axes, item_bytes))
}

/// Origin, first byte, and the stride of each axis in bytes. A [`TensorBytes`] merges axes that step through
/// adjacent bytes; this divides them again.
pub fn strides_of_items(
    bytes: &TensorBytes,
    sizes: &[u64],
    item_bytes: u64,
) -> Option<(OriginId, u64, Vec<u64>)> {
    let mut merged: Vec<Axis> = Vec::new();
    let (origin, base, run) = match bytes {
        TensorBytes::Run(run) => (run.origin, run.offset, run.len),
        TensorBytes::Grid(grid) => {
            merged.extend(&grid.axes);
            (grid.origin, grid.base, grid.piece_bytes)
        }
        TensorBytes::Swapped { .. } | TensorBytes::Cast { .. } | TensorBytes::Boxes(_) => {
            return None;
        }
    };
    merged.push(Axis { count: run / item_bytes, stride: item_bytes });
    let mut rest = merged.pop()?;
    let mut strides = vec![0; sizes.len()];
    for (stride, &size) in strides.iter_mut().zip(sizes).rev().filter(|(_, size)| **size > 1) {
        if rest.count == 1 {
            rest = merged.pop()?;
        }
        *stride = rest.stride;
        if !rest.count.is_multiple_of(size) {
            return None;
        }
        rest = Axis { count: rest.count / size, stride: rest.stride * size };
    }
    Some((origin, base, strides))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::OpenOrigins;
    use crate::checkpoint::tensor::{Dtype, Origin, Tensor};

    /// The bytes of a tensor whose axes have these strides, from the definition.
    fn by_definition(source: &[u8], base: u64, dims: &[(u64, u64)], item: u64) -> Vec<u8> {
        let Some(((count, stride), inner)) = dims.split_first() else {
            return source[base as usize..(base + item) as usize].to_vec();
        };
        (0..*count).flat_map(|n| by_definition(source, base + n * stride, inner, item)).collect()
    }

    proptest! {
        #[test]
        fn a_slice_matches_its_definition_in_any_layout(
            // Of each axis: its size, its place in the order of strides, start, count and step.
            axes in prop::collection::vec((1u64..5, 0u32..9, 0.0..1.0f64, 0.0..1.0f64, 1u64..3, any::<bool>()), 0..5),
            wide in any::<bool>(), swap in any::<bool>(), gap in 0u64..3,
        ) {
            let (dtype, item) = if wide { (Dtype::F32, 4) } else { (Dtype::U8, 1) };
            let mut order: Vec<usize> = (0..axes.len()).collect();
            order.sort_by_key(|&n| axes[n].1);
            let mut strides = vec![0; axes.len()];
            let mut stride = item;
            for &n in &order {
                let repeats = axes[n].5 && axes[n].1 == 0;
                strides[n] = if repeats { 0 } else { stride };
                if !repeats {
                    stride = stride * axes[n].0 + gap / 2 * item;
                }
            }
            let source: Vec<u8> = (0..stride + 8).map(|n| (n * 37 % 251) as u8).collect();
            let shape: Vec<u64> = axes.iter().map(|axis| axis.0).collect();
            let whole = axes.iter().zip(&strides).filter(|(axis, _)| axis.0 > 1);
            let whole = whole.map(|(axis, &stride)| Axis { count: axis.0, stride });
            let bytes = TensorBytes::from_axes(OriginId(0), 3, whole, item);
            let swap = swap && wide;
            let bytes = if swap { TensorBytes::Swapped { unit_bytes: 4, inner: Box::new(bytes) } } else { bytes };
            let tensor = Tensor { name: "t".into(), dtype, shape: shape.into(), bytes };
            let steps: Vec<AxisSlice> = axes.iter().map(|&(size, _, start, count, step, _)| {
                let start = (start * size as f64) as u64;
                let most = (size - start).div_ceil(step);
                AxisSlice { start, count: (count * (most + 1) as f64) as u64, step }
            }).collect();

            let part = tensor.slice(&steps).unwrap();
            let from = steps.iter().zip(&strides).fold(3, |at, (one, stride)| at + one.start * stride);
            let dims: Vec<(u64, u64)> =
                steps.iter().zip(&strides).map(|(one, stride)| (one.count, one.step * stride)).collect();
            let mut expected = by_definition(&source, from, &dims, item);
            if swap {
                expected.chunks_exact_mut(4).for_each(<[u8]>::reverse);
            }
            let origins = [Origin::Memory(source.into())];
            let mut got = vec![0; part.bytes.len() as usize];
            OpenOrigins::open(&origins, None).unwrap().read(&part.bytes, 0, &mut got).unwrap();
            prop_assert_eq!(&got, &expected);
            // And a part of the part.
            if let Some(first) = part.shape.first().filter(|&&count| count > 1) {
                let half = part.slice(&[AxisSlice::range(0..first / 2)]).unwrap();
                let mut got = vec![0; half.bytes.len() as usize];
                OpenOrigins::open(&origins, None).unwrap().read(&half.bytes, 0, &mut got).unwrap();
                prop_assert_eq!(&got[..], &expected[..got.len()]);
            }
        }
    }

    #[test]
    fn slices_out_of_bounds_are_refused() {
        let run = ByteRun { origin: OriginId(0), offset: 0, len: 6 };
        let tensor = |dtype, shape: &[u64]| Tensor {
            name: "t".into(),
            dtype,
            shape: shape.into(),
            bytes: TensorBytes::Run(run),
        };
        let plain = tensor(Dtype::U8, &[2, 3]);
        let whole = AxisSlice::range(0..2);
        assert_eq!(
            plain.slice(&[whole; 3]).unwrap_err(),
            SliceError::TooManyAxes { requested: 3, has: 2 }
        );
        for steps in [
            AxisSlice::range(1..3),
            AxisSlice { start: 0, count: 2, step: 2 },
            AxisSlice::range(3..3),
        ] {
            let refused = plain.slice(&[steps]).unwrap_err();
            assert!(
                matches!(refused, SliceError::OutOfBounds { axis: 0, size: 2, .. }),
                "{refused}"
            );
        }
        let most = AxisSlice { start: u64::MAX, count: u64::MAX, step: u64::MAX };
        assert!(plain.slice(&[most]).is_err());
        let packed = tensor(Dtype::F4, &[2, 6]);
        assert_eq!(
            packed.slice(&[whole, AxisSlice::range(1..4)]).unwrap_err(),
            SliceError::SubByte
        );
        let half = packed.slice(&[AxisSlice::range(1..2), AxisSlice::range(2..6)]).unwrap();
        assert_eq!(half.bytes, TensorBytes::Run(ByteRun { offset: 4, len: 2, ..run }));
    }
}
