//! Gathers the bytes of tensors that lie in boxes.
//!
//! A range of a tensor is itself a few boxes. The intersection of one of these with a box of the tensor is read in the
//! order of its source, and scattered in memory. It is one read where it is contiguous there. So each byte is read once,
//! and the scratch memory never exceeds the request.

use crate::checkpoint::tensor::{
    AxisSlice, Boxes, Shape, TensorBox, TensorBytes, next_box, slice_by_items, value_index,
};
use crate::source::SourceError;

use super::whole_units::read_whole_units;

/// Reads bytes of a box: its bytes, an offset in them, and where they go.
pub type ReadBytes<'a> = dyn Fn(&TensorBytes, u64, &mut [u8]) -> Result<(), SourceError> + 'a;

/// Fills `out` with the tensor's bytes from `offset` on.
pub fn read_boxes(
    boxes: &Boxes,
    offset: u64,
    out: &mut [u8],
    read: &ReadBytes<'_>,
) -> Result<(), SourceError> {
    if boxes.are_contiguous() {
        return read_contiguous(boxes, offset, out, read);
    }
    let item_bytes = boxes.item_bytes();
    read_whole_units(item_bytes, offset, out, |values, at| {
        read_values(boxes, at / item_bytes, values, read)
    })
}

/// Reads from boxes that are each one range of the tensor's bytes.
fn read_contiguous(
    boxes: &Boxes,
    offset: u64,
    out: &mut [u8],
    read: &ReadBytes<'_>,
) -> Result<(), SourceError> {
    let parts = boxes.boxes();
    let first = parts.partition_point(|part| boxes.offset_of(part) + part.bytes.len() <= offset);
    let (mut at, mut rest) = (offset, out);
    for part in &parts[first..] {
        if rest.is_empty() {
            break;
        }
        let into = at - boxes.offset_of(part);
        let len = (part.bytes.len() - into).min(rest.len() as u64);
        let (now, after) = rest.split_at_mut(len as usize);
        read(&part.bytes, into, now)?;
        (at, rest) = (at + len, after);
    }
    Ok(())
}

/// Fills `out` with whole values, from a value on.
fn read_values(
    boxes: &Boxes,
    first: u64,
    out: &mut [u8],
    read: &ReadBytes<'_>,
) -> Result<(), SourceError> {
    let (dims, item_bytes) = (boxes.dims(), boxes.item_bytes());
    let mut scratch = Vec::new();
    let (mut at, mut rest) = (first, out);
    while !rest.is_empty() {
        let (start, counts) = next_box(dims, at, rest.len() as u64 / item_bytes);
        let count = counts.iter().product::<u64>();
        let (now, after) = rest.split_at_mut((count * item_bytes) as usize);
        for part in boxes.boxes() {
            if let Some(common) = Intersection::find(part, &start, &counts) {
                common.read(part, item_bytes, now, &mut scratch, read)?;
            }
        }
        (at, rest) = (at + count, after);
    }
    Ok(())
}

/// The intersection of a tensor's box with a requested box.
pub struct Intersection<'a> {
    /// The steps of each axis in the box of the tensor.
    pub in_part: Vec<AxisSlice>,
    /// The first step of each axis in the requested box.
    pub in_request: Shape,
    /// The number of steps of each axis of the requested box.
    pub request_counts: &'a [u64],
}

