//! Cuts of the axes of a tensor over ranks, as torch cuts them, and the boxes that a rank keeps.

use crate::checkpoint::tensor::Shape;

/// Maximum number of ranges that an axis of a tensor is cut into for one rank: more than the ranks of any run.
const MAX_RANGE_COUNT: usize = 1 << 16;

/// A box of a whole tensor, and its place in the rank's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalBox {
    pub start: Shape,
    pub counts: Shape,
    /// The first step of each axis in the rank's tensor.
    pub local_start: Shape,
}

/// Steps of an axis that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisRange {
    pub start: u64,
    pub count: u64,
}

/// A cut over some ranks, of which this is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisCut {
    pub ranks: u64,
    pub rank: u64,
}

/// The cuts of one axis of a tensor, in the order in which they were made. With each comes the number of pieces that it
/// cuts one by one.
///
/// `cuts` has them in the order of the mesh, each with its split factor. A factor is the number of ranks, of later axes
/// of the mesh, that cut before: tensor parallelism before FSDP. If no order gives these factors, they count pieces that
/// no rank cut, such as fused weights.
pub fn order_cuts(cuts: &[(AxisCut, u64)]) -> Vec<(AxisCut, u64)> {
    let mut ordered: Vec<AxisCut> = Vec::new();
    for &(axis_cut, split_factor) in cuts.iter().rev() {
        // The ranks that cut before each place in the order.
        let before = ordered.iter().scan(1u64, |ranks, cut| {
            *ranks = ranks.saturating_mul(cut.ranks);
            Some(*ranks)
        });
        match std::iter::once(1).chain(before).position(|ranks| ranks == split_factor) {
            Some(place) => ordered.insert(place, axis_cut),
            None => return cuts.to_vec(),
        }
    }
    ordered.into_iter().map(|axis_cut| (axis_cut, 1)).collect()
}

/// The ranges that a rank keeps. The steps are cut into pieces, and each piece is cut over the ranks, as `torch.chunk`
/// cuts: the last part may be smaller, or empty. `None` if that makes too many ranges.
pub fn cut(ranges: &[AxisRange], axis_cut: AxisCut, pieces: u64) -> Option<Vec<AxisRange>> {
    let AxisCut { ranks, rank } = axis_cut;
    let total: u64 = ranges.iter().map(|range| range.count).sum();
    if pieces.min(total) > MAX_RANGE_COUNT as u64 {
        return None;
    }
    let piece = total.div_ceil(pieces);
    let mut kept = Vec::new();
    let mut cursor = RangeCursor { ranges, used: 0 };
    let mut at = 0;
    while at < total {
        let len = piece.min(total - at);
        let part = len.div_ceil(ranks);
        let start = part.saturating_mul(rank).min(len);
        let count = part.min(len - start);
        cursor.advance(start, |_| {});
        cursor.advance(count, |range| match kept.last_mut() {
            Some(AxisRange { start, count }) if *start + *count == range.start => {
                *count += range.count;
            }
            _ => kept.push(range),
        });
        cursor.advance(len - start - count, |_| {});
        if kept.len() > MAX_RANGE_COUNT {
            return None;
        }
        at += len;
    }
    Some(kept)
}

/// A place in ranges that follow one another.
struct RangeCursor<'a> {
    /// The ranges from the current one on.
    ranges: &'a [AxisRange],
    /// The number of steps of the current range that lie before the place.
    used: u64,
}

impl RangeCursor<'_> {
    /// Advances by some steps, and visits the parts of the ranges that have them.
    fn advance(&mut self, mut steps: u64, mut visit: impl FnMut(AxisRange)) {
        while let Some((first, rest)) = self.ranges.split_first()
            && steps > 0
        {
            let count = (first.count - self.used).min(steps);
            visit(AxisRange { start: first.start + self.used, count });
            (self.used, steps) = (self.used + count, steps - count);
            if self.used == first.count {
                (self.ranges, self.used) = (rest, 0);
            }
        }
    }
}

