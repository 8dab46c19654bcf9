//! Tests of decoding: any changes against their definition, and frames that state wrong sizes.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::checkpoint::patch::cache::PatchCache;
use crate::checkpoint::tensor::PatchedBytes;
use crate::checkpoint::{ByteRun, OriginId, TensorBytes};

const NO_LIMIT: u64 = u64::MAX / 2;

fn compress(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 1).unwrap()
}

/// The changes from one state of a tensor to the next, as trainers write them.
fn encode(encoding: DeltaEncoding, before: &[u8], after: &[u8]) -> Vec<u8> {
    let changed = || (0u32..).zip(before.iter().zip(after)).filter(|(_, (a, b))| a != b);
    match encoding {
        DeltaEncoding::Xor => before.iter().zip(after).map(|(a, b)| a ^ b).collect(),
        DeltaEncoding::Overwrite => {
            let mut bytes = (changed().count() as u32).to_le_bytes().to_vec();
            bytes.extend(changed().flat_map(|(position, _)| position.to_le_bytes()));
            bytes.extend(changed().map(|(_, (_, value))| *value));
            bytes
        }
    }
}

fn overwrite(changes: &[(u32, u8)]) -> Vec<u8> {
    let mut bytes = (changes.len() as u32).to_le_bytes().to_vec();
    bytes.extend(changes.iter().flat_map(|(position, _)| position.to_le_bytes()));
    bytes.extend(changes.iter().map(|(_, value)| value));
    bytes
}

/// Decodes blobs in a row within a limit of memory, around a byte.
fn decode_at(
    blobs: &[(DeltaEncoding, Vec<u8>)],
    len: u64,
    at: u64,
    limit_bytes: u64,
) -> Result<Arc<Patch>, PatchError> {
    let sources: Vec<Vec<u8>> =
        blobs.iter().map(|(_, blob)| [&[0; 3], &blob[..], &[0; 5]].concat()).collect();
    let layers: Vec<LayerSource<'_>> = blobs
        .iter()
        .zip(&sources)
        .map(|((encoding, blob), source)| LayerSource {
            source,
            offset: 3,
            len: blob.len() as u64,
            encoding: *encoding,
        })
        .collect();
    let cache = PatchCache::new(limit_bytes);
    let run = TensorBytes::Run(ByteRun { origin: OriginId(0), offset: 0, len });
    let id = PatchedBytes::new("t".into(), run, Box::default()).id;
    let patch = cache.get_or_decode(id, at, |allowance| decode(&layers, len, at, allowance));
    let patch = patch.map_err(|error| error.error)?;
    let memory = patch.memory_bytes();
    assert!(memory <= limit_bytes.max(3 << 20), "{memory} bytes, {limit_bytes} allowed");
    Ok(patch)
}

/// The whole tensor after changes, decoded in as many parts as the limit makes of it.
fn apply_all(
    blobs: &[(DeltaEncoding, Vec<u8>)],
    before: &[u8],
    limit_bytes: u64,
) -> Result<(Vec<u8>, usize), PatchError> {
    let (mut bytes, mut at, mut parts) = (before.to_vec(), 0, 0);
    while at < bytes.len() {
        let patch = decode_at(blobs, bytes.len() as u64, at as u64, limit_bytes)?;
        assert!(patch.range().contains(&(at as u64)));
        let end = patch.range().end as usize;
        // Applied in two pieces, the first of which begins anywhere.
        let middle = at + (end - at) / 3;
        let (first, second) = bytes[at..end].split_at_mut(middle - at);
        patch.apply(at as u64, first);
        patch.apply(middle as u64, second);
        (at, parts) = (end, parts + 1);
    }
    Ok((bytes, parts))
}

