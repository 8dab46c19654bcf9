//! Which tensors read the same bytes.

use super::Tensor;

/// Names given per tensor. Tied weights come in pairs; a checkpoint of a thousand views of one
/// buffer must not make a million names.
pub const MAX_OVERLAP_COUNT: usize = 8;

/// For each tensor, places of others whose bytes lie in an overlapping part of the same source:
/// none if there is none, and no more than [`MAX_OVERLAP_COUNT`].
pub fn find_overlaps(tensors: &[Tensor]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> =
        (0..tensors.len()).filter(|&n| !tensors[n].bytes.is_empty()).collect();
    order.sort_by_key(|&n| tensors[n].bytes.extent());
    let mut shares = vec![Vec::new(); tensors.len()];
    let overlap = |a: usize, b: usize| {
        let ((origin, start, len), (other, next, _)) =
            (tensors[a].bytes.extent(), tensors[b].bytes.extent());
        origin == other && next < start + len
    };
    let mut pair = |a: usize, b: usize| {
        for (from, to) in [(a, b), (b, a)] {
            if shares[from].len() < MAX_OVERLAP_COUNT && !shares[from].contains(&to) {
                shares[from].push(to);
            }
        }
    };
    // Of those before, the one that reaches furthest overlaps if any does.
    let mut furthest: Option<usize> = None;
    for (place, &this) in order.iter().enumerate() {
        if let Some(before) = furthest.filter(|&before| overlap(before, this)) {
            pair(before, this);
        }
        for &next in order[place + 1..]
            .iter()
            .take(MAX_OVERLAP_COUNT)
            .take_while(|&&next| overlap(this, next))
        {
            pair(this, next);
        }
        let end = |n: usize| {
            let (origin, start, len) = tensors[n].bytes.extent();
            (origin, start + len)
        };
        if furthest.is_none_or(|before| end(before) < end(this)) {
            furthest = Some(this);
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{ByteRun, Dtype, OriginId, TensorBytes};

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
