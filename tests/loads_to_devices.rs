//! Promise: what is loaded to a device is what the image has, however often the memory between is used again;
//! or an error, and then nothing is left of it.

#![allow(clippy::unwrap_used)] // In functions of tests too: what fails fails the test.

mod standin;
mod support;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use ckptfs::checkpoint::Tensor;
use ckptfs::cuda::{self, Device, Error, Loader, Wanted};
use ckptfs::loader::{self, Opened, Options};
use serde_json::{Value, json};
use standin::with_driver;
use support::safetensors::{entry, raw};
use support::samples::{all, bytes, directory};

/// What readers fill at a time.
const CHUNK: u64 = 4 << 20;

fn open(path: &Path, threads: usize) -> Opened {
    Options { threads: NonZeroUsize::new(threads), ..Options::default() }.open(path).unwrap()
}

/// Everything is given back, and nothing was done that must not be.
fn is_clean(report: &Value) {
    for what in ["device", "pinned", "registered"] {
        assert_eq!(report["allocated"][what]["count"], 0, "{what}: {report}");
    }
    for what in ["streams", "events", "contexts"] {
        assert_eq!(report["allocated"][what], 0, "{what}: {report}");
    }
    assert_eq!(
        (&report["faults"], &report["pageable_copies"]),
        (&json!([]), &json!(0)),
        "{report}"
    );
}

fn same(opened: &Opened, loaded: &[cuda::Memory]) {
    for (tensor, memory) in opened.tensors().iter().zip(loaded) {
        let expected = opened.load(tensor).unwrap();
        assert!(*memory.to_host().unwrap() == *expected, "{}", tensor.name);
    }
}

fn of(opened: &Opened) -> Vec<(&Opened, &Tensor)> {
    opened.tensors().iter().map(|tensor| (opened, tensor)).collect()
}

/// A checkpoint of many chunks, with tensors that are larger than one, and such as share one.
fn large() -> (tempfile::TempDir, PathBuf) {
    let sizes = [3 << 20, 9 << 20, 100, 5000, (4 << 20) + 4, 64, 8 << 20, 12, 70_000];
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (n, size) in sizes.into_iter().enumerate() {
        let start = data.len() as u64;
        data.extend(bytes(size, n as u64));
        let (name, shape) = (format!("t{n}"), format!("[{size}]"));
        entries.push(entry(&name, "U8", &shape, start, start + size as u64));
    }
    let header = format!("{{{}}}", entries.join(","));
    let folder = directory();
    let path = folder.path().join("large.safetensors");
    std::fs::write(&path, raw(header.len() as u64, header.as_bytes(), &data)).unwrap();
    (folder, path)
}

#[test]
fn every_format_gets_there_through_few_chunks() {
    let report = with_driver("every_format_gets_there_through_few_chunks", &[], || {
        for chunks in [1, 2, 5] {
            let loader = Loader::new(&[0], chunks * CHUNK).unwrap();
            for (name, (_folder, path)) in all() {
                for threads in [1, 4] {
                    let opened = open(&path, threads);
                    let (loaded, report) = loader.load(&of(&opened), 0).unwrap();
                    same(&opened, &loaded);
                    let bytes: u64 = opened.tensors().iter().map(|it| it.bytes.len()).sum();
                    assert_eq!((report.tensors, report.bytes), (loaded.len(), bytes), "{name}");
                }
            }
        }
    });
    if let Some(report) = report {
        is_clean(&report);
        assert_eq!(report["peak"]["pinned"], 5 * CHUNK, "{report}");
    }
}

#[test]
fn chunks_are_used_over_and_over() {
    let report = with_driver("chunks_are_used_over_and_over", &[], || {
        let (_folder, path) = large();
        for (threads, chunks) in [(1, 1), (8, 1), (8, 2), (3, 7)] {
            let opened = open(&path, threads);
            let loader = Loader::new(&[0], chunks * CHUNK).unwrap();
            for _ in 0..2 {
                let (loaded, _) = loader.load(&of(&opened), 0).unwrap();
                same(&opened, &loaded);
            }
        }
    });
    report.iter().for_each(is_clean);
}

#[test]
fn several_devices_in_one_load() {
    let test = "several_devices_in_one_load";
    let report = with_driver(test, &[("STANDIN_CUDA_DEVICES", "3")], || {
        let (_folder, path) = large();
        let opened = open(&path, 4);
        let loader = Loader::new(&[2, 0], 3 * CHUNK).unwrap();
        let memory: Vec<_> = opened
            .tensors()
            .iter()
            .enumerate()
            .map(|(n, tensor)| {
                let device = loader.devices().nth(n % 2).unwrap();
                device.memory(tensor.bytes.len() as usize).unwrap()
            })
            .collect();
        let wanted = opened.tensors().iter().zip(&memory).enumerate();
        let wanted = wanted.map(|(n, (tensor, memory))| Wanted {
            of: &opened,
            tensor,
            on: n % 2,
            at: memory.at(),
        });
        // SAFETY: the memory is on the device that is said, and stays until the load is over.
        #[allow(unsafe_code)]
        unsafe { loader.load_into(wanted, &[], &AtomicBool::new(false), None) }.unwrap();
        same(&opened, &memory);
        assert_eq!(memory[0].device().ordinal(), 2);
    });
    report.iter().for_each(is_clean);
}

