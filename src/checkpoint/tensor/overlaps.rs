//! Finds tensors that read the same bytes.

use super::{ByteRun, Tensor};

/// Maximum overlaps that are reported for one tensor. Tied weights come in pairs. A thousand views of one buffer
/// must not make a million names.
pub const MAX_OVERLAP_COUNT: usize = 8;

/// For each tensor, the indexes of others whose bytes overlap its own in the same source.
///
/// The list is empty only if there is no overlap. It has at most [`MAX_OVERLAP_COUNT`] indexes.
pub fn find_overlaps(tensors: &[Tensor]) -> Vec<Vec<usize>> {
    let extents = tensors.iter().enumerate();
    let extents = extents.filter(|(_, tensor)| !tensor.bytes.is_empty());
    let mut order: Vec<(ByteRun, usize)> = extents
        .flat_map(|(n, tensor)| tensor.bytes.extents().map(move |extent| (extent, n)))
        .collect();
    order.sort_unstable();
    let mut overlaps = vec![Vec::new(); tensors.len()];
    let is_overlap = |(first, _): &(ByteRun, usize), (next, _): &(ByteRun, usize)| {
        first.origin == next.origin && next.offset < first.offset + first.len
    };
    let mut pair = |a: usize, b: usize| {
        // Strided boxes of one tensor lie in one another's gaps.
        if a == b {
            return;
        }
        for (from, to) in [(a, b), (b, a)] {
            if overlaps[from].len() < MAX_OVERLAP_COUNT && !overlaps[from].contains(&to) {
                overlaps[from].push(to);
            }
        }
    };
    // If any tensor before overlaps, the one that reaches furthest does.
    let mut furthest: Option<(ByteRun, usize)> = None;
    for (index, this) in order.iter().enumerate() {
        if let Some(before) = furthest.filter(|before| is_overlap(before, this)) {
            pair(before.1, this.1);
        }
        for next in order[index + 1..]
            .iter()
            .take(MAX_OVERLAP_COUNT)
            .take_while(|next| is_overlap(this, next))
        {
            pair(this.1, next.1);
        }
        let end = |(run, _): (ByteRun, usize)| (run.origin, run.offset + run.len);
        if furthest.is_none_or(|before| end(before) < end(*this)) {
            furthest = Some(*this);
        }
    }
    overlaps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Dtype, OriginId, TensorBytes};

    fn tensor(origin: u32, offset: u64, len: u64) -> Tensor {
        let bytes = TensorBytes::Run(ByteRun { origin: OriginId(origin), offset, len });
        Tensor { name: "t".into(), dtype: Dtype::U8, shape: [len].into_iter().collect(), bytes }
    }

    #[test]
    fn overlaps_are_found_and_neighbours_are_not() {
        let tensors = [
            tensor(0, 0, 10),
            tensor(0, 10, 10),
            tensor(0, 15, 1),
            tensor(1, 0, 10),
            tensor(0, 12, 0),
        ];
        assert_eq!(find_overlaps(&tensors), [vec![], vec![2], vec![1], vec![], vec![]]);
    }

    #[test]
    fn every_slice_of_a_large_buffer_names_something() {
        let mut tensors = vec![tensor(0, 0, 1000)];
        tensors.extend((0..100).map(|n| tensor(0, n * 10, 10)));
        let shares = find_overlaps(&tensors);
        assert!(shares.iter().all(|named| !named.is_empty() && named.len() <= MAX_OVERLAP_COUNT));
    }
}
