//! A program that touches one tensor after the other waits only for the touched pages, and not for the
//! readahead around them.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use crate::common::failing_source::{Behavior, FailingSource};
use ckptfs::cache::{Cache, CacheLimits, CachedFile};
use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const MIB: usize = 1 << 20;

/// The source's 16 threads begin as many reads before priorities count, and a busy machine answers those in any order.
/// This many tensors outweigh both.
const TENSORS: usize = 30;

/// More than what is read around a page and a gap that a stream skips.
const TENSOR_BYTES: usize = 13 * MIB;

/// Requests that the kernel makes around a page: 4 MiB before it and as much after it.
const AROUND: usize = 8;

fn served(folder: &str) -> Arc<CachedFile> {
    let checkpoint = checkpoint::open(Path::new(folder), &ParseOptions::default()).unwrap();
    let reader = Arc::new(
        VirtualFileReader::open(&Arc::new(VirtualFile::new(checkpoint).unwrap())).unwrap(),
    );
    Cache::new(CacheLimits { memory_bytes: 256 << 20, readahead_bytes: Some(4 << 20) }, None)
        .open(reader)
}

fn file() -> Vec<u8> {
    let data: Vec<Vec<u8>> = (0..TENSORS).map(|n| vec![n as u8; TENSOR_BYTES]).collect();
    let view = |data| TensorView::new(Dtype::U8, vec![TENSOR_BYTES], data).unwrap();
    let views = (0..).zip(&data).map(|(n, data)| (format!("layer.{n:02}.weight"), view(data)));
    safetensors::serialize(views, None).unwrap()
}

/// Reads as the kernel does when the first page of a tensor is touched. Each answer names its tensor.
fn touch(served: &Arc<CachedFile>, tensor: usize, say: &Sender<(usize, bool)>) {
    let first = served.virtual_file().tensor_range(tensor).start & !4095;
    for n in 0..AROUND as u64 {
        let offset = first - (4 << 20) + n * MIB as u64;
        let (say, is_waited_for) = (say.clone(), offset == first);
        served.read(
            offset,
            MIB as u32,
            Box::new(move |answer| {
                assert_eq!(answer.unwrap()[MIB - 1] as usize, tensor - usize::from(offset < first));
                say.send((tensor, is_waited_for)).unwrap();
            }),
        );
    }
}

#[test]
fn touching_tensors_waits_for_the_pages_that_are_touched() {
    let folder = tempfile::tempdir().unwrap();
    let at = format!("{}/far", folder.path().display());
    let far = FailingSource::new(&at, vec![("model.safetensors".to_owned(), file())]);
    let served = served(&at);
    far.set(Behavior::HangsOnReads);
    let (say, messages) = channel();
    (1..TENSORS).for_each(|tensor| touch(&served, tensor, &say));
    far.set(Behavior::Works);
    drop(say);
    let answer = || messages.recv_timeout(Duration::from_secs(60)).unwrap();
    let answers: Vec<_> = (0..(TENSORS - 1) * AROUND).map(|_| answer()).collect();
    let waited_for = (0..answers.len()).filter(|&n| answers[n].1);
    let middle = waited_for.clone().nth(TENSORS / 2 - 1).unwrap();
    // Without priority, they would be spread over all of it.
    assert_eq!(waited_for.count(), TENSORS - 1);
    assert!(middle < answers.len() / 3, "{middle}: {answers:?}");
}
