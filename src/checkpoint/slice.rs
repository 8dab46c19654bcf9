//! Which bytes a part of a tensor has.
//!
//! In: a [`Tensor`], and for each of its axes which [`Steps`] are wanted. Out: a tensor of those alone,
//! whose bytes are arithmetic on those of the whole: nothing is read.

use super::{Axis, ByteRun, Dtype, Grid, OriginId, Shape, Tensor, TensorBytes};

/// Some steps of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisSlice {
    /// The first.
    pub start: u64,
    /// How many.
    pub count: u64,
    /// From one to the next; at least 1.
    pub step: u64,
}

impl AxisSlice {
    /// These and all between them.
    pub fn range(range: std::ops::Range<u64>) -> AxisSlice {
        AxisSlice { start: range.start, count: range.end.saturating_sub(range.start), step: 1 }
    }
}

/// Why there is no such part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// More axes than the tensor has.
    #[error("{asked} axes were asked for, and it has {has}")]
    TooManyAxes {
        /// So many were named.
        asked: usize,
        /// So many there are.
        has: usize,
    },
    /// Steps that are not there.
    #[error("axis {axis} has {size} steps, and step {wanted} was asked for")]
    OutOfBounds {
        /// The axis.
        axis: usize,
        /// How many steps it has.
        size: u64,
        /// The last that was wanted.
        wanted: u64,
    },
    /// Several values share a byte.
    #[error("its values are packed into bytes, and the part does not begin and end with one")]
    SubByte,
}

impl Tensor {
    /// Of one whose bytes are spread out: all from the first to the last of them, as a tensor of bytes, and how
    /// it lies there. What reads that reads one stretch, and puts it in order itself.
    pub fn strided_span(&self) -> Option<(Tensor, &Grid)> {
        let TensorBytes::Grid(grid) = &self.bytes else { return None };
        let run = ByteRun { origin: grid.origin, offset: grid.base, len: grid.span() };
        let (name, shape) = (self.name.clone(), Shape::from_slice(&[run.len]));
        Some((Tensor { name, dtype: Dtype::U8, shape, bytes: TensorBytes::Run(run) }, grid))
    }

    /// A part of it. Axes that are not named are whole.
    pub fn slice(&self, steps: &[AxisSlice]) -> Result<Tensor, SliceError> {
        let has = self.shape.len();
        if steps.len() > has {
            return Err(SliceError::TooManyAxes { asked: steps.len(), has });
        }
        let rest = self.shape[steps.len()..].iter().map(|&size| AxisSlice::range(0..size));
        let steps: Vec<AxisSlice> = steps.iter().copied().chain(rest).collect();
        for (axis, (one, &size)) in steps.iter().zip(&self.shape).enumerate() {
            let wanted = one.count.saturating_sub(1).saturating_mul(one.step.max(1));
            let wanted = one.start.saturating_add(wanted);
            if (one.count > 0 && wanted >= size) || one.start > size {
                return Err(SliceError::OutOfBounds { axis, size, wanted });
            }
        }
        let shape = steps.iter().map(|one| one.count).collect();
        Ok(Tensor {
            name: self.name.clone(),
            dtype: self.dtype,
            shape,
            bytes: self.slice_bytes(&steps)?,
        })
    }

    fn slice_bytes(&self, steps: &[AxisSlice]) -> Result<TensorBytes, SliceError> {
        let is_whole =
            |(one, size): (&AxisSlice, &u64)| one.start == 0 && one.count == *size && one.step == 1;
        if steps.iter().zip(&self.shape).all(is_whole) {
            return Ok(self.bytes.clone());
        }
        let (origin, at, _) = self.bytes.extent();
        if steps.iter().any(|one| one.count == 0) {
            return Ok(TensorBytes::Run(ByteRun { origin, offset: at, len: 0 }));
        }
        let bits = u64::from(self.dtype.bits());
        let (mut sizes, mut steps) = (self.shape.to_vec(), steps.to_vec());
        let item = if bits.is_multiple_of(8) {
            bits / 8
        } else {
            to_byte_units(bits, &mut sizes, &mut steps).ok_or(SliceError::SubByte)?;
            1
        };
        match &self.bytes {
            TensorBytes::Swapped { unit_bytes: unit, inner: of } => {
                let of = slice_strided(of, &sizes, &steps, item)?;
                Ok(TensorBytes::Swapped { unit_bytes: *unit, inner: Box::new(of) })
            }
            bytes => slice_strided(bytes, &sizes, &steps, item),
        }
    }
}