/// A box for each combination of ranges; `None` if there are too many.
pub fn boxes_of_ranges(axes: &[Vec<AxisRange>]) -> Option<Vec<LocalBox>> {
    let empty =
        || LocalBox { start: Shape::new(), counts: Shape::new(), local_start: Shape::new() };
    let mut boxes = vec![empty()];
    for ranges in axes {
        if boxes.len().checked_mul(ranges.len())? > MAX_RANGE_COUNT {
            return None;
        }
        let mut wider = Vec::with_capacity(boxes.len() * ranges.len());
        for part in &boxes {
            let mut local = 0;
            for range in ranges {
                let mut part = part.clone();
                part.start.push(range.start);
                part.counts.push(range.count);
                part.local_start.push(local);
                wider.push(part);
                local += range.count;
            }
        }
        boxes = wider;
    }
    Some(boxes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(ranges: &[AxisRange]) -> Vec<u64> {
        ranges.iter().flat_map(|range| range.start..range.start + range.count).collect()
    }

    /// The rows that torch's two steps give: tensor parallelism cuts first, and FSDP cuts each of these parts.
    fn nested(size: u64, dp: (u64, u64), tp: (u64, u64)) -> Vec<u64> {
        let chunk = |rows: &[u64], n: u64, rank: u64| -> Vec<u64> {
            let part = rows.len().div_ceil(n as usize).max(1);
            rows.chunks(part).nth(rank as usize).map(<[u64]>::to_vec).unwrap_or_default()
        };
        let all: Vec<u64> = (0..size).collect();
        chunk(&chunk(&all, tp.0, tp.1), dp.0, dp.1)
    }

    #[test]
    fn an_axis_is_cut_as_torch_cuts_it() {
        for size in 0..24 {
            let whole = [AxisRange { start: 0, count: size }];
            for (dp, tp) in [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (5, 3)] {
                for rank in 0..dp * tp {
                    let (dp_rank, tp_rank) = (rank / tp, rank % tp);
                    let cuts = [
                        (AxisCut { ranks: dp, rank: dp_rank }, tp),
                        (AxisCut { ranks: tp, rank: tp_rank }, 1),
                    ];
                    let mut kept = whole.to_vec();
                    for (axis_cut, pieces) in order_cuts(&cuts) {
                        kept = cut(&kept, axis_cut, pieces).unwrap();
                    }
                    let expected = nested(size, (dp, dp_rank), (tp, tp_rank));
                    assert_eq!(rows(&kept), expected, "{size} rows, dp {dp}, tp {tp}, rank {rank}");
                }
            }
        }
    }

    #[test]
    fn split_factors_state_the_order_of_cuts() {
        let [a, b, c] = [4, 3, 2].map(|ranks| AxisCut { ranks, rank: 0 });
        for (cuts, order) in [
            ([(a, 1), (b, 1), (c, 1)], [a, b, c]),
            ([(a, 2), (b, 2), (c, 1)], [c, a, b]),
            ([(a, 6), (b, 1), (c, 1)], [b, c, a]),
            ([(a, 6), (b, 2), (c, 1)], [c, b, a]),
            ([(a, 3), (b, 1), (c, 1)], [b, a, c]),
        ] {
            assert_eq!(order_cuts(&cuts), order.map(|cut| (cut, 1)), "{cuts:?}");
        }
    }

    #[test]
    fn cuts_of_many_ranges_take_one_pass() {
        let whole = [AxisRange { start: 0, count: 1 << 20 }];
        let half = AxisCut { ranks: 2, rank: 1 };
        let many = cut(&whole, half, MAX_RANGE_COUNT as u64).unwrap();
        assert_eq!(many.len(), MAX_RANGE_COUNT);
        let started = std::time::Instant::now();
        for _ in 0..10 {
            assert_eq!(cut(&many, half, MAX_RANGE_COUNT as u64).unwrap().len(), MAX_RANGE_COUNT);
        }
        assert!(started.elapsed().as_secs() < 5);
    }

    #[test]
    fn cuts_without_bounds_are_refused() {
        let whole = [AxisRange { start: 0, count: u64::MAX }];
        assert_eq!(cut(&whole, AxisCut { ranks: 2, rank: 1 }, u64::MAX), None);
        let many = AxisCut { ranks: u64::MAX, rank: u64::MAX - 1 };
        assert!(cut(&whole, many, 1).is_some());
        let cuts = [(many, 6), (many, 1), (many, 1)];
        assert_eq!(order_cuts(&cuts), cuts);
    }
}
