//! Helpers of the tests: ways to run and mount, and files put together byte by byte. Each file is wrong in one way and
//! right in all others.

#![allow(dead_code, unused_macros)] // Each binary uses its own part.
#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

pub mod bombs;
#[cfg(feature = "cuda")]
pub mod casts;
#[cfg(feature = "cuda")]
mod child;
pub mod command;
#[cfg(feature = "cuda")]
pub mod devices;
#[cfg(feature = "mount")]
pub mod failing_source;
pub mod legacy;
#[cfg(feature = "mount")]
pub mod mounting;
pub mod pickle;
pub mod safetensors;
pub mod samples;
pub mod shards;
#[cfg(feature = "cuda")]
pub mod stub;
pub mod view;
pub mod zip;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use ckptfs::checkpoint::{self, Checkpoint, CheckpointError, ParseOptions, RefusedEntry};
use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};

/// The name of a test of the calling module, as the test's own program takes it after `--exact`.
macro_rules! test_path {
    ($name:literal) => {
        concat!(module_path!(), "::", $name).split_once("::").unwrap().1
    };
}
#[allow(unused_imports)]
pub(crate) use test_path;

/// Time that reading the worst small file may take, in a debug build on a busy machine. Anything out of
/// proportion takes hours.
const PARSE_TIMEOUT: Duration = Duration::from_secs(120);

/// Parses bytes as a torch file.
pub fn torch(bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    checkpoint::parse_bytes(bytes, Path::new("x.pt"), &ParseOptions::default())
}

/// Parses bytes as a safetensors file.
pub fn safetensors(bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    checkpoint::parse_bytes(bytes, Path::new("x.safetensors"), &ParseOptions::default())
}

/// The only entry of a checkpoint, which must be refused.
pub fn refused(checkpoint: Checkpoint) -> RefusedEntry {
    assert!(checkpoint.tensors.is_empty(), "shown: {:?}", checkpoint.tensors);
    let [refused] = <[RefusedEntry; 1]>::try_from(checkpoint.refused).expect("one refused entry");
    refused
}

/// The open virtual file of a checkpoint.
pub fn reader(checkpoint: Checkpoint) -> VirtualFileReader {
    let virtual_file = VirtualFile::new(checkpoint).expect("a virtual file");
    VirtualFileReader::open(&Arc::new(virtual_file)).expect("unchanged sources")
}

/// All bytes of a virtual file.
pub fn whole(reader: &VirtualFileReader) -> Vec<u8> {
    let mut bytes =
        vec![0; usize::try_from(reader.virtual_file().size()).expect("a small virtual file")];
    assert_eq!(reader.read_at(&mut bytes, 0).expect("readable"), bytes.len());
    bytes
}

/// The bytes of one tensor, as the checkpoint's virtual file has them.
pub fn tensor_bytes(checkpoint: Checkpoint, name: &str) -> Vec<u8> {
    let reader = reader(checkpoint);
    let tensors = reader.virtual_file().tensors();
    let place = tensors.iter().position(|t| &*t.name == name).expect("the tensor is there");
    let range = reader.virtual_file().tensor_range(place);
    whole(&reader)[range.start as usize..range.end as usize].to_vec()
}

/// Runs work that must end soon, whatever its input.
pub fn in_bounded_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, answer) = channel();
    std::thread::spawn(move || done.send(work()));
    answer.recv_timeout(PARSE_TIMEOUT).expect("it came to an end in time, without a panic")
}
