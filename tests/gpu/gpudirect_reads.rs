//! Bytes that storage writes to a device are those of the virtual file. Where storage cannot, the bytes go
//! through the host's memory, and the report says why.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use crate::common;
use crate::common::devices::{
    CHUNK_BYTES, all_tensors, assert_clean, assert_loaded, large_checkpoint, open,
};
use crate::common::samples::{all_samples, evict};
use crate::common::stub::with_storage;
use crate::common::test_path;
use ckptfs::cuda::{self, DeviceLoadRequest, DeviceLoader, DeviceSlice, GpudirectMode};
use ckptfs::loader::{self, LoadReport, OpenCheckpoint};
use serde_json::Value;

/// Loads everything from the disk, and compares.
fn loaded(loader: &DeviceLoader, opened: &OpenCheckpoint) -> LoadReport {
    evict(opened.path());
    let (memory, report) = loader.load(&all_tensors(opened), 0).unwrap();
    assert_loaded(opened, &memory);
    report
}

/// Asserts that nothing is left of either library.
fn nothing_is_left((driver, storage): &(Value, Option<Value>)) {
    assert_clean(driver);
    for what in ["open", "files", "buffers"] {
        let left = storage.as_ref().map_or(0, |storage| storage[what].as_u64().unwrap());
        assert_eq!(left, 0, "{what}: {storage:?}");
    }
}

#[test]
fn every_format_gets_there() {
    let test = test_path!("every_format_gets_there");
    let reports = with_storage(test, &[], || {
        let loader = DeviceLoader::new(2 * CHUNK_BYTES).with_gpudirect(GpudirectMode::On);
        for (name, (_folder, path)) in all_samples() {
            for threads in [1, 8] {
                let report = loaded(&loader, &open(&path, threads));
                assert_eq!((report.direct, &report.without_gpudirect), (0, &None), "{name}");
                // Strided, byte-swapped and compressed tensors are put together on the host.
                let is_whole = name == "sharded";
                assert!(!is_whole || report.gpudirect > 15 << 20, "{report:?}");
            }
        }
    });
    let Some(reports) = reports else { return };
    nothing_is_left(&reports);
}

/// Tensors that begin anywhere and cross chunks, and a file whose end is no multiple of anything.
#[test]
fn chunks_are_reused() {
    // More is read than all chunks hold, so that each is written again while copies out of it are queued.
    let reports = with_storage(test_path!("chunks_are_reused"), &[], || {
        let (_folder, path) = large_checkpoint();
        for threads in [1, 3, 24] {
            let opened = open(&path, threads);
            let loader = DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On);
            let models: Vec<_> = (0..6).map(|_| open(&path, threads)).collect();
            let tensors: Vec<_> = models.iter().flat_map(all_tensors).collect();
            evict(&path);
            let (memory, report) = loader.load(&tensors, 0).unwrap();
            memory.chunks(opened.tensors().len()).for_each(|memory| assert_loaded(&opened, memory));
            assert!(report.gpudirect > 100 << 20, "{report:?}");
            assert_eq!((report.direct, report.without_gpudirect), (0, None));
        }
    });
    let Some(reports) = reports else { return };
    nothing_is_left(&reports);
    assert!(reports.1.unwrap()["read"].as_u64() > Some(300 << 20));
}

#[test]
fn short_reads_go_on_where_they_ended() {
    let settings = [("STUB_CUFILE_MAX_READ", "1048576")];
    let reports = with_storage(test_path!("short_reads_go_on_where_they_ended"), &settings, || {
        let (_folder, path) = large_checkpoint();
        let report = loaded(
            &DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On),
            &open(&path, 4),
        );
        assert_eq!((report.direct, report.without_gpudirect), (0, None));
    });
    reports.iter().for_each(nothing_is_left);
}

#[test]
fn reads_that_end_anywhere_are_repeated_through_host_memory() {
    let settings = [("STUB_CUFILE_MAX_READ", "1000")];
    let test = test_path!("reads_that_end_anywhere_are_repeated_through_host_memory");
    let reports = with_storage(test, &settings, || {
        let (_folder, path) = large_checkpoint();
        let report = loaded(
            &DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On),
            &open(&path, 4),
        );
        assert_eq!(report.gpudirect, 0, "{report:?}");
        let why = report.without_gpudirect.unwrap();
        assert!(why.starts_with("GPUDirect Storage: cuFileRead: read 1000 of "), "{why}");
    });
    reports.iter().for_each(nothing_is_left);
}

