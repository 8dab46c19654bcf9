//! The report says what happened and what was left behind, also with many threads at once.

#![allow(clippy::unwrap_used)] // In helper functions too: a failure fails the test.

mod support;

use support::*;

const BYTES: usize = 64;

/// Whether all of these texts are in a report.
#[track_caller]
fn tells(report: &str, texts: &[&str]) {
    for text in texts {
        assert!(report.contains(text), "{text}: {report}");
    }
}

#[test]
fn the_report_tells_what_happened() {
    in_own_process("the_report_tells_what_happened", &[("FAULTS", "count")], || {
        begin(0);
        let (stream, from, to) = (stream(), pinned(BYTES, 7), device_memory(BYTES));
        ok(cuMemFree_v2(device_memory(1000)));
        let pageable = [0_u8; BYTES];
        ok(cuMemcpyHtoDAsync_v2(to, pageable.as_ptr() as usize, BYTES, stream));
        ok(cuMemcpyHtoDAsync_v2(to, from, BYTES, stream));
        cuMemFreeHost(from);
        let folder = std::env::temp_dir();
        let path = folder.join(format!("stub-cuda-report-{}", std::process::id()));
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a text has a first byte, be it its zero.
        ok(stub_cuda_report(Some(unsafe { &*name.as_ptr() })));
        let report = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        tells(
            &report,
            &[
                r#""cuMemcpyHtoDAsync_v2":2"#,
                r#""cuInit":1"#,
                r#""device":{"bytes":64,"count":1}"#,
                r#""pinned":{"bytes":64,"count":1}"#,
                r#""contexts":1"#,
                r#""streams":1"#,
                r#""peak":{"device":1064,"pinned":64}"#,
                r#""queued":2"#,
                r#""pageable_copies":1"#,
                r#""faults":["cuMemFreeHost: the pinned memory at "#,
                r#""sticky":null"#,
            ],
        );
    });
}

#[test]
fn the_report_at_the_end_is_of_the_end() {
    let test = "the_report_at_the_end_is_of_the_end";
    let path = std::env::temp_dir().join(format!("stub-cuda-end-{}", std::process::id()));
    let body = || {
        begin(0);
        device_memory(BYTES);
        ok(cuMemFree_v2(device_memory(BYTES)));
        ok(cuDevicePrimaryCtxRelease_v2(0));
    };
    let prepare = |command: &mut std::process::Command| {
        command.env("STUB_CUDA_REPORT", &path);
    };
    if let Some(output) = in_child(test, prepare, body) {
        must_pass(&output);
        let report = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let ended = [r#""contexts":0"#, r#""device":{"bytes":64,"count":1}"#, r#""faults":[]"#];
        tells(&report, &ended);
    }
}

#[test]
fn threads_do_not_disturb_each_other() {
    in_own_process("threads_do_not_disturb_each_other", &[], || {
        const ROUNDS: u8 = 50;
        let context = begin(0);
        let work = |value: u8| {
            ok(cuCtxSetCurrent(context));
            let (stream, event) = (stream(), event());
            let (from, to) = (pinned(BYTES, 0), device_memory(BYTES * usize::from(ROUNDS)));
            for round in 0..ROUNDS {
                let at = to + u64::from(round) * BYTES as u64;
                write(from, BYTES, value + round);
                ok(cuMemcpyHtoDAsync_v2(at, from, BYTES, stream));
                ok(cuEventRecord(event, stream));
                ok(cuEventSynchronize(event));
            }
            let expected: Vec<u8> = (0..ROUNDS).flat_map(|round| [value + round; BYTES]).collect();
            assert!(peek(to, expected.len()) == expected);
            ok(cuEventDestroy_v2(event));
            ok(cuStreamDestroy_v2(stream));
            ok(cuMemFreeHost(from));
            ok(cuMemFree_v2(to));
        };
        std::thread::scope(|threads| {
            for value in [0, 50, 100, 150] {
                threads.spawn(move || work(value));
            }
        });
        assert_eq!(stub_cuda_faults(), 0);
    });
}
