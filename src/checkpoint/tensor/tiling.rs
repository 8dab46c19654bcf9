//! Joins boxes to a tensor, and cuts ranges of its values into boxes.
//!
//! Boxes must cover a tensor exactly: no value is in two of them, and none is in no box.

use super::Shape;
use super::bytes::{ByteRun, TensorBox, TensorBytes};

/// Maximum number of boxes of one tensor: a hundred times the ranks of the largest training runs.
pub const MAX_BOX_COUNT: usize = 1 << 20;

/// Maximum number of pairs of boxes that are compared to find overlaps. Cuts by a mesh of 1,000 ranks need some
/// 30,000; only boxes without any order need more.
const MAX_COMPARISON_COUNT: u64 = 1 << 26;

/// Why boxes do not make a tensor.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TilingError {
    /// A box with another number of axes, or past the end of one.
    #[error("the piece at {start:?} with shape {counts:?} reaches past its shape {dims:?}")]
    OutOfBounds { start: Vec<u64>, counts: Vec<u64>, dims: Vec<u64> },
    /// Values that no box has.
    #[error("pieces are missing: those found hold {present} of {total} values")]
    Hole { present: u128, total: u128 },
    /// A value that two boxes have.
    #[error("two pieces hold the same values: those at {first:?} and {second:?}")]
    Overlap { first: Vec<u64>, second: Vec<u64> },
    /// More boxes than any training run writes, or without any order.
    #[error("it is cut into more pieces than any training run writes, or in no order")]
    TooIrregular,
    /// A shape that no file can hold.
    #[error("the size of its shape overflows")]
    Overflow,
}

/// Joins the boxes of a tensor of this shape. Fails unless they cover it exactly. Boxes without values are left out.
pub fn join_boxes(
    dims: &[u64],
    item_bytes: u64,
    boxes: Vec<TensorBox>,
) -> Result<TensorBytes, TilingError> {
    let mut boxes = boxes;
    for part in &boxes {
        let fits = part.start.len() == dims.len()
            && part.counts.len() == dims.len()
            && part.axes().zip(dims).all(|((start, count), &size)| {
                start.checked_add(count).is_some_and(|end| end <= size)
            });
        if !fits {
            return Err(TilingError::OutOfBounds {
                start: part.start.to_vec(),
                counts: part.counts.to_vec(),
                dims: dims.to_vec(),
            });
        }
    }
    boxes.retain(|part| !part.counts.contains(&0));
    let total = value_count(dims).filter(|count| count.checked_mul(item_bytes).is_some());
    let total = u128::from(total.ok_or(TilingError::Overflow)?);
    // A box is no larger than the whole.
    let counts = boxes.iter().filter_map(|part| value_count(&part.counts));
    let present = counts.map(u128::from).sum();
    if present < total {
        return Err(TilingError::Hole { present, total });
    }
    check_disjoint(dims.len(), &boxes)?;
    // Disjoint boxes within the shape hold at most its values.
    debug_assert_eq!(present, total);
    Ok(TensorBytes::from_boxes(dims.into(), item_bytes, boxes))
}

/// The boxes of a contiguous range of values of a tensor, at most two for each axis. The values follow one another in an
/// origin, from the first byte of `from` on.
pub fn boxes_of_values(
    dims: &[u64],
    item_bytes: u64,
    values: std::ops::Range<u64>,
    from: ByteRun,
) -> Vec<TensorBox> {
    let mut boxes = Vec::new();
    let mut at = values.start;
    while at < values.end {
        let (start, counts) = next_box(dims, at, values.end - at);
        let count = counts.iter().product::<u64>();
        let offset = from.offset + (at - values.start) * item_bytes;
        let run = ByteRun { origin: from.origin, offset, len: count * item_bytes };
        boxes.push(TensorBox { start, counts, bytes: TensorBytes::Run(run) });
        at += count;
    }
    boxes
}

/// The largest box of at most `max_count` values whose values follow one another in a tensor from a value on.
///
/// In a box, axes are fixed, then one has some steps, then the inner ones are whole.
pub fn next_box(dims: &[u64], first: u64, max_count: u64) -> (Shape, Shape) {
    let mut start: Shape = dims.iter().map(|_| 0).collect();
    let mut counts: Shape = dims.iter().map(|_| 1).collect();
    let mut rest = first;
    for (axis, &size) in dims.iter().enumerate().rev() {
        start[axis] = rest % size;
        rest /= size;
    }
    let mut inner = 1;
    for (axis, &size) in dims.iter().enumerate().rev() {
        let count = (size - start[axis]).min(max_count / inner);
        counts[axis] = count;
        inner *= count;
        if count < size {
            break;
        }
    }
    (start, counts)
}

/// The number of values of a shape; `None` if it overflows.
fn value_count(dims: &[u64]) -> Option<u64> {
    if dims.contains(&0) {
        return Some(0);
    }
    dims.iter().try_fold(1u64, |count, &size| count.checked_mul(size))
}

