//! The bindings for CUDA load the driver when they first need it, from where the linker finds it: here the
//! stub.

use crate::common::stub::with_driver;
use crate::common::test_path;
use cudarc::driver::CudaContext;
use serde_json::json;

#[test]
fn the_bindings_find_the_stub() {
    let test = test_path!("the_bindings_find_the_stub");
    let report = with_driver(test, &[("STUB_CUDA_DEVICES", "2")], || {
        assert_eq!(CudaContext::device_count().unwrap(), 2);
        let context = CudaContext::new(1).unwrap();
        assert_eq!(context.name().unwrap(), "Stub device 1");
        let stream = context.new_stream().unwrap();
        let memory = stream.clone_htod(&[1_u8, 2, 3]).unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [1, 2, 3]);
        stream.synchronize().unwrap();
    });
    if let Some(report) = report {
        assert_eq!(report["calls"]["cuMemcpyHtoDAsync_v2"], 1, "{report}");
        assert_eq!(report["allocated"]["device"]["count"], 0, "{report}");
        assert_eq!(report["allocated"]["contexts"], 0, "{report}");
        assert_eq!(report["faults"], json!([]), "{report}");
    }
}