impl<'a> Intersection<'a> {
    pub fn find(part: &TensorBox, start: &[u64], counts: &'a [u64]) -> Option<Intersection<'a>> {
        let mut in_part = Vec::new();
        let mut in_request = Shape::new();
        for ((first, size), (&start, &count)) in part.axes().zip(start.iter().zip(counts)) {
            let range = first.max(start)..(first + size).min(start + count);
            if range.is_empty() {
                return None;
            }
            in_part.push(AxisSlice::range(range.start - first..range.end - first));
            in_request.push(range.start - start);
        }
        Some(Intersection { in_part, in_request, request_counts: counts })
    }

    /// Reads the common part, and puts it into the requested box `out`.
    fn read(
        &self,
        part: &TensorBox,
        item_bytes: u64,
        out: &mut [u8],
        scratch: &mut Vec<u8>,
        read: &ReadBytes<'_>,
    ) -> Result<(), SourceError> {
        let sliced;
        let bytes = match self.in_part.iter().zip(&*part.counts).all(|(s, &n)| s.count == n) {
            true => &part.bytes,
            false => {
                sliced = slice_by_items(&part.bytes, &part.counts, &self.in_part, item_bytes)
                    .expect("the values of a box are whole bytes");
                &sliced
            }
        };
        // The values that follow one another in the requested box. They are the steps of the innermost axis that is
        // not whole, and all steps of the axes within it.
        let axes = self.in_part.len();
        let is_partial = |axis: &usize| self.in_part[*axis].count != self.request_counts[*axis];
        let outer = (0..axes).rev().find(is_partial).unwrap_or(0);
        let run_values: u64 = self.in_part[outer..].iter().map(|slice| slice.count).product();
        let run = (run_values * item_bytes) as usize;
        let place = |steps: &[u64]| (value_index(self.request_counts, steps) * item_bytes) as usize;
        let mut steps = self.in_request.clone();
        if bytes.len() == run as u64 {
            let to = place(&steps);
            return read(bytes, 0, &mut out[to..to + run]);
        }
        scratch.resize(bytes.len() as usize, 0);
        read(bytes, 0, scratch)?;
        for piece in scratch.chunks_exact(run) {
            let to = place(&steps);
            out[to..to + run].copy_from_slice(piece);
            // The next step of the outer axes, the last of them moving fastest.
            for axis in (0..outer).rev() {
                steps[axis] += 1;
                if steps[axis] < self.in_request[axis] + self.in_part[axis].count {
                    break;
                }
                steps[axis] = self.in_request[axis];
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::super::scatter::read_by_scatters;
    use super::*;
    use crate::checkpoint::tensor::join_boxes;
    use crate::checkpoint::{Axis, ByteRun, Dtype, OpenOrigins, Origin, OriginId, Tensor};

    /// A tensor of boxes, and its bytes: the shape is cut at some steps of each axis, or into ranges of values. Each box
    /// is in an origin of its own, in C order or transposed.
    fn any_tensor() -> impl Strategy<Value = (Tensor, Vec<Origin>, Vec<u8>)> {
        let axis = (1u64..6, prop::collection::btree_set(0u64..6, 0..3));
        (prop::collection::vec(axis, 0..4), any::<bool>(), any::<bool>()).prop_map(
            |(axes, is_wide, is_transposed)| {
                let dims: Vec<u64> = axes.iter().map(|axis| axis.0).collect();
                let (dtype, item) = if is_wide { (Dtype::F32, 4) } else { (Dtype::U8, 1) };
                let total = dims.iter().product::<u64>() * item;
                let whole: Vec<u8> = (0..total).map(|n| (n * 37 % 251) as u8).collect();
                let mut corners: Vec<Vec<(u64, u64)>> = vec![Vec::new()];
                for (size, cuts) in &axes {
                    let mut edges: Vec<u64> =
                        cuts.iter().copied().filter(|cut| cut < size).collect();
                    edges.extend([0, *size]);
                    edges.sort_unstable();
                    edges.dedup();
                    let ranges: Vec<_> =
                        edges.windows(2).map(|two| (two[0], two[1] - two[0])).collect();
                    let with = |corner: &Vec<(u64, u64)>| {
                        let corner = corner.clone();
                        let add = move |&range: &(u64, u64)| [&corner[..], &[range]].concat();
                        ranges.iter().map(add).collect::<Vec<_>>()
                    };
                    corners = corners.iter().flat_map(with).collect();
                }
                let mut origins = Vec::new();
                let boxes = corners.into_iter().map(|corner| {
                    let (start, counts): (Shape, Shape) = corner.into_iter().unzip();
                    let (bytes, stored) = store_box(
                        &whole,
                        &dims,
                        &start,
                        &counts,
                        item,
                        is_transposed,
                        origins.len(),
                    );
                    origins.push(Origin::Memory(stored.into()));
                    TensorBox { start, counts, bytes }
                });
                let bytes = join_boxes(&dims, item, boxes.collect()).unwrap();
                (Tensor { name: "t".into(), dtype, shape: dims.into(), bytes }, origins, whole)
            },
        )
    }

    /// The bytes of a box as an origin has them, after three others, and their places in it.
    fn store_box(
        whole: &[u8],
        dims: &[u64],
        start: &[u64],
        counts: &[u64],
        item: u64,
        is_transposed: bool,
        origin: usize,
    ) -> (TensorBytes, Vec<u8>) {
        let total: u64 = counts.iter().product();
        let mut strides = vec![0; counts.len()];
        let mut stride = item;
        let mut order: Vec<usize> = (0..counts.len()).rev().collect();
        if is_transposed {
            order.reverse();
        }
        for axis in order {
            strides[axis] = stride;
            stride *= counts[axis];
        }
        let mut stored = vec![0; (3 + total * item) as usize];
        for n in 0..total {
            let mut rest = n;
            let mut steps: Vec<u64> = vec![0; counts.len()];
            for axis in (0..counts.len()).rev() {
                steps[axis] = rest % counts[axis];
                rest /= counts[axis];
            }
            let to: u64 = 3 + steps.iter().zip(&strides).map(|(a, b)| a * b).sum::<u64>();
            let global: Vec<u64> = steps.iter().zip(start).map(|(a, b)| a + b).collect();
            let from = value_index(dims, &global) * item;
            stored[to as usize..(to + item) as usize]
                .copy_from_slice(&whole[from as usize..(from + item) as usize]);
        }
        let axes = counts.iter().zip(&strides).filter(|(count, _)| **count > 1);
        let axes = axes.map(|(&count, &stride)| Axis { count, stride });
        (TensorBytes::from_axes(OriginId(origin as u32), 3, axes, item), stored)
    }

    proptest! {
        #[test]
        fn any_range_of_any_boxes_is_that_of_the_whole(
            (tensor, origins, whole) in any_tensor(), start in 0.0..1.0f64, len in 0.0..1.0f64,
        ) {
            let sources = OpenOrigins::open(&origins, None).unwrap();
            let start = (start * whole.len() as f64) as usize;
            let end = start + (len * (whole.len() - start) as f64).ceil() as usize;
            let mut got = vec![0; end - start];
            sources.read(&tensor.bytes, start as u64, &mut got).unwrap();
            prop_assert_eq!(&got, &whole[start..end]);
            let item = u64::from(tensor.dtype.bits() / 8);
            let range = start as u64..end as u64;
            let parts = read_by_scatters(&sources, &tensor.bytes, range.clone(), 7, item);
            let cuts_values = range.start % item != 0 || range.end % item != 0;
            prop_assert!(parts.is_some() || cuts_values);
            prop_assert!(parts.is_none_or(|parts| parts == got));
            // The parts are the same bytes.
            let mut reached = 0;
            for part in tensor.bytes.parts() {
                prop_assert_eq!(part.offset, reached);
                reached += part.len;
                if let Some(run) = part.run {
                    let mut got = vec![0; part.len as usize];
                    sources.origin(run.origin).read_exact_at(&mut got, run.offset).unwrap();
                    prop_assert_eq!(&got, &whole[part.offset as usize..reached as usize]);
                }
            }
            prop_assert_eq!(reached, whole.len() as u64);
        }

        #[test]
        fn a_slice_of_boxes_is_that_of_the_whole(
            (tensor, origins, whole) in any_tensor(), picks in prop::collection::vec((0.0..1.0f64, 0.0..1.0f64, 1u64..3), 3),
        ) {
            let sources = OpenOrigins::open(&origins, None).unwrap();
            let slices: Vec<AxisSlice> = tensor.shape.iter().zip(picks).map(|(&size, (start, count, step))| {
                let start = (start * size as f64) as u64;
                let most = (size - start).div_ceil(step);
                AxisSlice { start, count: (count * (most + 1) as f64) as u64, step }
            }).collect();
            let sliced = tensor.slice(&slices).unwrap();
            let item = tensor.dtype.bits() as usize / 8;
            let mut expected = Vec::new();
            for n in 0..whole.len() / item {
                let (mut rest, mut is_in) = (n as u64, true);
                for (slice, &size) in slices.iter().zip(&tensor.shape).rev() {
                    let step = rest % size;
                    rest /= size;
                    is_in &= (0..slice.count).any(|k| slice.start + k * slice.step == step);
                }
                if is_in {
                    expected.extend_from_slice(&whole[n * item..(n + 1) * item]);
                }
            }
            let mut got = vec![0; sliced.bytes.len() as usize];
            sources.read(&sliced.bytes, 0, &mut got).unwrap();
            prop_assert_eq!(got, expected);
        }
    }

    #[test]
    fn a_sequential_read_reads_each_byte_once() {
        // Cut by columns over 8 ranks, in requests that end within rows and values.
        let (rows, columns, ranks, item) = (64u64, 40u64, 8u64, 4u64);
        let boxes = (0..ranks).map(|rank| {
            let counts = Shape::from_slice(&[rows, columns / ranks]);
            let len = rows * columns / ranks * item;
            let run = ByteRun { origin: OriginId(rank as u32), offset: 0, len };
            let start = Shape::from_slice(&[0, rank * columns / ranks]);
            TensorBox { start, counts, bytes: TensorBytes::Run(run) }
        });
        let bytes = join_boxes(&[rows, columns], item, boxes.collect()).unwrap();
        let TensorBytes::Boxes(boxes) = bytes else { panic!("they are boxes") };
        let (len, read) = (rows * columns * item, Cell::new(0));
        let count = |_: &TensorBytes, _, out: &mut [u8]| {
            read.set(read.get() + out.len() as u64);
            Ok(())
        };
        let mut out = vec![0; 1000];
        for offset in (0..len).step_by(out.len()) {
            let wanted = out.len().min((len - offset) as usize);
            read_boxes(&boxes, offset, &mut out[..wanted], &count).unwrap();
        }
        assert!(read.get() >= len && read.get() * 10 <= len * 11, "{} of {len}", read.get());
    }
}