/// Fails if two boxes have a value in common. Sweeps along the axis that is cut most often.
fn check_disjoint(axis_count: usize, boxes: &[TensorBox]) -> Result<(), TilingError> {
    if boxes.len() > MAX_BOX_COUNT {
        return Err(TilingError::TooIrregular);
    }
    let overlap = |a: &TensorBox, b: &TensorBox| TilingError::Overlap {
        first: a.start.to_vec(),
        second: b.start.to_vec(),
    };
    let cut_count = |axis: &usize| {
        let mut starts: Vec<u64> = boxes.iter().map(|part| part.start[*axis]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(axis) = (0..axis_count).max_by_key(cut_count) else {
        return match boxes {
            [first, second, ..] => Err(overlap(first, second)),
            _ => Ok(()),
        };
    };
    let mut order: Vec<&TensorBox> = boxes.iter().collect();
    order.sort_by_key(|part| part.start[axis]);
    let mut open: Vec<&TensorBox> = Vec::new();
    let mut comparisons = 0;
    for part in order {
        comparisons += open.len() as u64 + 1;
        if comparisons > MAX_COMPARISON_COUNT {
            return Err(TilingError::TooIrregular);
        }
        open.retain(|other| other.start[axis] + other.counts[axis] > part.start[axis]);
        let intersects = |other: &&&TensorBox| {
            let mut axes = other.axes().zip(part.axes());
            axes.all(|((a, n), (b, m))| a < b + m && b < a + n)
        };
        if let Some(other) = open.iter().find(intersects) {
            return Err(overlap(other, part));
        }
        open.push(part);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::bytes::{is_contiguous, value_index};
    use super::*;
    use crate::checkpoint::OriginId;

    fn run(offset: u64, len: u64) -> ByteRun {
        ByteRun { origin: OriginId(0), offset, len }
    }

    fn part(start: &[u64], counts: &[u64]) -> TensorBox {
        let len = counts.iter().product();
        TensorBox {
            start: start.into(),
            counts: counts.into(),
            bytes: TensorBytes::Run(run(0, len)),
        }
    }

    fn join(dims: &[u64], boxes: &[(&[u64], &[u64])]) -> Result<TensorBytes, TilingError> {
        join_boxes(dims, 1, boxes.iter().map(|(start, counts)| part(start, counts)).collect())
    }

    #[test]
    fn boxes_must_cover_a_tensor_exactly() {
        assert!(join(&[4, 4], &[(&[0, 0], &[4, 2]), (&[0, 2], &[4, 2])]).is_ok());
        assert!(
            join(&[4, 4], &[(&[0, 0], &[2, 4]), (&[2, 0], &[2, 1]), (&[2, 1], &[2, 3])]).is_ok()
        );
        // Empty boxes are no pieces.
        assert!(join(&[1], &[(&[0], &[1]), (&[1], &[0])]).is_ok());
        assert!(join(&[], &[(&[], &[])]).is_ok());
        assert!(join(&[0, 3], &[]).is_ok());
        let hole = TilingError::Hole { present: 8, total: 16 };
        assert_eq!(join(&[4, 4], &[(&[0, 0], &[4, 2])]), Err(hole));
        for boxes in [
            &[(&[0u64, 0][..], &[4u64, 2][..]), (&[0, 1], &[4, 2]), (&[0, 3], &[4, 1])][..],
            &[(&[0, 0], &[4, 4]), (&[0, 0], &[4, 4])],
            &[(&[0, 0], &[2, 4]), (&[1, 0], &[2, 4])],
        ] {
            assert!(matches!(join(&[4, 4], boxes), Err(TilingError::Overlap { .. })), "{boxes:?}");
        }
        for (start, counts) in [
            (&[0u64, 3][..], &[4u64, 2][..]),
            (&[u64::MAX, 0], &[2, 4]),
            (&[0], &[4]),
            (&[0, 0], &[4]),
        ] {
            let error = join(&[4, 4], &[(start, counts)]).unwrap_err();
            assert!(matches!(error, TilingError::OutOfBounds { .. }), "{error}");
        }
        assert_eq!(join(&[u64::MAX; 3], &[]), Err(TilingError::Overflow));
    }

    #[test]
    fn boxes_without_order_are_refused_soon() {
        // Diagonal stripes that all reach across the axis that is cut most.
        let boxes = (0..20_000u64).map(|n| part(&[n % 2, n], &[40_000, 1])).collect();
        let started = std::time::Instant::now();
        assert!(join_boxes(&[40_002, 20_000], 1, boxes).is_err());
        assert!(started.elapsed().as_secs() < 10);
    }

    #[test]
    fn a_range_of_values_is_a_few_boxes_in_order() {
        let dims = [3, 4, 5];
        for first in 0..60 {
            for end in first..=60 {
                let boxes = boxes_of_values(&dims, 2, first..end, run(7, 0));
                assert!(boxes.len() <= 5, "{first}..{end}");
                let mut at = first;
                for part in &boxes {
                    let count: u64 = part.counts.iter().product();
                    assert!(is_contiguous(&dims, &part.counts));
                    assert_eq!(value_index(&dims, &part.start), at);
                    let bytes = run(7 + (at - first) * 2, count * 2);
                    assert_eq!(part.bytes, TensorBytes::Run(bytes));
                    at += count;
                }
                assert_eq!(at, end);
            }
        }
    }
}
