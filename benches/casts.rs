//! Times casts of a cached file by `VirtualFileReader::read_at`, in turn with `memcpy` of as many bytes.
//!
//! A cast of fp32 to bf16 reads two bytes for each byte that it writes. `memcpy` reads and writes as many bytes in all,
//! on one thread and in as many requests. RUNS is the number of runs. Prints the seconds of each as JSON.

#![allow(clippy::unwrap_used)] // A failure here ends the run and is printed.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ckptfs::checkpoint;
use ckptfs::recipe::Transform;
use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// The number of values of the model. Each tensor has as many as one of a layer.
const VALUE_COUNT: usize = 64 << 20;
const TENSOR_COUNT: usize = 16;

/// The number of requests of a run. Each is for 1 MiB of bf16, or 2 MiB of fp32.
const REQUEST_COUNT: usize = 128;

fn write_model(path: &Path, dtype: Dtype, value_bytes: usize) {
    // Bytes of finite numbers, as weights are.
    let data: Vec<u8> =
        (0..VALUE_COUNT / TENSOR_COUNT * value_bytes).map(|n| (n * 31 % 61) as u8).collect();
    let view = || TensorView::new(dtype, vec![VALUE_COUNT / TENSOR_COUNT], &data).unwrap();
    let views = (0..TENSOR_COUNT).map(|n| (format!("layers.{n}.weight"), view()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// The virtual file of a checkpoint with all its tensors cast.
fn cast_file(path: &Path, to: &str) -> Arc<VirtualFile> {
    let checkpoint = checkpoint::open(path, &Default::default()).unwrap();
    let steps = format!(r#"{{"cast": [{{"tensors": "*", "to": "{to}"}}]}}"#);
    let transform = Transform::parse_json(&steps, path).unwrap();
    Arc::new(VirtualFile::new(transform.apply(checkpoint, Vec::new()).unwrap()).unwrap())
}

/// Seconds to read all data of a file into memory.
fn time_reads(reader: &VirtualFileReader, file: &VirtualFile, memory: &mut [u8]) -> f64 {
    let request_bytes = memory.len() / REQUEST_COUNT;
    let start = Instant::now();
    for (n, part) in memory.chunks_mut(request_bytes).enumerate() {
        let offset = file.header_size() + (n * request_bytes) as u64;
        assert_eq!(reader.read_at(part, offset).unwrap(), part.len());
    }
    black_box(&memory);
    start.elapsed().as_secs_f64()
}

/// Seconds to copy memory.
fn time_copies(from: &[u8], to: &mut [u8]) -> f64 {
    let request_bytes = from.len() / REQUEST_COUNT;
    let start = Instant::now();
    for (from, to) in from.chunks(request_bytes).zip(to.chunks_mut(request_bytes)) {
        to.copy_from_slice(from);
    }
    black_box(&to);
    start.elapsed().as_secs_f64()
}

fn main() {
    let runs = std::env::var("RUNS").map_or(5, |runs| runs.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let casts =
        [("fp32 to bf16", Dtype::F32, 4, "bfloat16"), ("bf16 to fp32", Dtype::BF16, 2, "float32")];
    let mut lines = Vec::new();
    for (label, dtype, value_bytes, to) in casts {
        let path = directory.path().join(format!("{to}.safetensors"));
        write_model(&path, dtype, value_bytes);
        let file = cast_file(&path, to);
        let reader = VirtualFileReader::open(&file).unwrap();
        let mut memory = vec![1; VALUE_COUNT * (6 - value_bytes)];
        // Of six bytes for each value half are read and half are written.
        let (from, mut copy) = (vec![2; VALUE_COUNT * 3], vec![3; VALUE_COUNT * 3]);
        let (mut cast_seconds, mut copy_seconds) = (Vec::new(), Vec::new());
        for run in 0..=runs {
            let cast = time_reads(&reader, &file, &mut memory);
            let copied = time_copies(&from, &mut copy);
            // The first run populates the page cache.
            if run > 0 {
                cast_seconds.push(cast);
                copy_seconds.push(copied);
            }
        }
        lines.push(format!(
            r#""{label}": {{"cast": {cast_seconds:?}, "memcpy": {copy_seconds:?}}}"#
        ));
    }
    println!("{{{}}}", lines.join(", "));
}
