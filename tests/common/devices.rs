//! Checkpoints and assertions for tests of loads to devices.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use ckptfs::checkpoint::Tensor;
use ckptfs::cuda;
use ckptfs::loader::{LoadOptions, OpenCheckpoint};
use serde_json::{Value, json};

use super::safetensors::{entry, raw};
use super::samples::{bytes, directory};

/// Bytes that a reader fills at once.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// A checkpoint that so many threads read.
pub fn open(path: &Path, threads: usize) -> OpenCheckpoint {
    LoadOptions { threads: NonZeroUsize::new(threads), ..LoadOptions::default() }
        .open(path)
        .unwrap()
}

/// Asserts that everything is given back, and that the stub found no fault.
pub fn assert_clean(report: &Value) {
    for what in ["device", "pinned"] {
        assert_eq!(report["allocated"][what]["count"], 0, "{what}: {report}");
    }
    for what in ["streams", "events", "modules", "contexts"] {
        assert_eq!(report["allocated"][what], 0, "{what}: {report}");
    }
    assert_eq!(
        (&report["faults"], &report["pageable_copies"]),
        (&json!([]), &json!(0)),
        "{report}"
    );
}

/// Asserts that each tensor's bytes are those of the virtual file.
pub fn assert_loaded(opened: &OpenCheckpoint, loaded: &[cuda::DeviceSlice]) {
    for (tensor, memory) in opened.tensors().iter().zip(loaded) {
        let expected = opened.load(tensor).unwrap();
        assert!(*memory.to_host().unwrap() == *expected, "{}", tensor.name);
    }
}

/// All tensors of a checkpoint.
pub fn all_tensors(opened: &OpenCheckpoint) -> Vec<(&OpenCheckpoint, &Tensor)> {
    opened.tensors().iter().map(|tensor| (opened, tensor)).collect()
}

/// A checkpoint of many chunks: some tensors are larger than a chunk, others share one.
pub fn large_checkpoint() -> (tempfile::TempDir, PathBuf) {
    checkpoint_of([3 << 20, 9 << 20, 100, 5000, (4 << 20) + 4, 64, 8 << 20, 12, 70_000])
}

/// A checkpoint with tensors of these sizes, one after the other.
pub fn checkpoint_of(sizes: impl IntoIterator<Item = usize>) -> (tempfile::TempDir, PathBuf) {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (n, size) in sizes.into_iter().enumerate() {
        let start = data.len() as u64;
        // Repeats a random run of an odd length: random bytes are slow to make.
        let some = bytes(size.min(65_537), n as u64);
        data.extend(some.repeat(size.div_ceil(some.len())));
        data.truncate(start as usize + size);
        let (name, shape) = (format!("t{n}"), format!("[{size}]"));
        entries.push(entry(&name, "U8", &shape, start, start + size as u64));
    }
    let header = format!("{{{}}}", entries.join(","));
    let folder = directory();
    let path = folder.path().join("large.safetensors");
    std::fs::write(&path, raw(header.len() as u64, header.as_bytes(), &data)).unwrap();
    (folder, path)
}
