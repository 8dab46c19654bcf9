//! Devices cast what a recipe casts, to the same bits as the host. Where they cannot, the host does.

use std::sync::atomic::AtomicBool;

use ckptfs::cuda::{self, DeviceLoadRequest, DeviceLoader, DeviceMemory, GpudirectMode};
use serde_json::json;

use crate::common::casts::{CAST_COUNT, checkpoint_of_casts, expected_cast_bytes, open_cast};
use crate::common::devices::{CHUNK_BYTES, all_tensors, assert_clean, assert_loaded};
use crate::common::pickle::{STORED_FLOATS, Tensor, dict, pickle};
use crate::common::samples::{self, evict, write_sample};
use crate::common::stub::{with_driver, with_storage};
use crate::common::{test_path, zip};

/// Values of each large type beside the special ones: the stub interprets every instruction.
const LARGE_COUNT: usize = 3000;

#[test]
fn a_device_casts_to_the_same_bits() {
    let report = with_driver(test_path!("a_device_casts_to_the_same_bits"), &[], || {
        let (_folder, path) = checkpoint_of_casts(LARGE_COUNT);
        let opened = open_cast(&path);
        let loader = DeviceLoader::new(2 * CHUNK_BYTES);
        let (loaded, report) = loader.load(&all_tensors(&opened), 0).unwrap();
        assert_loaded(&opened, &loaded);
        let [device, host] = expected_cast_bytes(&opened);
        assert_eq!((report.device_cast, report.cast), (device, device + host));
        assert_eq!(report.bytes, opened.tensors().iter().map(|it| it.bytes.len()).sum::<u64>());
        // Another load compiles nothing again.
        loader.load(&all_tensors(&opened), 0).unwrap();
    });
    let Some(report) = report else { return };
    assert_clean(&report);
    let casts = CAST_COUNT as u64;
    assert_eq!(report["calls"]["cuModuleLoadData"], casts, "{report}");
    // In each load, one tensor crosses the end of an extent, and adjoining ones are cast together.
    assert_eq!(report["calls"]["cuLaunchKernel"], 2 * (casts + 1 + 1), "{report}");
}

#[test]
fn a_device_casts_what_storage_wrote_to_it() {
    let test = test_path!("a_device_casts_what_storage_wrote_to_it");
    let reports = with_storage(test, &[], || {
        let (_folder, path) = checkpoint_of_casts(LARGE_COUNT);
        let opened = open_cast(&path);
        let loader = DeviceLoader::new(2 * CHUNK_BYTES).with_gpudirect(GpudirectMode::On);
        evict(&path);
        let (loaded, report) = loader.load(&all_tensors(&opened), 0).unwrap();
        assert!(report.gpudirect > 4 << 20, "{report:?}");
        assert_eq!(report.device_cast, expected_cast_bytes(&opened)[0]);
        assert_loaded(&opened, &loaded);
    });
    let Some((driver, _)) = reports else { return };
    assert_clean(&driver);
}

#[test]
fn every_device_has_casts_of_its_own() {
    let test = test_path!("every_device_has_casts_of_its_own");
    let settings = [("STUB_CUDA_DEVICES", "2"), ("STUB_CUDA_DESTROY", "allow")];
    let report = with_driver(test, &settings, || {
        let (_folder, path) = checkpoint_of_casts(10);
        let opened = open_cast(&path);
        let loader = DeviceLoader::new(2 * CHUNK_BYTES);
        for device in [0, 1] {
            let (loaded, report) = loader.load(&all_tensors(&opened), device).unwrap();
            assert_loaded(&opened, &loaded);
            assert_eq!(report.device_cast, expected_cast_bytes(&opened)[0]);
        }
    });
    let Some(report) = report else { return };
    assert_clean(&report);
    assert_eq!(report["calls"]["cuModuleLoadData"], 2 * CAST_COUNT as u64, "{report}");
}

