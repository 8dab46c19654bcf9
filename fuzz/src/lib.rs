//! What the fuzz targets share: reading bytes as far as they can be read, and what must then hold.

#[allow(dead_code)] // The tests use more of it.
#[path = "../../tests/common/pickle.rs"]
mod pickle;
#[allow(dead_code)] // The tests use more of it.
#[path = "../../tests/common/zip.rs"]
mod zip;

use std::path::Path;
use std::sync::Arc;

use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};

/// Bytes that are read from the front of a virtual file.
const FRONT: usize = 64 << 10;

/// Bytes of each range that is read elsewhere.
const RANGE: usize = 1000;

/// Virtual files up to this size are read whole and shown to the reference reader.
const SMALL: u64 = 1 << 20;

/// The sizes of the storages `0` to `3` of an archive with a pickle: six floats, eight long integers,
/// four halves, none.
const STORAGES: [usize; 4] = [24, 64, 8, 0];

/// A sound archive with that pickle and some storages.
pub fn archive(pickle: &[u8]) -> Vec<u8> {
    let mut records = vec![zip::Record::stored("archive/data.pkl", pickle)];
    for (key, &len) in STORAGES.iter().enumerate() {
        let bytes: Vec<u8> = (0..len).map(|n| (n * 7 + key) as u8).collect();
        records.push(zip::Record::stored(&format!("archive/data/{key}"), &bytes));
    }
    zip::archive(&records)
}

/// Reads bytes as a checkpoint of that name: all of it, then with what cannot be shown left out.
/// Says whether they are one.
pub fn read(bytes: &[u8], name: &str) -> bool {
    let all = read_with(bytes, name, &ParseOptions::default());
    let part =
        read_with(bytes, name, &ParseOptions { allow_partial: true, ..ParseOptions::default() });
    assert!(part || !all, "what is shown whole is shown in part");
    all
}

fn read_with(bytes: &[u8], name: &str, options: &ParseOptions) -> bool {
    let Ok(checkpoint) = checkpoint::parse_bytes(bytes, Path::new(name), options) else {
        return false;
    };
    let Ok(virtual_file) = VirtualFile::new(checkpoint) else {
        return false;
    };
    check(&Arc::new(virtual_file));
    true
}

/// What holds for every virtual file: each range can be read, segments and tensors tile it, and it is a
/// valid file.
fn check(virtual_file: &Arc<VirtualFile>) {
    let reader = VirtualFileReader::open(virtual_file).expect("memory does not change");
    let size = virtual_file.size();
    let read = |start: u64, len: usize| {
        let mut out = vec![0; len];
        let read = reader.read_at(&mut out, start).expect("every byte is there");
        assert_eq!(read as u64, size.saturating_sub(start).min(len as u64));
        out.truncate(read);
        out
    };
    let front = read(0, FRONT);
    let starts =
        [virtual_file.header_size().saturating_sub(3), size / 2, size.saturating_sub(7), size];
    for start in starts {
        let part = read(start, RANGE);
        if let Some(same) = front.get(start as usize..).filter(|same| same.len() >= part.len()) {
            assert_eq!(part, same[..part.len()]);
        }
        let end = start + part.len() as u64;
        let at = virtual_file.segments(start..end).fold(start, |at, segment| {
            assert_eq!(segment.range.start, at);
            segment.range.end
        });
        assert_eq!(at, end);
    }
    let mut at = virtual_file.header_size();
    for place in 0..virtual_file.tensors().len() {
        let range = virtual_file.tensor_range(place);
        assert_eq!(range.start, at);
        at = range.end;
        if !range.is_empty() {
            assert_eq!(virtual_file.tensor_at(range.start), Some(place));
            assert_eq!(virtual_file.tensor_at(range.end - 1), Some(place));
        }
    }
    assert_eq!(at, size);
    if size <= SMALL {
        let whole = read(0, size as usize);
        safetensors::SafeTensors::deserialize(&whole).expect("valid for the reference reader");
    }
}
