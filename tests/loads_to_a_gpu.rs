//! In a process of its own, because it counts the memory and the descriptors of its process.
//!
//! On a real device, too, every load gives the virtual file's bytes, and leaves nothing behind, on the
//! device or on the host. Without a device the test says so and passes.
//!
//! `scripts/gpu-check` takes this program to machines that have a device and no Rust.

#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

mod common;

use std::fs;
use std::io::{Write, stderr};
use std::num::NonZeroUsize;
use std::sync::Mutex;

use ckptfs::checkpoint::Tensor;
use ckptfs::cuda::{self, DeviceLoader};
use ckptfs::loader::{LoadOptions, LoadReport, OpenCheckpoint};
use common::casts::{checkpoint_of_casts, expected_cast_bytes, open_cast};
use common::samples::all_samples;
use cudarc::driver::CudaContext;

/// Bytes that a reader fills at once.
const CHUNK_BYTES: u64 = 4 << 20;

/// How often everything is loaded, so that a leak of each load would be seen.
const TIMES: usize = 20;

/// Bytes that allocators keep or give back by themselves: less than one load of all samples.
const NOISE_BYTES: u64 = 16 << 20;

/// Values of each large type that are cast, beside special ones.
const CAST_VALUES: usize = 3_000_000;

/// One test at a time counts and takes memory.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Memory and descriptors of the process, and free memory of the device.
#[derive(Debug)]
struct Held {
    memory: u64,
    descriptors: usize,
    free: u64,
}

fn held(context: &CudaContext) -> Held {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let memory: u64 = memory.trim().trim_end_matches(" kB").parse().unwrap();
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
    let free = context.mem_get_info().unwrap().0 as u64;
    Held { memory: memory << 10, descriptors, free }
}

/// Whether there is a device. Says so if there is none.
fn has_device() -> bool {
    let has_device = cuda::device_count().is_ok_and(|count| count > 0);
    if !has_device {
        // Written past the test runner's capture: a skipped check must not look like a passed one.
        let mut out = stderr();
        writeln!(out, "skipped: there is no CUDA device here").unwrap();
    }
    has_device
}

fn load(opened: &OpenCheckpoint, loader: &DeviceLoader) -> LoadReport {
    let tensors: Vec<(&OpenCheckpoint, &Tensor)> =
        opened.tensors().iter().map(|tensor| (opened, tensor)).collect();
    let (loaded, report) = loader.load(&tensors, 0).unwrap();
    for ((_, tensor), memory) in tensors.iter().zip(&loaded) {
        let expected = opened.load(tensor).unwrap();
        assert!(*memory.to_host().unwrap() == *expected, "{}", tensor.name);
    }
    report
}

#[test]
fn every_format_gets_there_and_nothing_is_left() {
    let _alone = ONE_AT_A_TIME.lock();
    if !has_device() {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let samples = all_samples();
    let round = |chunks| {
        let loader = DeviceLoader::new(chunks * CHUNK_BYTES);
        let mut bytes = 0;
        for (_, (_folder, path)) in &samples {
            for threads in [1, 4] {
                let options =
                    LoadOptions { threads: NonZeroUsize::new(threads), ..LoadOptions::default() };
                bytes += load(&options.open(path).unwrap(), &loader).bytes;
            }
        }
        bytes
    };
    // Memory that is allocated once stays.
    let bytes: u64 = [1, 2, 5].map(round)[0];
    assert!(bytes > NOISE_BYTES, "{bytes} bytes would not be told from noise");
    let before = held(&context);
    for n in 0..TIMES {
        assert_eq!(round([1, 2, 5][n % 3]), bytes);
    }
    let after = held(&context);
    assert_eq!(after.descriptors, before.descriptors);
    assert!(after.memory <= before.memory + NOISE_BYTES, "{before:?} {after:?}");
    assert!(after.free + NOISE_BYTES >= before.free, "{before:?} {after:?}");
}

#[test]
fn a_device_casts_to_the_same_bits() {
    let _alone = ONE_AT_A_TIME.lock();
    if !has_device() {
        return;
    }
    let (_folder, path) = checkpoint_of_casts(CAST_VALUES);
    let opened = open_cast(&path);
    let report = load(&opened, &DeviceLoader::new(8 * CHUNK_BYTES));
    assert_eq!(report.device_cast, expected_cast_bytes(&opened)[0], "{report:?}");
}