#[test]
fn cached_bytes_are_copied_from_the_page_cache() {
    let test = test_path!("cached_bytes_are_copied_from_the_page_cache");
    let reports = with_storage(test, &[], || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 4);
        let _read = fs::read(&path).unwrap();
        let (memory, report) = DeviceLoader::new(2 * CHUNK_BYTES)
            .with_gpudirect(GpudirectMode::On)
            .load(&all_tensors(&opened), 0)
            .unwrap();
        assert_loaded(&opened, &memory);
        assert!(report.cached > 20 << 20, "{report:?}");
        assert_eq!((report.gpudirect, report.without_gpudirect), (0, None));
    });
    let Some(reports) = reports else { return };
    nothing_is_left(&reports);
    assert_eq!(reports.1, None, "the library was called");
}

#[test]
fn switched_off_it_is_never_called() {
    let reports = with_storage(test_path!("switched_off_it_is_never_called"), &[], || {
        let (_folder, path) = large_checkpoint();
        let report = loaded(
            &DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::Never),
            &open(&path, 4),
        );
        assert!(report.direct > 0 && report.gpudirect == 0, "{report:?}");
        let why = report.without_gpudirect.unwrap();
        assert_eq!(why, "GPUDirect Storage: is switched off");
    });
    let Some(reports) = reports else { return };
    nothing_is_left(&reports);
    assert_eq!(reports.1, None, "the library was called");
}

#[test]
fn the_report_names_what_is_missing() {
    let test = test_path!("the_report_names_what_is_missing");
    for (settings, words) in [
        (("STUB_CUFILE_NVFS", "0.0"), "the kernel module nvidia-fs is not loaded"),
        (("STUB_CUFILE_CONTROL", "POSIX"), "libcufile is set to read all files by POSIX"),
        (("STUB_CUFILE_STATUS", "LUSTRE"), "nvidia-fs does not support "),
        (("STUB_CUFILE_FAIL", "cuFileDriverOpen:1=5001"), "cuFileDriverOpen: nvidia-fs driver"),
        (("STUB_CUFILE_FAIL", "cuFileDriverGetProperties:1=5030"), "cuFileDriverGetProperties:"),
        (("STUB_CUFILE_FAIL", "cuFileHandleRegister:1=5008"), "cuFileHandleRegister: "),
        (("STUB_CUFILE_FAIL", "cuFileRead:1=5"), "cuFileRead: Input/output error"),
        (("STUB_CUFILE_FAIL", "cuFileRead:1=5016"), "cuFileRead: access beyond maximum"),
    ] {
        // The words are part of the settings, so that the child knows them.
        let reports = with_storage(test, &[settings, ("WORDS", words)], || {
            let (_folder, path) = large_checkpoint();
            let report = loaded(
                &DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On),
                &open(&path, 1),
            );
            assert!(report.direct > 0 && report.gpudirect == 0, "{report:?}");
            let (why, words) = (report.without_gpudirect.unwrap(), std::env::var("WORDS").unwrap());
            assert!(why.starts_with(&format!("GPUDirect Storage: {words}")), "{why}");
        });
        let Some(reports) = reports else { return };
        nothing_is_left(&reports);
    }
}