/// A kernel stores no value at such an address: the device would fail for good.
#[test]
fn the_host_casts_to_an_odd_address() {
    let test = test_path!("the_host_casts_to_an_odd_address");
    let report = with_driver(test, &[], || {
        let (_folder, path) = checkpoint_of_casts(10);
        let opened = open_cast(&path);
        let loader = DeviceLoader::new(2 * CHUNK_BYTES);
        let tensor = opened.tensor("F64.F32").unwrap();
        let len = tensor.bytes.len() as usize;
        for (shift, expected) in [(4, len as u64), (1, 0)] {
            let device = loader.device(0).unwrap();
            let memory = DeviceMemory::allocate(&device, len + 4).unwrap();
            let (checkpoint, address) = (&opened, memory.address() + shift as u64);
            let request = DeviceLoadRequest { checkpoint, tensor, device: 0, address };
            let stop = AtomicBool::new(false);
            // SAFETY: the memory has so many bytes, and without a user the load waits until they are there.
            #[allow(unsafe_code)]
            let report = unsafe { loader.load_into([request], &[], &stop, None) }.unwrap();
            assert_eq!((report.device_cast, report.cast), (expected, len as u64));
            let loaded = memory.to_host().unwrap();
            assert!(loaded[shift..shift + len] == *opened.load(tensor).unwrap());
        }
    });
    report.iter().for_each(assert_clean);
}

/// In a storage that is unpacked in memory, bytes begin at an odd place in front of the values that are cast.
#[test]
fn values_of_an_unpacked_storage_are_read_where_they_are_aligned() {
    let test = test_path!("values_of_an_unpacked_storage_are_read_where_they_are_aligned");
    let report = with_driver(test, &[], || {
        let bytes = STORED_FLOATS * 4;
        let odd = Tensor { class: "ByteStorage", count: bytes, offset: 1, ..vector(3) };
        let cast = Tensor { offset: 1, ..vector(5) };
        let value = pickle(&dict(&[("odd", odd.bytes()), ("cast.F16", cast.bytes())]));
        let (_folder, path) = write_sample(&zip::archive(&[
            zip::Record::stored("archive/data.pkl", &value),
            zip::Record::stored("archive/byteorder", b"little"),
            zip::Record::deflated("archive/data/0", &samples::bytes(bytes as usize, 1)),
        ]));
        let opened = open_cast(&path);
        let loader = DeviceLoader::new(CHUNK_BYTES);
        let (loaded, report) = loader.load(&all_tensors(&opened), 0).unwrap();
        assert_loaded(&opened, &loaded);
        assert_eq!((report.device_cast, report.memory), (5 * 2, 3 + 5 * 4));
    });
    report.iter().for_each(assert_clean);
}

fn vector(len: i128) -> Tensor {
    Tensor { shape: vec![len], stride: vec![1], ..Default::default() }
}

#[test]
fn the_host_casts_where_a_kernel_cannot_be_compiled() {
    let test = test_path!("the_host_casts_where_a_kernel_cannot_be_compiled");
    let fails =
        (1..=CAST_COUNT).map(|nth| format!("cuModuleLoadData:{nth}=218")).collect::<Vec<_>>();
    let report = with_driver(test, &[("STUB_CUDA_FAIL", &fails.join(","))], || {
        let (_folder, path) = checkpoint_of_casts(10);
        let opened = open_cast(&path);
        let loader = DeviceLoader::new(2 * CHUNK_BYTES);
        for _ in 0..2 {
            let (loaded, report) = loader.load(&all_tensors(&opened), 0).unwrap();
            assert_loaded(&opened, &loaded);
            let all = expected_cast_bytes(&opened).iter().sum();
            assert_eq!((report.device_cast, report.cast), (0, all));
        }
    });
    let Some(report) = report else { return };
    assert_clean(&report);
    assert_eq!(report["calls"]["cuLaunchKernel"], json!(null), "{report}");
}

#[test]
fn a_cast_that_cannot_be_queued_is_an_error() {
    for call in ["cuLaunchKernel", "cuMemHostGetDevicePointer_v2"] {
        for nth in [1, 9] {
            let fails = format!("{call}:{nth}=999");
            let test = test_path!("a_cast_that_cannot_be_queued_is_an_error");
            let report = with_driver(test, &[("STUB_CUDA_FAIL", &fails)], || {
                let (_folder, path) = checkpoint_of_casts(10);
                let opened = open_cast(&path);
                let loader = DeviceLoader::new(2 * CHUNK_BYTES);
                let failed = loader.load(&all_tensors(&opened), 0);
                let error = failed.map(|(_, report)| report).unwrap_err();
                assert!(matches!(error, cuda::CudaError::Driver { .. }), "{error:?}");
                let (loaded, _) = loader.load(&all_tensors(&opened), 0).unwrap();
                assert_loaded(&opened, &loaded);
            });
            let Some(report) = report else { return };
            assert_clean(&report);
        }
    }
}
