//! A load to a device gives the virtual file's bytes, however often its chunks are used again. After an
//! error nothing is left of it.

use std::sync::atomic::AtomicBool;

use crate::common::devices::{
    CHUNK_BYTES, all_tensors, assert_clean, assert_loaded, checkpoint_of, large_checkpoint, open,
};
use crate::common::samples::all_samples;
use crate::common::stub::with_driver;
use crate::common::test_path;
use ckptfs::checkpoint::Tensor;
use ckptfs::cuda::{
    self, CudaError, CudaStream, Device, DeviceLoadRequest, DeviceLoader, DeviceMemory, DeviceSlice,
};
use ckptfs::loader;
use cudarc::driver::{CudaContext, result};
use serde_json::{Value, json};

#[test]
fn every_format_gets_there_through_few_chunks() {
    let report = with_driver(test_path!("every_format_gets_there_through_few_chunks"), &[], || {
        for chunks in [1, 2, 5] {
            let loader = DeviceLoader::new(chunks * CHUNK_BYTES);
            for (name, (_folder, path)) in all_samples() {
                for threads in [1, 4] {
                    let opened = open(&path, threads);
                    let (loaded, report) = loader.load(&all_tensors(&opened), 0).unwrap();
                    assert_loaded(&opened, &loaded);
                    let bytes: u64 = opened.tensors().iter().map(|it| it.bytes.len()).sum();
                    assert_eq!((report.tensors, report.bytes), (loaded.len(), bytes), "{name}");
                }
            }
        }
    });
    if let Some(report) = report {
        assert_clean(&report);
        let pinned = report["peak"]["pinned"].as_u64().unwrap();
        // A chunk is allocated when all the others are in use, which depends on how fast copies are.
        assert!((2 * CHUNK_BYTES..=5 * CHUNK_BYTES).contains(&pinned), "{report}");
    }
}

#[test]
fn chunks_are_reused() {
    let report = with_driver(test_path!("chunks_are_reused"), &[], || {
        let (_folder, path) = large_checkpoint();
        for (threads, chunks) in [(1, 1), (8, 1), (8, 2), (3, 7)] {
            let opened = open(&path, threads);
            let loader = DeviceLoader::new(chunks * CHUNK_BYTES);
            for _ in 0..2 {
                let (loaded, _) = loader.load(&all_tensors(&opened), 0).unwrap();
                assert_loaded(&opened, &loaded);
            }
        }
    });
    report.iter().for_each(assert_clean);
}

#[test]
fn several_devices_in_one_load() {
    let test = test_path!("several_devices_in_one_load");
    let settings = [("STUB_CUDA_DEVICES", "3"), ("STUB_CUDA_DESTROY", "allow")];
    let report = with_driver(test, &settings, || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 4);
        let loader = DeviceLoader::new(3 * CHUNK_BYTES);
        let on = |n: usize| 2 - n % 2 * 2;
        let memory: Vec<_> = opened
            .tensors()
            .iter()
            .enumerate()
            .map(|(n, tensor)| {
                let device = loader.device(on(n)).unwrap();
                DeviceSlice::allocate(&device, &[tensor.bytes.len() as usize]).unwrap().remove(0)
            })
            .collect();
        let wanted = opened.tensors().iter().zip(&memory).enumerate();
        let wanted = wanted.map(|(n, (tensor, memory))| DeviceLoadRequest {
            checkpoint: &opened,
            tensor,
            device: on(n),
            address: memory.address(),
        });
        let user = CudaStream::create(memory[0].device()).unwrap();
        let users = std::slice::from_ref(&user);
        // SAFETY: the memory is on the stated device, and lives until the user's stream is over.
        #[allow(unsafe_code)]
        unsafe { loader.load_into(wanted, users, &AtomicBool::new(false), None) }.unwrap();
        // The bytes are there even for a stream that nothing else waits for.
        for (tensor, memory) in
            opened.tensors().iter().zip(&memory).filter(|(_, it)| it.device().ordinal() == 0)
        {
            assert!(*memory.to_host().unwrap() == *opened.load(tensor).unwrap(), "{}", tensor.name);
        }
        user.synchronize().unwrap();
        assert_loaded(&opened, &memory);
        assert_eq!(memory[0].device().ordinal(), 2);
        assert_eq!(
            result::ctx::get_current().unwrap(),
            None,
            "the thread has no context, as before"
        );
    });
    report.iter().for_each(assert_clean);
}

