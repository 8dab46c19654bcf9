//! Benchmarks of the engine: parsing checkpoints into virtual files, and reading cached bytes.
//!
//! A baseline stands beside each, so that one run gives a ratio: `read_at` beside a plain `pread` of the same bytes.
//! `scripts/bench/run` measures what needs whole processes: peak memory, and `export` beside `cp`.

#![allow(clippy::unwrap_used)] // A failure here ends the run and is printed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};
use divan::Bencher;
use divan::counter::BytesCount;

fn main() {
    divan::main();
}

/// The size of the cached file that is read.
const SERVED_BYTES: usize = 256 << 20;

/// The size of a typical request of the kernel or of a loader.
const REQUEST_BYTES: usize = 1 << 20;

fn virtual_file(path: &Path) -> VirtualFile {
    VirtualFile::new(checkpoint::open(path, &ParseOptions::default()).unwrap()).unwrap()
}

#[divan::bench(sample_count = 20, sample_size = 1)]
fn virtual_file_of_100_000_tensors_in_160_shards(bencher: Bencher) {
    let directory = tempfile::tempdir().unwrap();
    models::sharded(directory.path(), 160, 625);
    bencher.bench_local(|| virtual_file(directory.path()));
}

#[divan::bench(sample_count = 20, sample_size = 1)]
fn virtual_file_of_a_pt_with_10_000_tensors(bencher: Bencher) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.pt");
    models::torch_zip(&path, 10_000);
    bencher.bench_local(|| virtual_file(&path));
}

/// A model of 64 tensors, all in the page cache.
fn served() -> (tempfile::TempDir, VirtualFileReader, Arc<VirtualFile>) {
    let directory = tempfile::tempdir().unwrap();
    models::single(&directory.path().join("model.safetensors"), 64, SERVED_BYTES / 64);
    let file = Arc::new(virtual_file(directory.path()));
    let reader = VirtualFileReader::open(&file).unwrap();
    (directory, reader, file)
}

#[divan::bench(sample_count = 30, sample_size = 1)]
fn read_at_in_1_mib_requests(bencher: Bencher) {
    let (_directory, reader, file) = served();
    let mut buffer = vec![0; REQUEST_BYTES];
    bencher.counter(BytesCount::new(SERVED_BYTES)).bench_local(|| {
        for offset in (file.header_size()..file.size()).step_by(REQUEST_BYTES) {
            divan::black_box(reader.read_at(&mut buffer, offset).unwrap());
        }
    });
}

#[divan::bench(sample_count = 30, sample_size = 1)]
fn plain_pread_in_1_mib_requests(bencher: Bencher) {
    let (directory, ..) = served();
    let file = File::open(directory.path().join("model.safetensors")).unwrap();
    let (start, end) =
        (file.metadata().unwrap().len() - SERVED_BYTES as u64, file.metadata().unwrap().len());
    let mut buffer = vec![0; REQUEST_BYTES];
    bencher.counter(BytesCount::new(SERVED_BYTES)).bench_local(|| {
        for offset in (start..end).step_by(REQUEST_BYTES) {
            file.read_exact_at(&mut buffer, offset).unwrap();
            divan::black_box(&buffer);
        }
    });
}

/// Files as the ordinary writers make them.
mod models {
    use std::fs::File;
    use std::io::{BufWriter, Write};
    use std::path::Path;

    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    /// Shards of small tensors with names as long as a real model's, and their index.
    pub fn sharded(directory: &Path, shards: usize, tensors: usize) {
        let data = [0u8; 64];
        let mut index = String::from("{\"metadata\":{\"total_size\":0},\"weight_map\":{");
        for shard in 0..shards {
            let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
            let name = |n| {
                format!("model.language_model.layers.{shard}.mlp.experts.{n}.gate_up_proj.weight")
            };
            let view = || TensorView::new(Dtype::BF16, vec![8, 4], &data).unwrap();
            let views: Vec<_> = (0..tensors).map(|n| (name(n), view())).collect();
            for (name, _) in &views {
                index += &format!("\"{name}\":\"{file}\",");
            }
            safetensors::serialize_to_file(views, None, &directory.join(file)).unwrap();
        }
        index.pop();
        std::fs::write(directory.join("model.safetensors.index.json"), index + "}}").unwrap();
    }

    /// One file of a few large tensors.
    pub fn single(path: &Path, tensors: usize, bytes: usize) {
        let data = vec![1; bytes];
        let view = || TensorView::new(Dtype::U8, vec![bytes], &data).unwrap();
        let views = (0..tensors).map(|n| (format!("layer.{n}.weight"), view()));
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    /// What `torch.save` makes of a dictionary of small tensors, byte for byte in its structure.
    pub fn torch_zip(path: &Path, tensors: usize) {
        let mut pickle = b"\x80\x02}q\x00(".to_vec();
        for n in 0..tensors {
            text(&mut pickle, &format!("model.layers.{n}.mlp.experts.gate_up_proj.weight"));
            pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
            text(&mut pickle, "storage");
            pickle.extend(b"ctorch\nFloatStorage\n");
            text(&mut pickle, &n.to_string());
            text(&mut pickle, "cpu");
            pickle.extend(
                b"K\x10tQK\x00K\x04K\x04\x86K\x04K\x01\x86\x89ccollections\nOrderedDict\n)RtR",
            );
        }
        pickle.extend(b"u.");
        let mut out = BufWriter::new(File::create(path).unwrap());
        let mut directory = Vec::new();
        let mut at = 0u32;
        let mut add = |name: String, data: &[u8]| {
            let (name, len) = (format!("model/{name}"), data.len() as u32);
            let common = |out: &mut Vec<u8>| {
                out.extend([0; 6]); // Flags, method, time.
                out.extend([0; 2]);
                out.extend([0; 4]); // The checksum, which no reader of checkpoints looks at.
                out.extend(len.to_le_bytes());
                out.extend(len.to_le_bytes());
                out.extend((name.len() as u16).to_le_bytes());
            };
            let mut header = b"PK\x03\x04\x14\x00".to_vec();
            common(&mut header);
            // The data begins at a multiple of 64, by an extra field.
            let pad = 64 - (at as usize + header.len() + 2 + name.len() + 4) % 64;
            header.extend((pad as u16 + 4).to_le_bytes());
            header.extend(name.as_bytes());
            header.extend(b"FB");
            header.extend((pad as u16).to_le_bytes());
            header.resize(header.len() + pad, b'Z');
            directory.extend(b"PK\x01\x02\x14\x00\x14\x00");
            common(&mut directory);
            directory.extend([0; 12]);
            directory.extend(at.to_le_bytes());
            directory.extend(name.as_bytes());
            out.write_all(&header).unwrap();
            out.write_all(data).unwrap();
            at += (header.len() + data.len()) as u32;
        };
        add("data.pkl".to_owned(), &pickle);
        for n in 0..tensors {
            add(format!("data/{n}"), &[0; 64]);
        }
        add("version".to_owned(), b"3\n");
        let count = (tensors as u16 + 2).to_le_bytes();
        out.write_all(&directory).unwrap();
        out.write_all(b"PK\x05\x06\x00\x00\x00\x00").unwrap();
        out.write_all(&[count, count].concat()).unwrap();
        out.write_all(&(directory.len() as u32).to_le_bytes()).unwrap();
        out.write_all(&at.to_le_bytes()).unwrap();
        out.write_all(&[0, 0]).unwrap();
    }

    fn text(pickle: &mut Vec<u8>, text: &str) {
        pickle.push(b'X');
        pickle.extend((text.len() as u32).to_le_bytes());
        pickle.extend(text.as_bytes());
    }
}