/// States of a tensor, each with some of the bytes of the one before changed.
fn any_states() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let lens = prop_oneof![0usize..300, 65_000usize..66_000, 130_000usize..140_000];
    (lens, prop::collection::vec((0u64..400, any::<u64>()), 1..5)).prop_map(|(len, steps)| {
        let mut states = vec![(0..len).map(|n| (n * 31 % 251) as u8).collect::<Vec<u8>>()];
        for (spread, seed) in steps {
            let mut next = states[states.len() - 1].clone();
            let mut random = seed | 1;
            for byte in &mut next {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                if random % (spread + 1) == 0 {
                    *byte = (random >> 32) as u8;
                }
            }
            states.push(next);
        }
        states
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_chain_of_any_encodings_leads_to_the_last_state(states in any_states(), kinds in prop::collection::vec(any::<bool>(), 5), is_small: bool) {
        let blobs: Vec<(DeltaEncoding, Vec<u8>)> = states.windows(2).zip(kinds).map(|(two, is_xor)| {
            let encoding = if is_xor { DeltaEncoding::Xor } else { DeltaEncoding::Overwrite };
            (encoding, compress(&encode(encoding, &two[0], &two[1])))
        }).collect();
        let limit = if is_small { 0 } else { NO_LIMIT };
        let (bytes, _) = apply_all(&blobs, &states[0], limit).unwrap();
        prop_assert!(bytes == states[states.len() - 1]);
    }

    #[test]
    fn damaged_changes_are_refused_or_decoded_and_never_panic(states in any_states(), is_xor: bool, at: prop::sample::Index, value: u8, cut: prop::sample::Index) {
        let encoding = if is_xor { DeltaEncoding::Xor } else { DeltaEncoding::Overwrite };
        let mut blob = compress(&encode(encoding, &states[0], &states[1]));
        let len = states[0].len() as u64;
        let damaged = at.index(blob.len());
        blob[damaged] ^= value;
        let _ = decode_at(&[(encoding, blob.clone())], len, 0, NO_LIMIT);
        blob.truncate(cut.index(blob.len()));
        let _ = decode_at(&[(encoding, blob)], len, 0, NO_LIMIT);
    }
}

#[test]
fn a_dense_chain_is_decoded_in_parts_within_its_limit() {
    let before = vec![1; 5 << 20];
    let after: Vec<u8> = (0..before.len()).map(|n| (n * n) as u8 | 2).collect();
    for encoding in [DeltaEncoding::Xor, DeltaEncoding::Overwrite] {
        let blobs = [(encoding, compress(&encode(encoding, &before, &after)))];
        let (bytes, parts) = apply_all(&blobs, &before, 2 << 20).unwrap();
        assert!(bytes == after);
        assert!((3..=5).contains(&parts), "{parts} parts");
        assert_eq!(apply_all(&blobs, &before, NO_LIMIT).unwrap().1, 1);
    }
}

#[test]
fn hostile_changes_are_refused_by_name() {
    let refusal = |encoding, blob: Vec<u8>, len| {
        decode_at(&[(encoding, blob)], len, 0, NO_LIMIT).unwrap_err().to_string()
    };
    let of_xor = |bytes: &[u8], len| refusal(DeltaEncoding::Xor, compress(bytes), len);
    let of_positions = |changes: &[(u32, u8)], len| {
        refusal(DeltaEncoding::Overwrite, compress(&overwrite(changes)), len)
    };
    assert!(of_xor(&[0; 10], 11).contains("states 10 bytes, and 11 are needed"));
    assert!(of_xor(&[0; 12], 11).contains("states 12 bytes, and 11 are needed"));
    assert!(
        of_positions(&[(11, 1)], 11).contains("byte 11 of it is said to change, and it has 11")
    );
    assert!(
        of_positions(&[(3, 1), (3, 2)], 11).contains("byte 3 of it is said to change after byte 3")
    );
    assert!(
        of_positions(&[(4, 1), (3, 2)], 11).contains("byte 3 of it is said to change after byte 4")
    );
    let many = vec![(0, 0); 12];
    assert!(of_positions(&many, 11).contains("12 bytes of it are said to change, and it has 11"));
    // A count that the size of the frame does not fit.
    let mut short = overwrite(&[(1, 1), (2, 2)]);
    short.pop();
    let error = refusal(DeltaEncoding::Overwrite, compress(&short), 11);
    assert!(error.contains("states 13 bytes, and 14 are needed"), "{error}");
    let mut long = overwrite(&[(1, 1)]);
    long.extend([1, 2]);
    let error = refusal(DeltaEncoding::Overwrite, compress(&long), 11);
    assert!(error.contains("states 11 bytes, and 9 are needed"), "{error}");
    for encoding in [DeltaEncoding::Xor, DeltaEncoding::Overwrite] {
        let blob = compress(&[0; 4]);
        let error = refusal(encoding, [&blob[..], b"x"].concat(), 4);
        assert!(error.contains("do not end where they should"), "{error}");
        for bytes in [&b""[..], b"not a frame at all", &blob[..3]] {
            let error = refusal(encoding, bytes.to_vec(), 4);
            assert!(
                error.contains("no zstd frame") || error.contains("not state its size"),
                "{error}"
            );
        }
        // A frame that may be skipped holds nothing.
        let skippable = [&0x184d_2a50u32.to_le_bytes()[..], &4u32.to_le_bytes(), &[0; 4]].concat();
        assert!(!refusal(encoding, skippable, 4).is_empty());
    }
}

#[test]
fn a_bomb_is_refused_before_it_takes_memory() {
    // 64 MiB of zeros in a few KB, for a tensor of 16 bytes. Its header states them.
    let zeros = vec![0; 64 << 20];
    let bomb = compress(&zeros);
    let error = decode_at(&[(DeltaEncoding::Xor, bomb.clone())], 16, 0, NO_LIMIT).unwrap_err();
    assert!(error.to_string().contains("and 16 are needed"));
    // The same in a frame that does not state its size.
    let mut unsized_frame = Vec::new();
    let mut encoder = zstd::stream::write::Encoder::new(&mut unsized_frame, 1).unwrap();
    std::io::Write::write_all(&mut encoder, &zeros).unwrap();
    encoder.finish().unwrap();
    let error =
        decode_at(&[(DeltaEncoding::Xor, unsized_frame.clone())], 16, 0, NO_LIMIT).unwrap_err();
    assert!(error.to_string().contains("do not end where they should"), "{error}");
    let error =
        decode_at(&[(DeltaEncoding::Overwrite, unsized_frame)], 16, 0, NO_LIMIT).unwrap_err();
    assert!(error.to_string().contains("does not state its size"), "{error}");
    // A window that no level of trainers needs.
    let mut wide = Vec::new();
    let mut encoder = zstd::stream::write::Encoder::new(&mut wide, 1).unwrap();
    encoder.window_log(27).unwrap();
    std::io::Write::write_all(&mut encoder, &vec![7; 1 << 20]).unwrap();
    encoder.finish().unwrap();
    let error = decode_at(&[(DeltaEncoding::Xor, wide)], 1 << 20, 0, NO_LIMIT).unwrap_err();
    assert!(error.to_string().contains("no zstd frame"), "{error}");
}
