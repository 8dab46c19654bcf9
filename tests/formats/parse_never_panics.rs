//! Any bytes end in a virtual file or in a refusal. A virtual file is valid for the reference reader.

use std::path::Path;

use crate::common;
use crate::common::pickle::{Tensor, call, dict, global, list, pickle, put, text, tuple};
use crate::common::zip::{Record, archive, one_tensor};
use crate::common::{legacy, safetensors::valid};
use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};
use proptest::prelude::*;

/// Virtual files up to this size are read whole and given to the reference reader. Larger ones, which few
/// bytes can make by repetition, are read up to this size.
const MAX_READ_BYTES: u64 = 1 << 20;

/// A change to a file.
#[derive(Clone, Debug)]
enum Change {
    Flip { at: f64, bit: u8 },
    Set { at: f64, byte: u8 },
    Number { at: f64, value: u64, width: usize },
    Remove { at: f64, len: usize },
    Insert { at: f64, bytes: Vec<u8> },
    Copy { from: f64, to: f64, len: usize },
    Truncate { at: f64 },
}

fn any_change() -> impl Strategy<Value = Change> {
    let at = || 0.0..1.0f64;
    let odd = prop::sample::select(vec![
        0,
        1,
        0x7f,
        0x80,
        0xff,
        0xffff,
        0x7fff_ffff,
        0xffff_ffff,
        1 << 32,
        i64::MAX as u64,
        1 << 63,
        u64::MAX,
    ]);
    // Opcodes of pickles, so that more of the changes mean something.
    let opcode = prop::sample::select(&b"().0N}]tuesabQRqhcK\x85\x86\x87\x88\x89\x8a\x93\x94"[..]);
    prop_oneof![
        4 => (at(), 0u8..8).prop_map(|(at, bit)| Change::Flip { at, bit }),
        2 => (at(), any::<u8>()).prop_map(|(at, byte)| Change::Set { at, byte }),
        3 => (at(), opcode.clone()).prop_map(|(at, byte)| Change::Set { at, byte }),
        3 => (at(), odd, prop::sample::select(vec![1usize, 2, 4, 8]))
            .prop_map(|(at, value, width)| Change::Number { at, value, width }),
        1 => (at(), 1usize..40).prop_map(|(at, len)| Change::Remove { at, len }),
        2 => (at(), prop::collection::vec(opcode, 1..8))
            .prop_map(|(at, bytes)| Change::Insert { at, bytes }),
        2 => (at(), at(), 1usize..200).prop_map(|(from, to, len)| Change::Copy { from, to, len }),
        1 => at().prop_map(|at| Change::Truncate { at }),
    ]
}

fn place(at: f64, bytes: &[u8]) -> usize {
    (at * bytes.len() as f64) as usize
}

fn apply(change: &Change, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        return;
    }
    match change {
        Change::Flip { at, bit } => {
            let at = place(*at, bytes);
            bytes[at] ^= 1 << bit;
        }
        Change::Set { at, byte } => {
            let at = place(*at, bytes);
            bytes[at] = *byte;
        }
        Change::Number { at, value, width } => {
            let at = place(*at, bytes);
            let end = (at + width).min(bytes.len());
            bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        }
        Change::Remove { at, len } => {
            let at = place(*at, bytes);
            bytes.drain(at..(at + len).min(bytes.len()));
        }
        Change::Insert { at, bytes: new } => {
            let at = place(*at, bytes);
            bytes.splice(at..at, new.iter().copied());
        }
        Change::Copy { from, to, len } => {
            let from = place(*from, bytes);
            let part = bytes[from..(from + len).min(bytes.len())].to_vec();
            let to = place(*to, bytes);
            bytes.splice(to..to, part);
        }
        Change::Truncate { at } => bytes.truncate(place(*at, bytes)),
    }
}

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    changes.iter().for_each(|change| apply(change, &mut bytes));
    bytes
}

/// Reads a virtual file of any bytes as far as it can be read.
fn read(bytes: &[u8], name: &str) {
    for allow_partial in [false, true] {
        let options = ParseOptions { allow_partial, ..ParseOptions::default() };
        let Ok(checkpoint) = checkpoint::parse_bytes(bytes, Path::new(name), &options) else {
            continue;
        };
        let Ok(virtual_file) = VirtualFile::new(checkpoint) else { continue };
        let reader = VirtualFileReader::open(&std::sync::Arc::new(virtual_file))
            .expect("memory does not change");
        let size = reader.virtual_file().size();
        let mut out = vec![0; size.min(MAX_READ_BYTES) as usize];
        assert_eq!(reader.read_at(&mut out, 0).expect("every byte is there"), out.len());
        if size <= MAX_READ_BYTES {
            safetensors::SafeTensors::deserialize(&out).expect("valid for the reference reader");
        }
        // From the end on, and across the middle, where a read begins inside a tensor.
        for start in [size / 2, size.saturating_sub(7)] {
            let mut part = vec![0; 1000];
            let read = reader.read_at(&mut part, start).expect("every byte is there");
            if size <= MAX_READ_BYTES {
                assert_eq!(part[..read], out[start as usize..][..read]);
            }
        }
    }
}