#[test]
fn every_call_may_fail() {
    let calls = [
        "cuFileDriverOpen",
        "cuFileDriverGetProperties",
        "cuFileHandleRegister",
        "cuFileBufRegister",
        "cuFileRead",
        "cuFileHandleDeregister",
        "cuFileBufDeregister",
        "cuFileDriverClose_v2",
        "cuMemAlloc_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuCtxSetCurrent",
    ];
    for call in calls {
        let is_storage = call.starts_with("cuFile");
        for nth in [1, 2, 5, 12] {
            let fails = format!("{call}:{nth}={}", if is_storage { 5030 } else { 999 });
            let setting = if is_storage { "STUB_CUFILE_FAIL" } else { "STUB_CUDA_FAIL" };
            let reports =
                with_storage(test_path!("every_call_may_fail"), &[(setting, &fails)], || {
                    // The settings name the call that fails: the child goes through the list as well.
                    let is_storage = std::env::var_os("STUB_CUFILE_FAIL").is_some();
                    let (_folder, path) = large_checkpoint();
                    let opened = open(&path, 4);
                    let loader =
                        DeviceLoader::new(2 * CHUNK_BYTES).with_gpudirect(GpudirectMode::On);
                    for _ in 0..2 {
                        evict(&path);
                        match loader.load(&all_tensors(&opened), 0) {
                            Ok((memory, _)) => assert_loaded(&opened, &memory),
                            Err(error) => assert!(
                                matches!(error, cuda::CudaError::Driver { .. }) && !is_storage,
                                "{error:?}"
                            ),
                        }
                    }
                });
            let Some((driver, storage)) = reports else { return };
            assert_eq!(driver["faults"], serde_json::json!([]), "{fails}: {driver}");
            // Only what the failed call should have given back stays.
            let storage = storage.unwrap();
            let may_stay = |what: &str| match call {
                "cuFileHandleDeregister" => what == "files",
                "cuFileBufDeregister" => what != "files",
                "cuFileDriverClose_v2" => what == "open",
                // A chunk whose copy may never end stays in use; it keeps the library open.
                call => {
                    (call.starts_with("cuEvent") || call.starts_with("cuCtx")) && what != "files"
                }
            };
            for what in ["files", "buffers", "open"] {
                assert!(storage[what] == 0 || may_stay(what), "{fails}: {what}: {storage}");
            }
        }
    }
}

fn is_of_source<T: std::fmt::Debug>(loaded: Result<T, cuda::CudaError>) {
    let error = loaded.unwrap_err();
    assert!(matches!(error, cuda::CudaError::Load(loader::LoadError::Source(_))), "{error:?}");
}

#[test]
fn a_file_that_changes_while_it_is_read_is_an_error() {
    let test = test_path!("a_file_that_changes_while_it_is_read_is_an_error");
    let reports = with_storage(test, &[("STUB_CUFILE_TOUCH", "1")], || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 1);
        evict(&path);
        // One read, so that no other read can have noticed.
        let one = (&opened, opened.tensor("t0").unwrap());
        is_of_source(
            DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On).load(&[one], 0),
        );
    });
    let Some(reports) = reports else { return };
    nothing_is_left(&reports);
    assert_eq!(reports.1.unwrap()["calls"]["cuFileRead"], 1);
}

#[test]
fn a_file_that_was_written_to_or_truncated_is_an_error() {
    let test = test_path!("a_file_that_was_written_to_or_truncated_is_an_error");
    let reports = with_storage(test, &[], || {
        let loader = DeviceLoader::new(2 * CHUNK_BYTES).with_gpudirect(GpudirectMode::On);
        let (_folder, path) = large_checkpoint();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let opened = open(&path, 4);
        file.write_all_at(&[1], 1 << 20).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(9)).unwrap();
        evict(&path);
        is_of_source(loader.load(&all_tensors(&opened), 0));
        let opened = open(&path, 4);
        file.set_len(9 << 20).unwrap();
        evict(&path);
        is_of_source(loader.load(&all_tensors(&opened), 0));
    });
    reports.iter().for_each(nothing_is_left);
}

#[test]
fn adjoining_tensors_may_go_to_several_devices() {
    let test = test_path!("adjoining_tensors_may_go_to_several_devices");
    let reports = with_storage(test, &[("STUB_CUDA_DEVICES", "2")], || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 4);
        let loader = DeviceLoader::new(2 * CHUNK_BYTES).with_gpudirect(GpudirectMode::On);
        evict(&path);
        let memory = opened.tensors().iter().enumerate().map(|(n, tensor)| {
            let length = tensor.bytes.len() as usize;
            DeviceSlice::allocate(&loader.device(n % 2).unwrap(), &[length]).unwrap().remove(0)
        });
        let memory: Vec<_> = memory.collect();
        let wanted = opened.tensors().iter().zip(&memory).enumerate();
        let wanted = wanted.map(|(n, (tensor, memory))| DeviceLoadRequest {
            checkpoint: &opened,
            tensor,
            device: n % 2,
            address: memory.address(),
        });
        // SAFETY: the memory is on the stated device, and lives until the load is over.
        #[allow(unsafe_code)]
        let report = unsafe { loader.load_into(wanted, &[], &AtomicBool::new(false), None) };
        let report = report.unwrap();
        assert_loaded(&opened, &memory);
        assert!(report.gpudirect > 0 && report.direct > 0, "{report:?}");
        assert!(report.without_gpudirect.unwrap().ends_with("several devices"));
    });
    reports.iter().for_each(nothing_is_left);
}

