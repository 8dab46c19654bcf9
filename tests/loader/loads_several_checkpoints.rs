//! Tensors of several checkpoints load together as they do one by one; an error names its checkpoint.

use std::fs::{self, OpenOptions};
use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use crate::common::samples::{all_samples, sharded};
use ckptfs::checkpoint::Tensor;
use ckptfs::loader::{
    BufferAlignment, LoadError, LoadOptions, LoadRequest, OpenCheckpoint, load_many,
    load_many_owned,
};

const FILE: BufferAlignment = BufferAlignment::File;

static NEVER: AtomicBool = AtomicBool::new(false);

/// Every tensor of every checkpoint, ordered by name, so that no two of one adjoin.
fn mixed(opened: &[OpenCheckpoint]) -> Vec<(&OpenCheckpoint, &Tensor)> {
    let tensors = |of| OpenCheckpoint::tensors(of).iter().map(move |tensor| (of, tensor));
    let mut mixed: Vec<(&OpenCheckpoint, &Tensor)> = opened.iter().flat_map(tensors).collect();
    mixed.sort_by_key(|(_, tensor)| &*tensor.name);
    mixed
}

#[test]
fn a_load_of_several_equals_loads_one_by_one() {
    let all = all_samples();
    for (threads, leave_cache) in [(1, false), (4, true), (16, false)] {
        let options = LoadOptions {
            threads: NonZeroUsize::new(threads),
            leave_cache,
            ..LoadOptions::default()
        };
        let opened: Vec<OpenCheckpoint> =
            all.iter().map(|(_, (_, path))| options.open(path).unwrap()).collect();
        let wanted = mixed(&opened);
        let (memory, report) = load_many_owned(&wanted, FILE, &NEVER, None).unwrap();
        let bytes: u64 = wanted.iter().map(|(_, tensor)| tensor.bytes.len()).sum();
        assert_eq!((report.tensors, report.bytes), (wanted.len(), bytes));
        for ((of, tensor), memory) in wanted.iter().zip(&memory) {
            assert!(of.load(tensor).unwrap()[..] == memory[..], "{of:?}: {}", tensor.name);
        }
        // Into the caller's memory, and the first of them twice.
        let twice: Vec<_> = wanted.iter().chain(&wanted[..5]).collect();
        let mut targets: Vec<Vec<u8>> =
            twice.iter().map(|(_, tensor)| vec![0; tensor.bytes.len() as usize]).collect();
        let places = twice.iter().zip(&mut targets);
        let places =
            places.map(|((of, tensor), target)| LoadRequest { checkpoint: of, tensor, target });
        load_many(places, &NEVER, Some(2)).unwrap();
        for (target, memory) in targets.iter().zip(memory.iter().chain(&memory[..5])) {
            assert!(target[..] == memory[..]);
        }
    }
    assert_eq!(load_many([], &NEVER, None).unwrap().tensors, 0);
}

#[test]
fn an_error_names_the_checkpoint_at_fault() {
    let ((_one, good), (_other, bad)) = (sharded(), sharded());
    let opened = [&good, &bad].map(|path| ckptfs::open(path).unwrap());
    let wanted = mixed(&opened);
    let shard = bad.join("model-00002-of-00003.safetensors");
    let file = OpenOptions::new().write(true).open(&shard).unwrap();
    file.set_times(fs::FileTimes::new().set_modified(SystemTime::UNIX_EPOCH)).unwrap();
    let error = load_many_owned(&wanted, FILE, &NEVER, None).unwrap_err();
    assert!(error.to_string().starts_with(shard.to_str().unwrap()), "{error}");
    let tensor = opened[1].tensors().iter().find(|tensor| !tensor.bytes.is_empty()).unwrap();
    let wanted = LoadRequest { checkpoint: &opened[1], tensor, target: &mut [] };
    let error = load_many([wanted], &NEVER, None).unwrap_err();
    assert!(matches!(&error, LoadError::TargetLength { path, .. } if *path == bad), "{error}");
    assert!(matches!(
        load_many_owned(&mixed(&opened[..1]), FILE, &true.into(), None).unwrap_err(),
        LoadError::Stopped { path } if path == good
    ));
}
