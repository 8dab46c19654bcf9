//! The file format of an access trace.
//!
//! In: a trace, or bytes that may be anything. Out: its bytes; or the trace, which has each chunk of the file at most
//! once. Bytes that are wrong in any way are no trace.
//!
//! The format: a line with the version, the size of the virtual file, runs of consecutive chunks, and a hash of all
//! that. A run is its first chunk and the number of those that follow it, of two bytes each. Numbers are little-endian.

use crate::cache::prefetch::trace::{ChunkMap, ChunkSet};

const VERSION: &[u8] = b"ckptfs order 1\n";
const SIZE_BYTES: usize = 8;
const RUN_BYTES: usize = 4;
const HASH_BYTES: usize = 16;

/// The longest file: as many runs as there can be chunks.
pub const MAX_TRACE_BYTES: usize = VERSION.len() + SIZE_BYTES + (RUN_BYTES << 16) + HASH_BYTES;

pub fn encode_trace(chunks: ChunkMap, trace: &[u16]) -> Vec<u8> {
    let mut bytes = [VERSION, &chunks.file_bytes.to_le_bytes()].concat();
    for run in trace.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        bytes.extend(run[0].to_le_bytes());
        bytes.extend(((run.len() - 1) as u16).to_le_bytes());
    }
    let hash = hash(&bytes);
    bytes.extend(hash);
    bytes
}

pub fn decode_trace(bytes: &[u8], chunks: ChunkMap) -> Option<Vec<u16>> {
    let (content, stored_hash) = bytes.split_last_chunk::<HASH_BYTES>()?;
    let (file_bytes, runs) = content.strip_prefix(VERSION)?.split_first_chunk::<SIZE_BYTES>()?;
    let (runs, rest) = runs.as_chunks::<RUN_BYTES>();
    let is_of_file = u64::from_le_bytes(*file_bytes) == chunks.file_bytes;
    if !is_of_file || !rest.is_empty() || hash(content) != *stored_hash {
        return None;
    }
    let (mut trace, mut known) = (Vec::new(), ChunkSet::new(chunks));
    for &[a, b, c, d] in runs {
        let first = u16::from_le_bytes([a, b]);
        let last = first.checked_add(u16::from_le_bytes([c, d]))?;
        if usize::from(last) >= chunks.count() {
            return None;
        }
        for chunk in first..=last {
            if !known.insert(chunk.into()) {
                return None;
            }
            trace.push(chunk);
        }
    }
    Some(trace)
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

    fn chunks() -> ChunkMap {
        ChunkMap::new((300 << 20) - 7)
    }

    /// Encodes these runs, with a correct hash.
    fn hashed(runs: &[(u16, u16)]) -> Vec<u8> {
        let runs = runs.iter().flat_map(|(a, b)| [a.to_le_bytes(), b.to_le_bytes()]).flatten();
        let mut bytes = [VERSION, &chunks().file_bytes.to_le_bytes()].concat();
        bytes.extend(runs);
        let hash = hash(&bytes);
        bytes.extend(hash);
        bytes
    }

    #[test]
    fn chunks_beyond_the_file_are_no_trace_whatever_the_hash() {
        assert_eq!(decode_trace(&hashed(&[(5, 1), (0, 0)]), chunks()), Some(vec![5, 6, 0]));
        assert_eq!(decode_trace(&hashed(&[(0, 299)]), chunks()).unwrap().len(), 300);
        for runs in [&[(0, 300)][..], &[(300, 0)], &[(u16::MAX, u16::MAX)], &[(5, 1), (6, 0)]] {
            assert_eq!(decode_trace(&hashed(runs), chunks()), None, "{runs:?}");
        }
        let others = ChunkMap::new(300 << 20);
        assert_eq!(decode_trace(&hashed(&[(5, 1)]), others), None);
    }

    #[test]
    fn the_longest_trace_fits_into_the_stated_size() {
        let all = ChunkMap::new(1 << 40);
        let apart: Vec<u16> = (0..=u16::MAX).rev().collect();
        let bytes = encode_trace(all, &apart);
        assert_eq!((bytes.len(), decode_trace(&bytes, all)), (MAX_TRACE_BYTES, Some(apart)));
        let bytes = encode_trace(all, &(0..=u16::MAX).collect::<Vec<_>>());
        assert_eq!(bytes.len(), VERSION.len() + SIZE_BYTES + RUN_BYTES + HASH_BYTES);
    }

    proptest! {
        #[test]
        fn a_trace_survives_and_a_cut_or_changed_one_is_rejected(
            trace in Just((0..300u16).collect::<Vec<_>>()).prop_shuffle(),
            known in 0..300usize, cut in any::<prop::sample::Index>(),
            at in any::<prop::sample::Index>(), bit in 0..8u8,
        ) {
            let trace = &trace[..known];
            let mut bytes = encode_trace(chunks(), trace);
            prop_assert_eq!(decode_trace(&bytes, chunks()), Some(trace.to_vec()));
            prop_assert_eq!(decode_trace(&bytes[..cut.index(bytes.len())], chunks()), None);
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            prop_assert_eq!(decode_trace(&bytes, chunks()), None);
        }

        #[test]
        fn any_runs_are_a_trace_or_none(runs in prop::collection::vec((0..400u16, 0..400u16), 0..9)) {
            if let Some(trace) = decode_trace(&hashed(&runs), chunks()) {
                prop_assert!(trace.iter().all(|&chunk| chunk < 300) && trace.len() <= 300);
            }
        }
    }
}