/// Tensors that adjoin in the file and on the device are one copy; those that adjoin in only one of them are
/// not.
#[test]
fn adjoining_tensors_are_copied_together() {
    let test = test_path!("adjoining_tensors_are_copied_together");
    const COUNT: usize = 64;
    let report = with_driver(test, &[], || {
        let (_folder, path) = checkpoint_of((0..COUNT).map(|n| 1000 + n));
        let opened = open(&path, 1);
        let loader = DeviceLoader::new(CHUNK_BYTES);
        let in_order: Vec<&Tensor> = opened.tensors().iter().collect();
        let turned = in_order.iter().rev().copied().collect();
        let every_second = in_order.iter().step_by(2).copied().collect();
        for tensors in [in_order, turned, every_second] {
            let expected: Vec<u8> =
                tensors.iter().flat_map(|it| opened.load(it).unwrap().to_vec()).collect();
            let memory =
                DeviceMemory::allocate(&loader.device(0).unwrap(), expected.len()).unwrap();
            let wanted = tensors.iter().scan(memory.address(), |next, &tensor| {
                let at = *next;
                *next += tensor.bytes.len();
                Some(DeviceLoadRequest { checkpoint: &opened, tensor, device: 0, address: at })
            });
            // SAFETY: the memory has room for all of them, and lives until the load is over.
            #[allow(unsafe_code)]
            unsafe { loader.load_into(wanted, &[], &AtomicBool::new(false), None) }.unwrap();
            assert!(memory.to_host().unwrap() == expected);
        }
    });
    if let Some(report) = report {
        assert_clean(&report);
        assert_eq!(report["calls"]["cuMemcpyHtoDAsync_v2"], 1 + COUNT + COUNT / 2, "{report}");
    }
}

/// Tensors that adjoin, each in an allocation of its own: the driver refuses a copy to two allocations.
#[test]
fn adjacent_allocations_are_copied_one_by_one() {
    let test = test_path!("adjacent_allocations_are_copied_one_by_one");
    const COUNT: usize = 3;
    let report = with_driver(test, &[], || {
        let (_folder, path) = checkpoint_of(std::iter::repeat_n(1 << 20, COUNT));
        let opened = open(&path, 1);
        let loader = DeviceLoader::new(CHUNK_BYTES);
        let tensors: Vec<_> = opened.tensors().iter().map(|tensor| (&opened, tensor)).collect();
        let (slices, _) = loader.load(&tensors, 0).unwrap();
        let is_adjacent = |pair: &[DeviceSlice]| pair[0].address() + (1 << 20) == pair[1].address();
        assert!(slices.windows(2).all(is_adjacent));
        for (slice, (_, tensor)) in slices.iter().zip(&tensors) {
            assert!(slice.to_host().unwrap() == *opened.load(tensor).unwrap());
        }
    });
    if let Some(report) = report {
        assert_clean(&report);
        assert_eq!(report["calls"]["cuMemcpyHtoDAsync_v2"], COUNT, "{report}");
    }
}