/// Nothing waits on the host: whoever uses the memory next finds it there, by the order of their stream.
#[test]
fn who_uses_it_next_finds_it_there() {
    // The driver keeps what it needs of an event that is let go of.
    let settings = [("STANDIN_CUDA_DESTROY", "allow")];
    let report = with_driver("who_uses_it_next_finds_it_there", &settings, || {
        let (_folder, path) = large();
        let opened = open(&path, 4);
        let loader = Loader::new(&[0], 64 * CHUNK).unwrap();
        let device = Device::at(0).unwrap();
        let user = device.stream().unwrap();
        let memory = opened.tensors().iter().map(|it| device.memory(it.bytes.len() as usize));
        let memory: Vec<_> = memory.collect::<Result<_, _>>().unwrap();
        let wanted = opened.tensors().iter().zip(&memory).map(|(tensor, memory)| Wanted {
            of: &opened,
            tensor,
            on: 0,
            at: memory.at(),
        });
        // SAFETY: the memory stays until the user's stream is over.
        #[allow(unsafe_code)]
        unsafe {
            loader.load_into(wanted, std::slice::from_ref(&user), &AtomicBool::new(false), None)
        }
        .unwrap();
        user.finish().unwrap();
        same(&opened, &memory);
    });
    report.iter().for_each(is_clean);
}

#[test]
fn a_call_that_fails_is_an_error_and_nothing_is_left() {
    let calls = [
        "cuDeviceGetCount",
        "cuDevicePrimaryCtxRetain",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuStreamCreate",
        "cuMemAlloc_v2",
        "cuMemHostAlloc",
        "cuMemcpyHtoDAsync_v2",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamSynchronize",
    ];
    for call in calls {
        for nth in [1, 2, 5] {
            let fails = format!("{call}:{nth}=999");
            let settings = [("STANDIN_CUDA_FAIL", &*fails)];
            let test = "a_call_that_fails_is_an_error_and_nothing_is_left";
            let report = with_driver(test, &settings, || {
                let (_folder, path) = large();
                let opened = open(&path, 4);
                let loaded =
                    Loader::new(&[0], 2 * CHUNK).and_then(|loader| loader.load(&of(&opened), 0));
                match loaded {
                    Ok((memory, _)) => same(&opened, &memory),
                    Err(error) => assert!(
                        matches!(error, Error::Driver { .. } | Error::Pinned { .. }),
                        "{error:?}"
                    ),
                }
            });
            let Some(report) = report else { return };
            assert_eq!(report["faults"], json!([]), "{fails}: {report}");
            // What could not be let go of because the call for that failed stays; nothing else.
            let is_left = report["allocated"]["device"]["count"] != 0;
            assert!(!is_left || call.starts_with("cuCtx"), "{fails}: {report}");
            // Of a chunk whose copy may go on for ever nothing is known.
            let is_left = report["allocated"]["pinned"]["count"] != 0;
            let unknown = call.starts_with("cuEvent") || call.starts_with("cuCtx");
            assert!(!is_left || unknown, "{fails}: {report}");
        }
    }
}

#[test]
fn a_device_without_room_says_so() {
    let settings = [("STANDIN_CUDA_MEMORY", "8388608")];
    let report = with_driver("a_device_without_room_says_so", &settings, || {
        let (_folder, path) = large();
        let opened = open(&path, 4);
        let error = Loader::new(&[0], 2 * CHUNK).unwrap().load(&of(&opened), 0).unwrap_err();
        assert!(matches!(error, Error::Memory { ordinal: 0, total: 8_388_608, .. }), "{error:?}");
    });
    report.iter().for_each(is_clean);
}

#[test]
fn what_is_stopped_or_truncated_leaves_nothing() {
    let report = with_driver("what_is_stopped_or_truncated_leaves_nothing", &[], || {
        let (_folder, path) = large();
        let opened = open(&path, 4);
        let loader = Loader::new(&[0], 2 * CHUNK).unwrap();
        // SAFETY: nothing is wanted.
        #[allow(unsafe_code)]
        let nothing =
            unsafe { loader.load_into(Vec::new(), &[], &AtomicBool::new(true), None) }.unwrap();
        assert_eq!(nothing.bytes, 0);
        let nowhere = loader.load(&of(&opened), 1).unwrap_err();
        assert!(matches!(nowhere, Error::NoDevice { ordinal: 1, count: 1 }), "{nowhere:?}");
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(9 << 20).unwrap();
        let error = loader.load(&of(&opened), 0).unwrap_err();
        assert!(matches!(error, Error::Load(loader::Error::Source(_))), "{error:?}");
    });
    report.iter().for_each(is_clean);
}

#[test]
fn a_machine_without_a_driver_says_so() {
    // Of the machine itself: one that has a driver has devices, or none.
    match Loader::new(&[usize::MAX], CHUNK) {
        Err(Error::NoDriver) => assert!(!cuda::is_there()),
        Err(Error::NoDevice { .. }) => assert!(cuda::is_there()),
        other => panic!("{other:?}"),
    }
}
