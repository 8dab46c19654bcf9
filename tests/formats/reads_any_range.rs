//! A virtual file read in any ranges by any number of threads is one valid safetensors file. It is the same
//! each time, and has the source's tensors.

use crate::common;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::virtual_file::{DATA_ALIGNMENT_BYTES, SegmentSource, VirtualFile, VirtualFileReader};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use tempfile::TempDir;

/// Threads that read at once.
const READERS: usize = 4;

const DTYPES: [Dtype; 22] = [
    Dtype::BOOL,
    Dtype::F4,
    Dtype::F6_E2M3,
    Dtype::F6_E3M2,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

/// A tensor to save.
#[derive(Clone, Debug, PartialEq)]
struct Saved {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A checkpoint to save: tensors by name, and each one's shard.
#[derive(Clone, Debug)]
struct Model {
    tensors: BTreeMap<String, Saved>,
    shards: usize,
}

fn any_tensor() -> impl Strategy<Value = Saved> {
    let shape = prop::collection::vec(0usize..6, 0..4);
    (prop::sample::select(&DTYPES[..]), shape, any::<u64>()).prop_map(|(dtype, mut shape, seed)| {
        match dtype.bitsize() {
            // Two elements in a byte.
            4 => shape.push(2),
            // Four elements in three bytes.
            6 => shape.push(4),
            _ => {}
        }
        let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let bytes = (0..len as u64).map(|n| (seed.wrapping_mul(n + 1) >> 32) as u8).collect();
        Saved { dtype, shape, bytes }
    })
}

fn any_model() -> impl Strategy<Value = Model> {
    let name = prop_oneof!["[a-z]{1,3}(\\.[0-9]{1,2}){0,2}", "\\PC{1,4}"];
    (prop::collection::btree_map(name, any_tensor(), 1..12), 1usize..4)
        .prop_map(|(tensors, shards)| Model { tensors, shards })
}

/// Writes a model with the reference implementation, as one file or as a numbered set.
fn save(model: &Model) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for shard in 0..model.shards {
        let of_shard = model.tensors.iter().enumerate().filter(|(n, _)| n % model.shards == shard);
        let views = of_shard.map(|(_, (name, saved))| {
            let view = TensorView::new(saved.dtype, saved.shape.clone(), &saved.bytes);
            (name, view.expect("consistent"))
        });
        let metadata = [("shard".to_owned(), "text \"quoted\"".to_owned())].into();
        let bytes = safetensors::serialize(views, Some(metadata)).expect("serialised");
        let name = match model.shards {
            1 => "model.safetensors".to_owned(),
            of => format!("model-{:05}-of-{of:05}.safetensors", shard + 1),
        };
        fs::write(directory.path().join(name), bytes).expect("written");
    }
    directory
}

fn virtual_file(path: &Path, options: &ParseOptions) -> Arc<VirtualFile> {
    let checkpoint = checkpoint::open(path, options).expect("readable");
    Arc::new(VirtualFile::new(checkpoint).expect("a virtual file"))
}

fn read(reader: &VirtualFileReader, start: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    let read = reader.read_at(&mut bytes, start).expect("readable");
    bytes.truncate(read);
    bytes
}

/// The bytes of each segment, read from the sources without the virtual file.
fn by_segments(virtual_file: &VirtualFile, start: u64, end: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut at = start;
    for segment in virtual_file.segments(start..end) {
        assert_eq!(segment.range.start, at, "segments follow one another");
        assert!(segment.range.end > at && segment.range.end <= end, "and none is empty or longer");
        at = segment.range.end;
        let len = (segment.range.end - segment.range.start) as usize;
        let (from, offset) = match segment.bytes {
            SegmentSource::Header(offset) => (virtual_file.header().to_vec(), offset),
            SegmentSource::Run { origin, offset } => match &virtual_file.origins()
                [origin.0 as usize]
            {
                checkpoint::Origin::File(file) => (fs::read(file.path()).expect("there"), offset),
                checkpoint::Origin::Memory(bytes) => (bytes.to_vec(), offset),
                checkpoint::Origin::Patched(_) => unreachable!("none of them is a delta"),
            },
            SegmentSource::Tensor { .. } => panic!("a safetensors file has no gathered tensors"),
        };
        bytes.extend(&from[offset as usize..][..len]);
    }
    assert_eq!(at, end.min(virtual_file.size()).max(start), "and they cover the range");
    bytes
}

proptest! {
    #[test]
    fn the_reference_reader_finds_the_original_tensors(model in any_model()) {
        let directory = save(&model);
        let virtual_file = virtual_file(directory.path(), &ParseOptions::default());
        let whole = common::whole(&VirtualFileReader::open(&virtual_file).unwrap());
        prop_assert_eq!(virtual_file.header_size() % DATA_ALIGNMENT_BYTES as u64, 0);
        let (_, metadata) = SafeTensors::read_metadata(&whole).unwrap();
        let metadata = metadata.metadata().clone().unwrap_or_default();
        prop_assert_eq!(metadata.get("format").map(String::as_str), Some("pt"));
        prop_assert_eq!(metadata.get("shard").map(String::as_str), Some("text \"quoted\""));
        let found = SafeTensors::deserialize(&whole).unwrap();
        let found: BTreeMap<String, Saved> = found.iter().map(|(name, view)| {
            let (shape, bytes) = (view.shape().to_vec(), view.data().to_vec());
            (name.to_owned(), Saved { dtype: view.dtype(), shape, bytes })
        }).collect();
        prop_assert_eq!(found, model.tensors);
        for (place, tensor) in virtual_file.tensors().iter().enumerate() {
            let unit = u64::from(tensor.dtype.bits() / 8).max(1);
            prop_assert_eq!(virtual_file.tensor_range(place).start % unit, 0, "aligned to its type");
        }
    }

    #[test]
    fn pieces_read_by_several_threads_are_those_of_the_whole(
        model in any_model(),
        pieces in prop::collection::vec((0.0..1.0f64, 0usize..9000), 1..20),
    ) {
        let directory = save(&model);
        let virtual_file = virtual_file(directory.path(), &ParseOptions::default());
        let reader = VirtualFileReader::open(&virtual_file).unwrap();
        let whole = common::whole(&reader);
        let (reader, whole, pieces) = (&reader, &whole, &pieces);
        std::thread::scope(|threads| {
            for first in 0..READERS {
                threads.spawn(move || {
                    // Each thread begins with another range, so that different ones are read at once.
                    for (start, len) in pieces.iter().cycle().skip(first).take(pieces.len()) {
                        let start = (start * whole.len() as f64) as usize;
                        let end = (start + len).min(whole.len());
                        assert_eq!(read(reader, start as u64, *len), whole[start..end]);
                    }
                });
            }
        });
        let end = whole.len() as u64;
        for (start, len) in [(end, 1), (end + 1, 5), (u64::MAX, 5), (end - 1, 0)] {
            prop_assert_eq!(read(reader, start, len), b"");
        }
        prop_assert_eq!(read(reader, end - 1, 100), &whole[whole.len() - 1..]);
    }

    #[test]
    fn segments_and_tensors_tile_the_file(
        model in any_model(), start in 0.0..1.1f64, len in 0u64..9000,
    ) {
        let directory = save(&model);
        let virtual_file = virtual_file(directory.path(), &ParseOptions::default());
        let reader = VirtualFileReader::open(&virtual_file).unwrap();
        prop_assert_eq!(by_segments(&virtual_file, 0, virtual_file.size()), common::whole(&reader));
        let start = (start * virtual_file.size() as f64) as u64;
        let part = by_segments(&virtual_file, start, start + len);
        prop_assert_eq!(part, read(&reader, start, len as usize));

        let mut at = virtual_file.header_size();
        for place in 0..virtual_file.tensors().len() {
            let range = virtual_file.tensor_range(place);
            prop_assert_eq!(range.start, at);
            at = range.end;
            prop_assert_eq!(at - range.start, virtual_file.tensors()[place].bytes.len());
            for byte in range {
                prop_assert_eq!(virtual_file.tensor_at(byte), Some(place));
            }
        }
        prop_assert_eq!(at, virtual_file.size());
        for outside in [0, virtual_file.header_size() - 1, virtual_file.size(), u64::MAX] {
            prop_assert_eq!(virtual_file.tensor_at(outside), None);
        }
    }

    #[test]
    fn the_same_checkpoint_is_always_the_same_virtual_file(model in any_model()) {
        let (first, second) = (save(&model), save(&model));
        let plain = ParseOptions::default();
        let before = virtual_file(first.path(), &plain);
        let again = virtual_file(first.path(), &plain);
        prop_assert_eq!(before.identity(), again.identity());
        let bytes = common::whole(&VirtualFileReader::open(&before).unwrap());
        prop_assert_eq!(&bytes, &common::whole(&VirtualFileReader::open(&again).unwrap()));

        // A copy elsewhere has the same bytes and layout, and other files.
        let copy = virtual_file(second.path(), &plain);
        prop_assert_eq!(copy.layout_hash(), before.layout_hash());
        prop_assert_ne!(copy.identity(), before.identity());
        prop_assert_eq!(&bytes, &common::whole(&VirtualFileReader::open(&copy).unwrap()));

        for options in [
            ParseOptions { allow_partial: true, ..ParseOptions::default() },
            ParseOptions { follow_symlinks: true, ..ParseOptions::default() },
        ] {
            let other = virtual_file(first.path(), &options);
            prop_assert_eq!(other.layout_hash(), before.layout_hash());
            prop_assert_ne!(other.identity(), before.identity());
        }

        let entry = fs::read_dir(first.path()).unwrap().next().unwrap().unwrap();
        let file = fs::OpenOptions::new().write(true).open(entry.path()).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(100)).unwrap();
        let touched = virtual_file(first.path(), &plain);
        prop_assert_eq!(touched.layout_hash(), before.layout_hash());
        prop_assert_ne!(touched.identity(), before.identity());
    }
}