/// The host does not wait. The user's next work finds the bytes by the order of the stream, and the work
/// before it is over before the first write.
#[test]
fn the_next_work_on_the_stream_finds_the_bytes() {
    // The driver keeps what it needs of a destroyed event.
    let settings = [("STUB_CUDA_DESTROY", "allow")];
    let report =
        with_driver(test_path!("the_next_work_on_the_stream_finds_the_bytes"), &settings, || {
            let (_folder, path) = large_checkpoint();
            let opened = open(&path, 4);
            let device = Device::open(0).unwrap();
            let theirs = CudaContext::new(0).unwrap().new_stream().unwrap();
            // SAFETY: the stream is one of this device, and lives on.
            #[allow(unsafe_code)]
            let user = unsafe { CudaStream::from_raw(&device, theirs.cu_stream() as usize) };
            let lengths: Vec<_> =
                opened.tensors().iter().map(|it| it.bytes.len() as usize).collect();
            for chunks in [1, 64] {
                let loader = DeviceLoader::new(chunks * CHUNK_BYTES);
                let memory = DeviceSlice::allocate(&device, &lengths).unwrap();
                for it in &memory {
                    // SAFETY: the memory lives until the stream is over.
                    #[allow(unsafe_code)]
                    unsafe {
                        result::memset_d8_async(it.address(), 7, it.len(), theirs.cu_stream())
                    }
                    .unwrap();
                }
                let wanted = opened.tensors().iter().zip(&memory).map(|(tensor, memory)| {
                    DeviceLoadRequest {
                        checkpoint: &opened,
                        tensor,
                        device: 0,
                        address: memory.address(),
                    }
                });
                let users = std::slice::from_ref(&user);
                // SAFETY: the memory lives until the user's stream is over.
                #[allow(unsafe_code)]
                unsafe { loader.load_into(wanted, users, &AtomicBool::new(false), None) }.unwrap();
                // When the loader is dropped, its chunks stay until they are read.
                let kept = (chunks > 1).then_some(loader);
                user.synchronize().unwrap();
                assert_loaded(&opened, &memory);
                drop(kept);
            }
        });
    report.iter().for_each(assert_clean);
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
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemcpyHtoDAsync_v2",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamSynchronize",
    ];
    for call in calls {
        for (nth, chunks) in [(1, 1), (2, 2), (5, 2)] {
            let fails = format!("{call}:{nth}=999");
            // The driver allocates only if memory cannot be registered, so these calls need that.
            let is_allocated = ["cuMemHostAlloc", "cuMemFreeHost"].contains(&call);
            let registers = ["HOST_REGISTER_SUPPORTED=1", "HOST_REGISTER_SUPPORTED=0"];
            let attributes = registers[usize::from(is_allocated)];
            let settings = [("STUB_CUDA_FAIL", &*fails), ("STUB_CUDA_ATTRIBUTES", attributes)];
            let test = test_path!("a_call_that_fails_is_an_error_and_nothing_is_left");
            let report = with_driver(test, &settings, || {
                let (_folder, path) = large_checkpoint();
                let opened = open(&path, 4);
                let loader = DeviceLoader::new(chunks * CHUNK_BYTES);
                match loader.load(&all_tensors(&opened), 0) {
                    Ok((memory, _)) => assert_loaded(&opened, &memory),
                    Err(CudaError::Driver { .. } | CudaError::PinnedMemory { .. }) => {
                        // The load goes on with what is left.
                        let (memory, _) = loader.load(&all_tensors(&opened), 0).unwrap();
                        assert_loaded(&opened, &memory);
                    }
                    Err(error) => panic!("{error:?}"),
                }
            });
            let Some(report) = report else { return };
            assert_eq!(report["faults"], json!([]), "{fails}: {report}");
            // Only what the failed call should have given back stays.
            let is_left = report["allocated"]["device"]["count"] != 0;
            assert!(!is_left || call.starts_with("cuCtx"), "{fails}: {report}");
            // A chunk whose copy may never end stays in use, and so does one that the driver failed to release.
            let is_left = report["allocated"]["pinned"]["count"] != 0;
            let leaving = ["cuEvent", "cuCtx", "cuMemHostUnregister", "cuMemFreeHost"];
            let may_be_left = leaving.iter().any(|start| call.starts_with(start));
            assert!(!is_left || may_be_left, "{fails}: {report}");
        }
    }
}

/// Memory whose last copy may never end is left to the system.
#[test]
fn memory_that_may_still_be_read_is_never_freed() {
    let fails = "cuEventRecord:1=999,cuStreamSynchronize:1=999";
    let settings = [("STUB_CUDA_FAIL", fails), ("STUB_CUDA_DESTROY", "allow")];
    let test = test_path!("memory_that_may_still_be_read_is_never_freed");
    let report = with_driver(test, &settings, || {
        let (_folder, path) = checkpoint_of([1000]);
        let opened = open(&path, 1);
        let [tensor] = opened.tensors() else { panic!("there is one") };
        let memory = DeviceMemory::allocate(&Device::open(0).unwrap(), 1000).unwrap();
        let wanted = [DeviceLoadRequest {
            checkpoint: &opened,
            tensor,
            device: 0,
            address: memory.address(),
        }];
        let loader = DeviceLoader::new(CHUNK_BYTES);
        // SAFETY: the memory lives until the device has done everything.
        #[allow(unsafe_code)]
        unsafe { loader.load_into(wanted, &[], &AtomicBool::new(false), None) }.unwrap_err();
        drop(loader);
        CudaContext::new(0).unwrap().synchronize().unwrap();
        assert!(memory.to_host().unwrap() == *opened.load(tensor).unwrap());
    });
    if let Some(report) = report {
        assert_eq!(report["allocated"]["pinned"]["count"], 1, "{report}");
        assert_eq!(report["faults"], json!([]), "{report}");
    }
}

#[test]
fn a_full_device_is_reported() {
    let settings = [("STUB_CUDA_MEMORY", "8388608")];
    let report = with_driver(test_path!("a_full_device_is_reported"), &settings, || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 4);
        let error = DeviceLoader::new(2 * CHUNK_BYTES).load(&all_tensors(&opened), 0).unwrap_err();
        assert!(
            matches!(error, CudaError::OutOfMemory { ordinal: 0, total: 8_388_608, .. }),
            "{error:?}"
        );
    });
    report.iter().for_each(assert_clean);
}