#[test]
fn few_of_many_files_are_registered_at_once() {
    let test = test_path!("few_of_many_files_are_registered_at_once");
    let reports = with_storage(test, &[], || {
        let folder = common::samples::directory();
        let models: Vec<_> = (0..150)
            .map(|n| {
                let path = folder.path().join(format!("{n}.safetensors"));
                let data = common::samples::bytes(100_000, n);
                let entry = common::safetensors::entry("t", "U8", "[100000]", 0, 100_000);
                let header = format!("{{{entry}}}");
                let file = common::safetensors::raw(header.len() as u64, header.as_bytes(), &data);
                fs::write(&path, file).unwrap();
                open(&path, 4)
            })
            .collect();
        evict(folder.path());
        let tensors: Vec<_> = models.iter().flat_map(all_tensors).collect();
        let loader = DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On);
        let (memory, report) = loader.load(&tensors, 0).unwrap();
        models.iter().zip(&memory).for_each(|(of, it)| assert_loaded(of, std::slice::from_ref(it)));
        assert_eq!((report.gpudirect, report.without_gpudirect), (15_000_000, None));
    });
    let Some(reports) = reports else { return };
    nothing_is_left(&reports);
    let storage = reports.1.unwrap();
    assert_eq!(storage["calls"]["cuFileHandleRegister"], 150, "{storage}");
    // Files that are being read, beside those that stay registered.
    assert!(storage["most_files"].as_u64().unwrap() <= 64 + 4 + 1, "{storage}");
}

/// The library is open as long as any loader uses it.
#[test]
fn the_library_is_closed_as_often_as_it_was_opened() {
    let test = test_path!("the_library_is_closed_as_often_as_it_was_opened");
    let reports = with_storage(test, &[], || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 2);
        let loaders = [
            DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On),
            DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On),
        ];
        for loader in &loaders {
            assert!(loaded(loader, &opened).gpudirect > 0);
        }
        let [first, second] = loaders;
        drop(first);
        assert!(loaded(&second, &opened).gpudirect > 0);
        second.trim(0);
        assert!(loaded(&second, &opened).gpudirect > 0);
        drop(second);
        assert!(
            loaded(&DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On), &opened)
                .gpudirect
                > 0
        );
    });
    let Some(reports) = reports else { return };
    nothing_is_left(&reports);
    let calls = reports.1.unwrap()["calls"].take();
    assert_eq!(
        (&calls["cuFileDriverOpen"], &calls["cuFileDriverClose_v2"]),
        (&2.into(), &2.into())
    );
}

/// The stub ends a process that was forked from one that called it.
#[test]
fn a_process_that_was_forked_calls_nothing() {
    let reports = with_storage(test_path!("a_process_that_was_forked_calls_nothing"), &[], || {
        let (_folder, path) = large_checkpoint();
        let opened = open(&path, 1);
        let loader = DeviceLoader::new(CHUNK_BYTES).with_gpudirect(GpudirectMode::On);
        assert!(loaded(&loader, &opened).gpudirect > 0);
        evict(&path);
        // SAFETY: the child does little, and ends without running the parent's destructors.
        #[allow(unsafe_code)]
        let child = unsafe { libc::fork() };
        if child == 0 {
            let says =
                matches!(loader.load(&all_tensors(&opened), 0), Err(cuda::CudaError::Forked));
            drop(loader);
            // SAFETY: ends the process at once.
            #[allow(unsafe_code)]
            unsafe {
                libc::_exit(if says { 0 } else { 1 })
            };
        }
        let mut status = -1;
        // SAFETY: the child is this process's, and there is room for the status.
        #[allow(unsafe_code)]
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
    });
    reports.iter().for_each(nothing_is_left);
}
