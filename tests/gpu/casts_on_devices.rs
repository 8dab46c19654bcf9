//! Devices cast what a recipe casts, to the same bits as the host. Where they cannot, the host does.

use ckptfs::cuda::{self, DeviceLoader, GpudirectMode};
use serde_json::json;

use crate::common::casts::{checkpoint_of_casts, expected_cast_bytes, open_cast};
use crate::common::devices::{CHUNK_BYTES, all_tensors, assert_clean, assert_loaded};
use crate::common::samples::evict;
use crate::common::stub::{with_driver, with_storage};
use crate::common::test_path;

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
    // From six types to four, but for those to the same type.
    assert_eq!(report["calls"]["cuModuleLoadData"], 20, "{report}");
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
fn the_host_casts_where_a_kernel_cannot_be_compiled() {
    let test = test_path!("the_host_casts_where_a_kernel_cannot_be_compiled");
    let fails = (1..=20).map(|nth| format!("cuModuleLoadData:{nth}=218")).collect::<Vec<_>>();
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
