//! A CUDA driver for tests on machines without a GPU: the stand-in of `standins/cuda`, built when it is first
//! needed, and a process that finds it. In: a test's name, settings (`standins/cuda/README.md`), and what to
//! do there. Out: the stand-in's report of it.

#![allow(dead_code)] // Each test file uses a part of it.
#![allow(clippy::unwrap_used)] // As in tests: what fails fails the test.

mod child;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use child::{in_child, must_pass};

/// The names that programs look for.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// The folder that has the library, under all names that programs look for. Builds it first, once, however
/// many tests and processes of tests want it.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("standin-cuda");
        let folder = target.join("found");
        fs::create_dir_all(&folder).unwrap();
        let only_one = File::create(target.join("lock")).unwrap();
        only_one.lock().unwrap();
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/standins/cuda/Cargo.toml");
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--locked", "--lib", "--manifest-path", manifest]);
        let done = build.arg("--target-dir").arg(&target).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let library = target.join("debug/libcuda.so");
        assert!(library.exists(), "{}: not built", library.display());
        for name in NAMES {
            match symlink("../debug/libcuda.so", folder.join(name)) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => panic!("{name}: {error}"),
                _ => {}
            }
        }
        folder
    })
}

/// Does the test of this name in a process that finds the stand-in and its settings, and passes on what the
/// stand-in reports at the end of that; nothing in the process itself.
#[track_caller]
pub fn with_driver(
    test: &str,
    settings: &[(&str, &str)],
    body: impl FnOnce(),
) -> Option<serde_json::Value> {
    let place = tempfile::tempdir().unwrap();
    let report = place.path().join("report.json");
    let prepare = |command: &mut Command| {
        let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let others = std::env::split_paths(&others).filter(|path| !path.as_os_str().is_empty());
        let paths = std::env::join_paths([folder().to_owned()].into_iter().chain(others)).unwrap();
        command.env("LD_LIBRARY_PATH", paths).env("STANDIN_CUDA_REPORT", &report);
        command.envs(settings.iter().copied());
    };
    let output = in_child(test, prepare, body)?;
    must_pass(&output);
    let report = fs::read(&report).expect("the test calls the driver");
    Some(serde_json::from_slice(&report).unwrap())
}
