//! A load gives the virtual file's bytes, for every format and way of reading, in whole or in part; or an
//! error and nothing.

use std::fs::{self, OpenOptions};
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use crate::common::samples::{
    Numbers, all_samples, cast_samples, directory, evict, files_of, sharded,
};
use ckptfs::checkpoint::{AxisSlice, Tensor};
use ckptfs::loader::{LoadError, LoadOptions, LoadRecipe, OpenCheckpoint, Route, TensorBuffer};
use ckptfs::source;
use rustix::fs::{Advice, fadvise};

fn open(path: &Path, threads: usize, leave_cache: bool) -> OpenCheckpoint {
    let options =
        LoadOptions { threads: NonZeroUsize::new(threads), leave_cache, ..LoadOptions::default() };
    options.open(path).unwrap()
}

/// Each tensor's bytes in the virtual file.
fn expected(opened: &OpenCheckpoint) -> Vec<Vec<u8>> {
    let virtual_file = opened.virtual_file();
    let reader =
        ckptfs::virtual_file::VirtualFileReader::open(&std::sync::Arc::new(reopened(opened)))
            .unwrap();
    let ranges = (0..opened.tensors().len()).map(|place| virtual_file.tensor_range(place));
    let read = |range: std::ops::Range<u64>| {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        reader.read_at(&mut bytes, range.start).unwrap();
        bytes
    };
    ranges.map(read).collect()
}

fn reopened(opened: &OpenCheckpoint) -> ckptfs::virtual_file::VirtualFile {
    let checkpoint = ckptfs::checkpoint::open(opened.path(), &Default::default()).unwrap();
    ckptfs::virtual_file::VirtualFile::new(checkpoint).unwrap()
}

/// Pages of the files that are in the page cache.
fn cached(path: &Path) -> u64 {
    let mut command = Command::new("fincore");
    command.args(["--noheadings", "--raw", "--output", "PAGES"]);
    match path.is_dir() {
        true => command.args(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path())),
        false => command.arg(path),
    };
    let pages = String::from_utf8(command.output().unwrap().stdout).unwrap();
    pages.lines().map(|pages| pages.trim().parse::<u64>().unwrap()).sum()
}

#[test]
fn loads_return_the_bytes_of_the_virtual_file() {
    for (name, (_folder, path)) in all_samples() {
        for (threads, cold, leave_cache) in
            [(1, true, false), (4, true, true), (1, false, false), (4, false, true)]
        {
            let opened = open(&path, threads, leave_cache);
            let expected = expected(&opened);
            if cold {
                evict(&path);
            }
            let mut memory: Vec<TensorBuffer> =
                expected.iter().map(|bytes| TensorBuffer::new(bytes.len()).unwrap()).collect();
            let targets = memory.iter_mut().map(|memory| &mut memory[..]);
            let report = opened.load_into(opened.tensors().iter().zip(targets)).unwrap();
            for ((tensor, got), expected) in opened.tensors().iter().zip(&memory).zip(&expected) {
                assert!(got[..] == expected[..], "{name}: {}", tensor.name);
            }
            let total: usize = expected.iter().map(Vec::len).sum();
            assert_eq!((report.tensors, report.bytes), (expected.len(), total as u64));
            let read = report.cached + report.direct + report.buffered;
            assert!(read + report.gathered + report.memory >= report.bytes, "{name}: {report:?}");
            assert_eq!((opened.route(), report.fallbacks.len()), (&Route::Plain, 0));
            if name == "sharded" {
                assert_eq!(report.direct > report.cached, cold, "{report:?}");
            }
            // One by one, each in memory of its own.
            for (tensor, expected) in opened.tensors().iter().zip(&expected) {
                let memory = opened.load(opened.tensor(&tensor.name).unwrap()).unwrap();
                assert!(memory[..] == expected[..], "{name}: {}", tensor.name);
            }
        }
    }
}

#[test]
fn runs_that_are_converted_are_read_past_the_page_cache() {
    for ((_folder, path), steps, dtype) in cast_samples() {
        let recipe = Some(LoadRecipe::parse_json(&steps).unwrap().into());
        let options = LoadOptions { recipe, ..LoadOptions::default() };
        let opened = options.open(&path).unwrap();
        let expected = opened.load_all(opened.tensors()).unwrap();
        evict(&path);
        let loaded = opened.load_all(opened.tensors()).unwrap();
        // Tiny tensors bring what is around them into the page cache; the strided tensors of the byte-swapped sample, their
        // storage.
        assert!(!dtype.starts_with("int") || cached(&path) < 500, "{} pages", cached(&path));
        for ((loaded, expected), tensor) in loaded.iter().zip(&expected).zip(opened.tensors()) {
            assert!(loaded[..] == expected[..], "{}", tensor.name);
        }
    }
}