/// A state dict with most of what one can have: views, a parameter, shared storages, other values.
fn state() -> Vec<u8> {
    let tensor = |shape: &[i128], stride: &[i128], offset| {
        Tensor { shape: shape.to_vec(), stride: stride.to_vec(), offset, ..Tensor::default() }
            .bytes()
    };
    let parameter = call(
        &global("torch._utils", "_rebuild_parameter"),
        &[tensor(&[3, 2], &[1, 3], 0), vec![0x88], b"}".to_vec()],
    );
    let nested = dict(&[("x", tensor(&[4], &[0], 5)), ("y", list(&[text("z")]))]);
    let state = [
        ("whole", [tensor(&[2, 3], &[3, 1], 0), put(0)].concat()),
        ("parameter", parameter),
        ("nested", nested),
        ("scalar", tensor(&[], &[], 2)),
        ("empty", tensor(&[0, 3], &[3, 1], 0)),
        ("values", tuple(&[text("a"), b"K\x01".to_vec(), b"G\0\0\0\0\0\0\0\0".to_vec()])),
    ];
    dict(&[("state_dict", dict(&state)), ("epoch", b"K\x07".to_vec())])
}

proptest! {
    #[test]
    fn of_safetensors(changes in prop::collection::vec(any_change(), 0..6)) {
        read(&changed(valid(&["a", "b", "c"]), &changes), "x.safetensors");
    }

    #[test]
    fn of_archives(changes in prop::collection::vec(any_change(), 0..6), deflated in any::<bool>()) {
        let mut records = one_tensor();
        if deflated {
            records[0] = Record::deflated("archive/data.pkl", &pickle(&state()));
            records[2] = Record::deflated("archive/data/0", &common::zip::floats());
        }
        read(&changed(archive(&records), &changes), "x.pt");
    }

    #[test]
    fn of_pickles_in_sound_archives(changes in prop::collection::vec(any_change(), 0..6)) {
        let pickle = changed(pickle(&state()), &changes);
        read(&archive(&common::zip::checkpoint(&pickle)), "x.pt");
    }

    #[test]
    fn of_legacy_files(changes in prop::collection::vec(any_change(), 0..6)) {
        let mut legacy = legacy::one_tensor(&Tensor::default(), None);
        legacy.state = state();
        read(&changed(legacy.bytes(), &changes), "x.pt");
    }

    #[test]
    fn of_indexes(changes in prop::collection::vec(any_change(), 0..6)) {
        let index = br#"{"metadata":{"total_size":8},"weight_map":{"a":"x.safetensors","b":"y/z"}}"#;
        let index = changed(index.to_vec(), &changes);
        if let Ok(parsed) = checkpoint::parse_index(&index, false) {
            prop_assert!(parsed.shards().iter().all(|shard| !shard.starts_with('/')));
            for place in 0..parsed.shards().len() {
                let held: Vec<&str> = parsed.tensors_in(place).collect();
                prop_assert!(!held.is_empty() && held.len() == parsed.tensor_count_in(place));
                prop_assert!(held.iter().all(|tensor| parsed.shard_of(tensor) == Some(place)));
            }
            let trusted = checkpoint::parse_index(&index, true).unwrap();
            prop_assert_eq!(trusted.shards(), parsed.shards());
            for place in 0..parsed.shards().len() {
                prop_assert!(trusted.tensors_in(place).eq(parsed.tensors_in(place)));
            }
        }
    }

    #[test]
    fn of_anything(bytes in prop::collection::vec(any::<u8>(), 0..300), start in 0usize..5) {
        let starts = [&b""[..], b"PK\x03\x04", b"\x80\x02", b"\x08\0\0\0\0\0\0\0{", b"{\"weight_map\":"];
        let bytes = [starts[start], &bytes].concat();
        for name in ["x.safetensors", "x.pt"] {
            read(&bytes, name);
        }
        drop(checkpoint::parse_index(&bytes, true));
    }
}
