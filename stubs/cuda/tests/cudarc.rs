//! The bindings that a pipeline uses load the stub, find all functions that they call, and copy the right bytes.

#![allow(clippy::unwrap_used)] // In helper functions too: a failure fails the test.

#[path = "../../../tests/common/child.rs"]
mod child;

use std::process::Command;

use child::{in_child, must_pass};
use cudarc::driver::{CudaContext, DriverError, sys};

/// Runs a test in a process that finds the library under both its names.
fn with_library(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    let folder = std::env::temp_dir().join(format!("stub-cuda-{test}-{}", std::process::id()));
    let prepare = |command: &mut Command| {
        let beside = std::env::current_exe().unwrap();
        let library = beside.parent().map(|folder| folder.join("libcuda.so")).unwrap();
        std::fs::create_dir(&folder).unwrap();
        for name in ["libcuda.so", "libcuda.so.1"] {
            std::os::unix::fs::symlink(&library, folder.join(name)).unwrap();
        }
        command.env("LD_LIBRARY_PATH", &folder).envs(settings.iter().copied());
        command.env("STUB_CUDA_REPORT", folder.join("report"));
    };
    if let Some(output) = in_child(test, prepare, body) {
        let report = std::fs::read_to_string(folder.join("report"));
        std::fs::remove_dir_all(&folder).unwrap();
        must_pass(&output);
        nothing_is_left(&report.unwrap());
    }
}

#[track_caller]
fn nothing_is_left(report: &str) {
    for text in [
        r#""device":{"bytes":0,"count":0}"#,
        r#""pinned":{"bytes":0,"count":0}"#,
        r#""events":0"#,
        r#""streams":0"#,
        r#""contexts":0"#,
        r#""queued":0"#,
        r#""faults":[]"#,
    ] {
        assert!(report.contains(text), "{text}: {report}");
    }
}

#[test]
fn copies_through_a_ring_of_pinned_memory() {
    with_library("copies_through_a_ring_of_pinned_memory", &[], || {
        const CHUNK: usize = 1000;
        assert!(is_there());
        let context = CudaContext::new(0).unwrap();
        assert_eq!(context.name().unwrap(), "Stub device 0");
        assert_eq!(context.compute_capability().unwrap(), (9, 0));
        let stream = context.new_stream().unwrap();
        // SAFETY: each chunk is written before it is read.
        let mut ring = [(); 2].map(|()| unsafe { context.alloc_pinned::<u8>(CHUNK) }.unwrap());
        let mut device = stream.alloc_zeros::<u8>(10 * CHUNK).unwrap();
        let data: Vec<u8> = (0..10 * CHUNK).map(|at| (at / 7) as u8).collect();
        for (at, chunk) in data.chunks(CHUNK).enumerate() {
            let pinned = &mut ring[at % 2];
            pinned.as_mut_slice().unwrap().copy_from_slice(chunk);
            let mut place = device.slice_mut(at * CHUNK..(at + 1) * CHUNK);
            stream.memcpy_htod(pinned, &mut place).unwrap();
        }
        let event = stream.record_event(None).unwrap();
        assert!(!event.is_complete());
        event.synchronize().unwrap();
        assert!(stream.clone_dtoh(&device).unwrap() == data);
        let (free, total) = context.mem_get_info().unwrap();
        assert_eq!(total - free, 10 * CHUNK);
        stream.synchronize().unwrap();
    });
}

#[test]
fn drops_in_any_order_where_that_is_allowed() {
    let test = "drops_in_any_order_where_that_is_allowed";
    with_library(test, &[("STUB_CUDA_DESTROY", "allow")], || {
        let context = CudaContext::new(0).unwrap();
        let [one, two] = [(); 2].map(|()| context.new_stream().unwrap());
        let from = one.clone_htod(&[7_u8; 100]).unwrap();
        let copy = two.clone_dtod(&from).unwrap();
        drop((one, from));
        assert_eq!(two.clone_dtoh(&copy).unwrap(), [7; 100]);
        drop(copy);
        context.synchronize().unwrap();
    });
}

#[test]
fn errors_have_their_names() {
    with_library("errors_have_their_names", &[("STUB_CUDA_FAIL", "cuMemHostAlloc:1=2")], || {
        let context = CudaContext::new(0).unwrap();
        // SAFETY: nothing is allocated.
        let error = unsafe { context.alloc_pinned::<u8>(10) }.unwrap_err();
        assert_eq!(error, DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert!(error.to_string().contains("out of memory"), "{error}");
    });
}

/// Whether the bindings find a library, and whether it stays loaded when they close it.
fn is_there() -> bool {
    // SAFETY: what the library does when it is loaded harms nothing.
    let found = unsafe { sys::is_culib_present() };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    found && maps.contains("libcuda.so")
}
