//! One checkpoint of each kind, larger than a block of the cache and a read of the loader. They have runs,
//! strided and expanded views, the other byte order, compressed storages and the legacy form.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use super::{legacy, pickle, zip};

const MIB: usize = 1 << 20;

/// Pseudorandom numbers, the same each time.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end.max(1)
    }
}

pub fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut numbers = Numbers(seed);
    (0..len).map(|_| numbers.below(256) as u8).collect()
}

/// A directory on a disk: a filesystem in memory cannot drop its pages. On another machine than the one that
/// built this, the system's temporary directory.
pub fn directory() -> TempDir {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let found = if built.is_dir() { built.to_owned() } else { std::env::temp_dir() };
    tempfile::tempdir_in(found).expect("a directory")
}

/// The open files of a checkpoint, which is a file or a directory.
pub fn files_of(path: &Path) -> Vec<File> {
    let paths = match path.is_dir() {
        true => fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect(),
        false => vec![path.to_path_buf()],
    };
    paths.iter().map(|path| File::open(path).unwrap()).collect()
}

/// Evicts a checkpoint from the page cache, so that it is read from the disk.
pub fn evict(path: &Path) {
    for file in files_of(path) {
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    }
}

/// Three shards with large, small and tiny tensors.
pub fn sharded() -> (TempDir, PathBuf) {
    let directory = directory();
    for shard in 0..3u64 {
        let sizes = [3 * MIB + 40, 700_000, 12, 0, 2 * MIB, 300 * 1024, 64];
        let tensors: Vec<_> = (0..).zip(sizes).map(|(n, len)| bytes(len, shard * 10 + n)).collect();
        let views = tensors.iter().enumerate().map(|(n, bytes)| {
            let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes).expect("consistent");
            (format!("t{shard}.{n}"), view)
        });
        let name = format!("model-{:05}-of-00003.safetensors", shard + 1);
        fs::write(
            directory.path().join(name),
            safetensors::serialize(views, None).expect("serialised"),
        )
        .expect("written");
    }
    let path = directory.path().to_path_buf();
    (directory, path)
}

pub fn write_sample(content: &[u8]) -> (TempDir, PathBuf) {
    let directory = directory();
    let path = directory.path().join("x.pt");
    fs::write(&path, content).expect("written");
    (directory, path)
}

/// Together larger than a block.
const ROWS: i128 = 400;
const COLUMNS: i128 = 700;

/// Views of one storage: a run, a transposed one, a window, an expanded one.
pub fn views() -> Vec<u8> {
    let view = |shape: &[i128], stride: &[i128], offset| {
        let (shape, stride) = (shape.to_vec(), stride.to_vec());
        let count = ROWS * COLUMNS;
        pickle::Tensor { count, offset, shape, stride, ..Default::default() }.bytes()
    };
    pickle::pickle(&pickle::dict(&[
        ("run", view(&[ROWS, COLUMNS], &[COLUMNS, 1], 0)),
        ("turned", view(&[COLUMNS, ROWS], &[1, COLUMNS], 0)),
        ("window", view(&[ROWS - 10, 77], &[COLUMNS, 1], 5)),
        ("same", view(&[300, COLUMNS], &[0, 1], COLUMNS)),
    ]))
}

pub fn torch(order: &[u8], packed: bool) -> (TempDir, PathBuf) {
    let storage = bytes((ROWS * COLUMNS * 4) as usize, 99);
    let record = if packed { zip::Record::deflated } else { zip::Record::stored };
    write_sample(&zip::archive(&[
        zip::Record::stored("archive/data.pkl", &views()),
        zip::Record::stored("archive/byteorder", order),
        record("archive/data/0", &storage),
    ]))
}

pub fn legacy_sample() -> (TempDir, PathBuf) {
    let (rows, columns) = (400, 700);
    let count = rows * columns;
    let (shape, stride) = (vec![columns, rows], vec![1, columns]);
    let tensor = pickle::Tensor { count, shape, stride, ..Default::default() };
    let mut file = legacy::one_tensor(&tensor, None);
    file.storages = vec![(count as i64, bytes(count as usize * 4, 5))];
    write_sample(&file.bytes())
}

/// Checkpoints, each with steps that cast all its tensors, and the type: of plain runs, and of byte-swapped ones.
pub fn cast_samples() -> impl Iterator<Item = ((TempDir, PathBuf), String, &'static str)> {
    let swapped = || torch(b"big", false);
    let samples = [
        (sharded(), "int32"),
        (sharded(), "int64"),
        (swapped(), "bfloat16"),
        (swapped(), "float64"),
    ];
    let steps = |dtype| format!(r#"{{"cast": [{{"tensors": "*", "to": "{dtype}"}}]}}"#);
    samples.into_iter().map(move |(sample, dtype)| (sample, steps(dtype), dtype))
}

pub fn all_samples() -> Vec<(&'static str, (TempDir, PathBuf))> {
    vec![
        ("sharded", sharded()),
        ("strided", torch(b"little", false)),
        ("swapped", torch(b"big", false)),
        ("packed", torch(b"little", true)),
        ("legacy", legacy_sample()),
    ]
}
