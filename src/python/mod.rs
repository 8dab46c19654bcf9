//! The Python module `ckptfs._ckptfs`: the loader and the command line for the package `ckptfs`.
//!
//! In: paths, tensors and addresses from Python. Out: [`opened::Opened`] checkpoints, [`tensor::Tensor`]s,
//! which say what there is, and [`memory::Memory`], which torch and numpy see as theirs;
//! or bytes in memory of devices that Python has.
//! What a user calls, and every decision, is in the Python sources of the package (`python/ckptfs`).
//! While anything is read the interpreter's lock is free, and the main thread hears signals where that may
//! take long.

mod checkpoint;
mod device;
mod dlpack;
mod error;
mod interruptible;
mod load;
mod memory;
mod tensor;

use pyo3::prelude::*;

/// The part of ckptfs that is written in Rust; use the package `ckptfs`.
#[pymodule]
mod _ckptfs {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use pyo3::exceptions::PyValueError;
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::checkpoint::{Opened, open_each};
    #[pymodule_export]
    use super::device::{
        is_integrated, lacks_device, load_on_device, load_to_devices, trim_pinned,
    };
    #[pymodule_export]
    use super::dlpack::dlpack;
    #[pymodule_export]
    use super::interruptible::Stop;
    #[pymodule_export]
    use super::load::{load, load_into};
    #[pymodule_export]
    use super::memory::Memory;
    #[pymodule_export]
    use super::tensor::{PyTensor, spread};

    /// Runs the command line: `args` has the command's name first, and `program` with `before` is what
    /// starts this command again.
    #[pyfunction]
    fn command(py: Python<'_>, args: Vec<OsString>, program: PathBuf, before: Vec<OsString>) -> u8 {
        crate::mount::lifecycle::respawn::set_runner(program, before);
        py.detach(|| crate::cli::run(args))
    }

    /// Bytes, of a size as people write one.
    #[pyfunction]
    fn size(text: &str) -> PyResult<u64> {
        crate::cli::sizes::parse_size(text).map_err(PyValueError::new_err)
    }

    /// What the environment says: `os.environ` is the same, and takes ten times as long.
    #[pyfunction]
    fn variable(name: &str) -> Option<String> {
        std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