/// Turns the last axis from values of less than a byte into bytes, if the part begins and ends with one.
fn to_byte_units(bits: u64, sizes: &mut [u64], steps: &mut [AxisSlice]) -> Option<()> {
    let (size, one) = (sizes.last_mut()?, steps.last_mut()?);
    let whole = |count: u64| {
        let all = count.checked_mul(bits)?;
        all.is_multiple_of(8).then_some(all / 8)
    };
    if one.step != 1 {
        return None;
    }
    *size = whole(*size)?;
    *one = AxisSlice { start: whole(one.start)?, count: whole(one.count)?, step: 1 };
    Some(())
}

fn slice_strided(
    bytes: &TensorBytes,
    sizes: &[u64],
    steps: &[AxisSlice],
    item: u64,
) -> Result<TensorBytes, SliceError> {
    let (origin, base, strides) = strides(bytes, sizes, item).ok_or(SliceError::SubByte)?;
    let base = steps.iter().zip(&strides).fold(base, |at, (one, stride)| at + one.start * stride);
    let axes = steps.iter().zip(&strides);
    let axes = axes.filter(|(one, _)| one.count > 1);
    let axes =
        axes.map(|(one, stride)| Axis { count: one.count, stride: one.step.max(1) * stride });
    Ok(TensorBytes::from_axes(origin, base, axes, item))
}

/// The bytes from one step of each axis of a tensor to the next. A [`Bytes`] has merged those that
/// step through the same bytes; that is undone here.
fn strides(bytes: &TensorBytes, sizes: &[u64], item: u64) -> Option<(OriginId, u64, Vec<u64>)> {
    let mut left: Vec<Axis> = Vec::new();
    let (origin, base, run) = match bytes {
        TensorBytes::Run(run) => (run.origin, run.offset, run.len),
        TensorBytes::Grid(grid) => {
            left.extend(&grid.axes);
            (grid.origin, grid.base, grid.piece_bytes)
        }
        TensorBytes::Swapped { .. } => return None,
    };
    left.push(Axis { count: run / item, stride: item });
    let mut at = left.pop()?;
    let mut strides = vec![0; sizes.len()];
    for (stride, &size) in strides.iter_mut().zip(sizes).rev().filter(|(_, size)| **size > 1) {
        if at.count == 1 {
            at = left.pop()?;
        }
        *stride = at.stride;
        if !at.count.is_multiple_of(size) {
            return None;
        }
        at = Axis { count: at.count / size, stride: at.stride * size };
    }
    Some((origin, base, strides))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Dtype, OpenSources, Origin};
    use super::*;

    /// The bytes of a tensor whose axes have these strides, from the definition.
    fn plainly(source: &[u8], base: u64, dims: &[(u64, u64)], item: u64) -> Vec<u8> {
        let Some(((count, stride), inner)) = dims.split_first() else {
            return source[base as usize..(base + item) as usize].to_vec();
        };
        (0..*count).flat_map(|n| plainly(source, base + n * stride, inner, item)).collect()
    }

    proptest! {
        #[test]
        fn a_part_is_what_its_definition_says_however_the_whole_lies(
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
            let mut expected = plainly(&source, from, &dims, item);
            if swap {
                expected.chunks_exact_mut(4).for_each(<[u8]>::reverse);
            }
            let origins = [Origin::Memory(source.into())];
            let mut got = vec![0; part.bytes.len() as usize];
            OpenSources::open(&origins, None).unwrap().read(&part.bytes, 0, &mut got).unwrap();
            prop_assert_eq!(&got, &expected);
            // And a part of the part.
            if let Some(first) = part.shape.first().filter(|&&count| count > 1) {
                let half = part.slice(&[AxisSlice::range(0..first / 2)]).unwrap();
                let mut got = vec![0; half.bytes.len() as usize];
                OpenSources::open(&origins, None).unwrap().read(&half.bytes, 0, &mut got).unwrap();
                prop_assert_eq!(&got[..], &expected[..got.len()]);
            }
        }
    }

    #[test]
    fn what_is_not_there_is_refused() {
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
            SliceError::TooManyAxes { asked: 3, has: 2 }
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
