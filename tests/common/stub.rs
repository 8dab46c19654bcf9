//! Stubs of NVIDIA's libraries for tests on machines without a GPU.
//!
//! A stub of `stubs` is built when it is first needed. The test's body runs in a process that finds it,
//! under the settings of its `README.md`, and the caller gets the stub's report.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use super::child::{in_child, must_pass};

/// A stub of one of NVIDIA's libraries.
struct StubLibrary {
    /// Its directory in `stubs`, and the prefix of its settings.
    name: &'static str,
    settings: &'static str,
    /// The file that cargo builds.
    built: &'static str,
    /// The file names that programs look for.
    names: &'static [&'static str],
}

const DRIVER: StubLibrary = StubLibrary {
    name: "cuda",
    settings: "STUB_CUDA",
    built: "libcuda.so",
    names: &["libcuda.so", "libcuda.so.1"],
};

/// The library for GPUDirect Storage.
const STORAGE: StubLibrary = StubLibrary {
    name: "cufile",
    settings: "STUB_CUFILE",
    built: "libcufile.so",
    names: &["libcufile.so.0"],
};

impl StubLibrary {
    /// The directory that has the library under all names that programs look for. Builds it once for all
    /// tests and processes.
    fn folder(&self) -> PathBuf {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stub-{}", self.name));
        let folder = target.join("found");
        fs::create_dir_all(&folder).unwrap();
        let only_one = File::create(target.join("lock")).unwrap();
        only_one.lock().unwrap();
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("stubs").join(self.name);
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--locked", "--lib", "--manifest-path"]);
        build.arg(manifest.join("Cargo.toml")).arg("--target-dir").arg(&target);
        let output = build.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let library = target.join("debug").join(self.built);
        assert!(library.exists(), "{}: not built", library.display());
        for name in self.names {
            match symlink(Path::new("../debug").join(self.built), folder.join(name)) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => panic!("{name}: {error}"),
                _ => {}
            }
        }
        folder
    }
}

/// The directories of the driver and of the library for GPUDirect Storage.
fn folders() -> &'static [PathBuf; 2] {
    static FOLDERS: OnceLock<[PathBuf; 2]> = OnceLock::new();
    FOLDERS.get_or_init(|| [DRIVER, STORAGE].map(|stub| stub.folder()))
}

/// Runs the test of this name in a process that finds the stub of the driver and its settings. Gives the
/// stub's report, or nothing in the process itself.
#[track_caller]
pub fn with_driver(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) -> Option<Value> {
    let [driver, _] = in_process(test, &[DRIVER], settings, body)?;
    Some(driver.expect("the test calls the driver"))
}

/// The same with the library for GPUDirect Storage, which the body need not call.
#[track_caller]
pub fn with_storage(
    test: &str,
    settings: &[(&str, &str)],
    body: impl FnOnce(),
) -> Option<(Value, Option<Value>)> {
    let [driver, storage] = in_process(test, &[DRIVER, STORAGE], settings, body)?;
    Some((driver.expect("the test calls the driver"), storage))
}

#[track_caller]
fn in_process(
    test: &str,
    stubs: &[StubLibrary],
    settings: &[(&str, &str)],
    body: impl FnOnce(),
) -> Option<[Option<Value>; 2]> {
    let place = tempfile::tempdir().unwrap();
    let report = |stub: &StubLibrary| place.path().join(stub.name);
    let prepare = |command: &mut Command| {
        let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let others = std::env::split_paths(&others).filter(|path| !path.as_os_str().is_empty());
        let ours = folders().iter().take(stubs.len()).cloned();
        let paths = std::env::join_paths(ours.chain(others)).unwrap();
        command.env("LD_LIBRARY_PATH", paths).envs(settings.iter().copied());
        for stub in stubs {
            command.env(format!("{}_REPORT", stub.settings), report(stub));
        }
    };
    let output = in_child(test, prepare, body)?;
    must_pass(&output);
    let reports = [DRIVER, STORAGE].map(|stub| fs::read(report(&stub)).ok());
    Some(reports.map(|report| Some(serde_json::from_slice(&report?).unwrap())))
}