/// The bytes of a slice, element by element.
fn part_of(whole: &[u8], shape: &[u64], steps: &[AxisSlice], item: usize) -> Vec<u8> {
    let Some((size, inner)) = shape.split_first() else { return whole[..item].to_vec() };
    let len = whole.len() / *size as usize;
    let all = AxisSlice::range(0..*size);
    let (one, rest) = steps.split_first().unwrap_or((&all, &[]));
    let indexes = (0..one.count).map(|n| (one.start + n * one.step) as usize);
    indexes.flat_map(|n| part_of(&whole[n * len..][..len], inner, rest, item)).collect()
}

#[test]
fn slices_equal_those_of_the_whole_and_read_little_else() {
    let mut numbers = Numbers(7);
    for (name, (_folder, path)) in all_samples() {
        let opened = open(&path, 4, false);
        let whole = opened.load_all(opened.tensors()).unwrap();
        for (tensor, whole) in opened.tensors().iter().zip(&whole) {
            for _ in 0..6 {
                let steps: Vec<AxisSlice> = tensor
                    .shape
                    .iter()
                    .map(|&size| {
                        let start = numbers.below(size as usize + 1) as u64;
                        let step = 1 + numbers.below(3) as u64;
                        let most = (size - start).div_ceil(step);
                        AxisSlice { start, count: numbers.below(most as usize + 1) as u64, step }
                    })
                    .collect();
                let part = opened.slice(&tensor.name, &steps).unwrap();
                let got = opened.load(&part).unwrap();
                let item = (tensor.dtype.bits() / 8) as usize;
                let expected = match whole.is_empty() {
                    true => Vec::new(),
                    false => part_of(whole, &tensor.shape, &steps, item),
                };
                assert!(got[..] == expected[..], "{name}: {} {steps:?}", tensor.name);
            }
        }
    }
    let (_folder, path) = sharded();
    let opened = open(&path, 4, false);
    let largest = opened.tensors().iter().max_by_key(|tensor| tensor.bytes.len()).unwrap();
    let part = opened.slice(&largest.name, &[AxisSlice::range(1000..1010)]).unwrap();
    let mut ten = [0; 10];
    let report = opened.load_into([(&part, &mut ten[..])]).unwrap();
    assert!(report.cached + report.direct + report.buffered < 10_000, "{report:?}");
}

#[test]
fn many_small_tensors_are_read_together() {
    let folder = directory();
    let names: Vec<String> = (0..5000).map(|n| format!("layer.{n}.bias")).collect();
    let data: Vec<u8> = (0..5000u32).flat_map(|n| n.to_le_bytes().repeat(5)).collect();
    let views = names.iter().zip(data.chunks(20)).map(|(name, bytes)| {
        let dtype = safetensors::tensor::Dtype::I32;
        (name, safetensors::tensor::TensorView::new(dtype, vec![5], bytes).unwrap())
    });
    let path = folder.path().join("small.safetensors");
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    for cold in [true, false] {
        let opened = open(&path, 4, false);
        if cold {
            evict(&path);
        }
        let loaded =
            opened.load_all(names.iter().map(|name| opened.tensor(name).unwrap())).unwrap();
        for (n, memory) in (0u32..).zip(&loaded) {
            assert_eq!(&memory[..], n.to_le_bytes().repeat(5));
        }
    }
}

#[test]
fn leave_cache_leaves_the_page_cache_as_it_was() {
    for (name, (_folder, path)) in all_samples() {
        let opened = open(&path, 4, true);
        for there in [false, true] {
            evict(&path);
            for file in files_of(&path).iter().filter(|_| there) {
                // Some pages in the middle, without readahead.
                fadvise(file, 0, None, Advice::Random).unwrap();
                let middle = file.metadata().unwrap().len() / 2;
                file.read_at(&mut [0; 10_000], middle).unwrap();
            }
            let before = cached(&path);
            assert_eq!(before > 0, there, "{name}");
            opened.load_all(opened.tensors()).unwrap();
            assert_eq!(cached(&path), before, "{name}");
            for tensor in opened.tensors() {
                opened.load(tensor).unwrap();
            }
            assert_eq!(cached(&path), before, "{name}, one by one");
        }
    }
}