#[test]
fn a_stopped_or_truncated_load_leaves_nothing() {
    let report = with_driver(test_path!("a_stopped_or_truncated_load_leaves_nothing"), &[], || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 4);
        let loader = DeviceLoader::new(2 * CHUNK_BYTES);
        // SAFETY: the request is empty.
        #[allow(unsafe_code)]
        let nothing =
            unsafe { loader.load_into(Vec::new(), &[], &AtomicBool::new(true), None) }.unwrap();
        assert_eq!(nothing.bytes, 0);
        let stopped =
            loader.load_with(&all_tensors(&opened), 0, &AtomicBool::new(true), None).unwrap_err();
        assert!(
            matches!(stopped, CudaError::Load(loader::LoadError::Stopped { .. })),
            "{stopped:?}"
        );
        let nowhere = loader.load(&all_tensors(&opened), 1).unwrap_err();
        assert!(matches!(nowhere, CudaError::NoDevice { ordinal: 1, count: 1 }), "{nowhere:?}");
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(9 << 20).unwrap();
        let error = loader.load(&all_tensors(&opened), 0).unwrap_err();
        assert!(matches!(error, CudaError::Load(loader::LoadError::Source(_))), "{error:?}");
    });
    report.iter().for_each(assert_clean);
}

/// The caller may use the memory for something else as soon as it has the error.
#[test]
fn after_an_error_nothing_is_written() {
    let settings = [("STUB_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:4=2")];
    let report = with_driver(test_path!("after_an_error_nothing_is_written"), &settings, || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 1);
        let context = CudaContext::new(0).unwrap();
        let loader = DeviceLoader::new(8 * CHUNK_BYTES);
        let device = Device::open(0).unwrap();
        let lengths: Vec<_> = opened.tensors().iter().map(|it| it.bytes.len() as usize).collect();
        let memory = DeviceSlice::allocate(&device, &lengths).unwrap();
        let wanted = opened.tensors().iter().zip(&memory).map(|(tensor, memory)| {
            DeviceLoadRequest { checkpoint: &opened, tensor, device: 0, address: memory.address() }
        });
        // SAFETY: the memory lives on, and is used again only after this has returned.
        #[allow(unsafe_code)]
        unsafe { loader.load_into(wanted, &[], &AtomicBool::new(false), None) }.unwrap_err();
        context.bind_to_thread().unwrap();
        for piece in &memory {
            // SAFETY: the memory is that long, and only this test uses it.
            #[allow(unsafe_code)]
            unsafe { result::memset_d8_sync(piece.address(), 7, piece.len()) }.unwrap();
        }
        // Waits for copies out of its chunks, if there are any.
        drop(loader);
        for piece in &memory {
            assert!(piece.to_host().unwrap().iter().all(|&byte| byte == 7));
        }
    });
    report.iter().for_each(assert_clean);
}

/// A device that uses the host's memory has the bytes where they were read to; nothing is copied.
#[test]
fn an_integrated_device_needs_no_copy() {
    let settings = [("STUB_CUDA_ATTRIBUTES", "INTEGRATED=1")];
    let report = with_driver(test_path!("an_integrated_device_needs_no_copy"), &settings, || {
        let loader = DeviceLoader::new(2 * CHUNK_BYTES);
        for (name, (_folder, path)) in all_samples() {
            let opened = open(&path, 4);
            let (loaded, report) = loader.load(&all_tensors(&opened), 0).unwrap();
            assert_loaded(&opened, &loaded);
            assert_eq!(report.tensors, loaded.len(), "{name}");
        }
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 4);
        let (loaded, _) = loader.load(&all_tensors(&opened), 0).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(9 << 20).unwrap();
        assert!(matches!(loader.load(&all_tensors(&opened), 0), Err(CudaError::Load(_))));
        drop(loaded);
    });
    if let Some(report) = report {
        assert_clean(&report);
        assert_eq!(report["calls"]["cuMemcpyHtoDAsync_v2"], Value::Null, "{report}");
        assert_eq!(report["peak"]["device"], 0, "{report}");
    }
}

#[test]
fn a_missing_driver_is_reported() {
    // This asks the real machine: with a driver it has devices, or none.
    match DeviceLoader::new(CHUNK_BYTES).device(usize::MAX) {
        Err(CudaError::NoDriver) => assert!(!cuda::is_available()),
        Err(CudaError::NoDevice { count, .. }) => assert_eq!(cuda::is_available(), count > 0),
        other => panic!("{other:?}"),
    }
}
