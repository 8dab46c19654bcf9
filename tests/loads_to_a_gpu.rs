//! In a process of its own, because it counts the memory and the descriptors of its process.
//!
//! On a real device, too, a load gives the bytes that the virtual file has, each time. Nothing is left of it
//! afterwards, neither there nor here. Where there is no device the test says so and passes.
//!
//! `scripts/gpu-check` takes this along as a program to machines that have one, and no Rust.

#![allow(clippy::unwrap_used)] // In functions of tests too: what fails fails the test.

mod common;

use std::fs;
use std::io::{Write, stderr};
use std::num::NonZeroUsize;

use ckptfs::checkpoint::Tensor;
use ckptfs::cuda::{self, DeviceLoader};
use ckptfs::loader::{LoadOptions, OpenCheckpoint};
use common::samples::all_samples;
use cudarc::driver::CudaContext;

/// What readers fill at a time.
const CHUNK: u64 = 4 << 20;

/// How often everything is loaded. What each of these left would be seen.
const TIMES: usize = 20;

/// Pages that come and go with allocators, and not with loads: less than a load of all samples has.
const NOISE: u64 = 16 << 20;

/// What a process holds: memory of its own, descriptors, and what is free on the device.
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

fn load(opened: &OpenCheckpoint, loader: &DeviceLoader) -> u64 {
    let tensors: Vec<(&OpenCheckpoint, &Tensor)> =
        opened.tensors().iter().map(|tensor| (opened, tensor)).collect();
    let (loaded, report) = loader.load(&tensors, 0).unwrap();
    for ((_, tensor), memory) in tensors.iter().zip(&loaded) {
        let expected = opened.load(tensor).unwrap();
        assert!(*memory.to_host().unwrap() == *expected, "{}", tensor.name);
    }
    report.bytes
}

#[test]
fn every_format_gets_there_and_nothing_is_left() {
    if !cuda::device_count().is_ok_and(|count| count > 0) {
        // Past what the test runner captures: who reads its output must not take this for a check.
        writeln!(stderr(), "skipped: there is no CUDA device here").unwrap();
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let samples = all_samples();
    let round = |chunks| {
        let loader = DeviceLoader::new(chunks * CHUNK);
        let mut bytes = 0;
        for (_, (_folder, path)) in &samples {
            for threads in [1, 4] {
                let options =
                    LoadOptions { threads: NonZeroUsize::new(threads), ..LoadOptions::default() };
                bytes += load(&options.open(path).unwrap(), &loader);
            }
        }
        bytes
    };
    // What is made once stays.
    let bytes: u64 = [1, 2, 5].map(round)[0];
    assert!(bytes > NOISE, "{bytes} bytes would not be told from noise");
    let before = held(&context);
    for n in 0..TIMES {
        assert_eq!(round([1, 2, 5][n % 3]), bytes);
    }
    let after = held(&context);
    assert_eq!(after.descriptors, before.descriptors);
    assert!(after.memory <= before.memory + NOISE, "{before:?} {after:?}");
    assert!(after.free + NOISE >= before.free, "{before:?} {after:?}");
}