#[test]
fn unknown_names_slices_and_lengths_are_errors() {
    let (_folder, path) = sharded();
    let opened = open(&path, 4, false);
    let name = &opened.tensors()[0].name;
    let unknown = opened.tensor(&format!("{name}x")).unwrap_err();
    assert!(
        matches!(&unknown, LoadError::UnknownTensor { similar: Some(similar), .. } if **similar == **name),
        "{unknown}"
    );
    assert!(matches!(opened.tensor("").unwrap_err(), LoadError::UnknownTensor { .. }));
    let out = opened.slice(name, &[AxisSlice::range(0..u64::MAX)]).unwrap_err();
    assert!(matches!(out, LoadError::Slice { .. }), "{out}");
    let tensor = opened.tensor(name).unwrap();
    let mut short = vec![0; tensor.bytes.len() as usize - 1];
    let error = opened.load_into([(tensor, &mut short[..])]).unwrap_err();
    assert!(matches!(error, LoadError::TargetLength { .. }), "{error}");
    let mut right = vec![0; tensor.bytes.len() as usize];
    let stop = AtomicBool::new(true);
    let error = opened.load_until([(tensor, &mut right[..])], &stop).unwrap_err();
    assert!(matches!(error, LoadError::Stopped { .. }), "{error}");
}

#[test]
fn a_changed_source_is_refused() {
    for cold in [true, false] {
        let (_folder, path) = sharded();
        let opened = open(&path, 4, false);
        let shard = path.join("model-00002-of-00003.safetensors");
        let file = OpenOptions::new().write(true).open(&shard).unwrap();
        file.set_times(fs::FileTimes::new().set_modified(SystemTime::UNIX_EPOCH)).unwrap();
        if cold {
            evict(&path);
        }
        let error = opened.load_all(opened.tensors()).unwrap_err();
        assert!(matches!(error, LoadError::Source(source::SourceError::Changed { .. })), "{error}");
        file.set_len(100).unwrap();
        let of_it = |tensor: &&Tensor| tensor.name.starts_with("t1.") && !tensor.bytes.is_empty();
        for tensor in opened.tensors().iter().filter(of_it) {
            assert!(matches!(opened.load(tensor).unwrap_err(), LoadError::Source(_)));
        }
    }
}

#[test]
fn a_stream_hands_out_all_tensors_in_disk_order_within_its_limit() {
    for (name, (_folder, path)) in all_samples() {
        let opened = open(&path, 2, false);
        let expected = expected(&opened);
        let largest = opened.tensors().iter().map(|tensor| tensor.bytes.len()).max().unwrap_or(0);
        for hold in [largest, 2 * largest + 1, 1 << 30] {
            let (mut found, mut last) = (Vec::new(), None);
            let report = opened.stream(opened.tensors(), hold, |tensor, memory| {
                let reach = tensor.bytes.first_extent();
                assert!(last.replace(reach) <= Some(reach), "{name}: {}", tensor.name);
                found.push((&tensor.name, memory));
                ControlFlow::Continue(())
            });
            assert_eq!(report.unwrap().tensors, expected.len(), "{name}");
            for (tensor, expected) in opened.tensors().iter().zip(&expected) {
                let found = found.iter().find(|(found, _)| **found == tensor.name);
                assert!(found.unwrap().1[..] == expected[..], "{name}: {}", tensor.name);
            }
        }
        if largest > 0 {
            let less = opened.stream(opened.tensors(), largest - 1, |_, _| unreachable!());
            assert!(
                matches!(less, Err(LoadError::MemoryLimit { needed, .. }) if needed == largest)
            );
        }
    }
}

#[test]
fn a_stream_ends_when_its_caller_breaks() {
    let (_folder, path) = sharded();
    let opened = open(&path, 2, false);
    // Room for two of the largest: the third is read only after one of them is released.
    let hold = 2 * opened.tensors()[0].bytes.len();
    let mut some = 0;
    let report = opened.stream(opened.tensors(), hold, |_, _| {
        some += 1;
        if some < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    assert!(some == 3 && report.unwrap().tensors < opened.tensors().len());
    let panics = std::panic::AssertUnwindSafe(|| {
        opened.stream(opened.tensors(), hold, |_, _| panic!("on purpose"))
    });
    assert!(std::panic::catch_unwind(panics).is_err());
    // A changed file ends the stream with an error, and no tensor of it is handed out.
    for file in fs::read_dir(&path).unwrap() {
        let file = OpenOptions::new().write(true).open(file.unwrap().path()).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    }
    let changed = opened.stream(opened.tensors(), hold, |_, _| panic!("of a file that changed"));
    assert!(matches!(changed, Err(LoadError::Source(_))), "{changed:?}");
}
