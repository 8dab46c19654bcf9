//! The order of a load as it is written to a file.
//!
//! In: an order; or bytes that may be anything. Out: its bytes; or the order, each stretch of the virtual file
//! in it at most once. What is odd in any way is no order.
//!
//! A line with the version, the virtual file's size, runs of stretches that follow one another (the first, and
//! how many come after it, two bytes each), and a hash of all that. Numbers are little-endian.

use crate::cache::prefetch::chunk_map::{ChunkMap, ChunkSet};

const VERSION: &[u8] = b"ckptfs order 1\n";
const SIZE_BYTES: usize = 8;
const RUN_BYTES: usize = 4;
const HASH_BYTES: usize = 16;

/// The most that one takes: as many runs as there can be stretches.
pub const MAX_TRACE_BYTES: usize = VERSION.len() + SIZE_BYTES + (RUN_BYTES << 16) + HASH_BYTES;

pub fn encode_trace(stretches: ChunkMap, order: &[u16]) -> Vec<u8> {
    let mut bytes = [VERSION, &stretches.size.to_le_bytes()].concat();
    for run in order.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        bytes.extend(run[0].to_le_bytes());
        bytes.extend(((run.len() - 1) as u16).to_le_bytes());
    }
    let hash = hash(&bytes);
    bytes.extend(hash);
    bytes
}

pub fn decode_trace(bytes: &[u8], stretches: ChunkMap) -> Option<Vec<u16>> {
    let (said, hashed) = bytes.split_last_chunk::<HASH_BYTES>()?;
    let (size, runs) = said.strip_prefix(VERSION)?.split_first_chunk::<SIZE_BYTES>()?;
    let (runs, rest) = runs.as_chunks::<RUN_BYTES>();
    let is_of_it = u64::from_le_bytes(*size) == stretches.size;
    if !is_of_it || !rest.is_empty() || hash(said) != *hashed {
        return None;
    }
    let (mut order, mut known) = (Vec::new(), ChunkSet::new(stretches));
    for &[a, b, c, d] in runs {
        let first = u16::from_le_bytes([a, b]);
        let last = first.checked_add(u16::from_le_bytes([c, d]))?;
        if usize::from(last) >= stretches.count() {
            return None;
        }
        for stretch in first..=last {
            if !known.insert(stretch.into()) {
                return None;
            }
            order.push(stretch);
        }
    }
    Some(order)
}

fn hash(bytes: &[u8]) -> [u8; HASH_BYTES] {
    let mut hash = [0; HASH_BYTES];
    hash.copy_from_slice(&blake3::hash(bytes).as_bytes()[..HASH_BYTES]);
    hash
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cache::prefetch::trace;

    fn stretches() -> ChunkMap {
        trace::chunk_map((300 << 20) - 7)
    }

    /// These runs, with a hash that is right.
    fn hashed(runs: &[(u16, u16)]) -> Vec<u8> {
        let runs = runs.iter().flat_map(|(a, b)| [a.to_le_bytes(), b.to_le_bytes()]).flatten();
        let mut bytes = [VERSION, &stretches().size.to_le_bytes()].concat();
        bytes.extend(runs);
        let hash = hash(&bytes);
        bytes.extend(hash);
        bytes
    }

    #[test]
    fn what_does_not_fit_the_virtual_file_is_no_order_whatever_its_hash() {
        assert_eq!(decode_trace(&hashed(&[(5, 1), (0, 0)]), stretches()), Some(vec![5, 6, 0]));
        assert_eq!(decode_trace(&hashed(&[(0, 299)]), stretches()).unwrap().len(), 300);
        for runs in [&[(0, 300)][..], &[(300, 0)], &[(u16::MAX, u16::MAX)], &[(5, 1), (6, 0)]] {
            assert_eq!(decode_trace(&hashed(runs), stretches()), None, "{runs:?}");
        }
        let others = trace::chunk_map(300 << 20);
        assert_eq!(decode_trace(&hashed(&[(5, 1)]), others), None);
    }

    #[test]
    fn the_largest_is_no_larger_than_said() {
        let all = trace::chunk_map(1 << 40);
        let apart: Vec<u16> = (0..=u16::MAX).rev().collect();
        let bytes = encode_trace(all, &apart);
        assert_eq!((bytes.len(), decode_trace(&bytes, all)), (MAX_TRACE_BYTES, Some(apart)));
        let bytes = encode_trace(all, &(0..=u16::MAX).collect::<Vec<_>>());
        assert_eq!(bytes.len(), VERSION.len() + SIZE_BYTES + RUN_BYTES + HASH_BYTES);
    }

    proptest! {
        #[test]
        fn an_order_is_read_as_it_was_written_and_what_is_cut_or_changed_is_none(
            order in Just((0..300u16).collect::<Vec<_>>()).prop_shuffle(),
            known in 0..300usize, cut in any::<prop::sample::Index>(),
            at in any::<prop::sample::Index>(), bit in 0..8u8,
        ) {
            let order = &order[..known];
            let mut bytes = encode_trace(stretches(), order);
            prop_assert_eq!(decode_trace(&bytes, stretches()), Some(order.to_vec()));
            prop_assert_eq!(decode_trace(&bytes[..cut.index(bytes.len())], stretches()), None);
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            prop_assert_eq!(decode_trace(&bytes, stretches()), None);
        }

        #[test]
        fn any_runs_are_an_order_or_none(runs in prop::collection::vec((0..400u16, 0..400u16), 0..9)) {
            if let Some(order) = decode_trace(&hashed(&runs), stretches()) {
                prop_assert!(order.iter().all(|&stretch| stretch < 300) && order.len() <= 300);
            }
        }
    }
}
