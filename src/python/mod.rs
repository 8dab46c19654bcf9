//! The Python module `ckptfs._ckptfs`: the loader and the command line for the package `ckptfs`.
//!
//! In: paths, tensors and addresses from Python. Out: [`checkpoint::PyCheckpoint`] and [`tensor::PyTensor`], which say
//! what there is, and [`tensor::PyMemory`], which torch and numpy use as their own.
//! What a user calls, and every decision, is in the Python sources of the package (`python/ckptfs`).
//! The interpreter's lock is free while anything is read. The main thread handles signals where that may take long.

mod checkpoint;
mod command;
mod device;
mod dlpack;
mod error;
mod fetch;
mod interruptible;
mod load;
mod mounts;
mod stores;
mod temp_files;
mod tensor;

use pyo3::prelude::*;

/// The part of ckptfs that is written in Rust; use the package `ckptfs`.
#[pymodule]
mod _ckptfs {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use pyo3::exceptions::PyValueError;
    use pyo3::prelude::*;

    use crate::checkpoint::Dtype;

    #[pymodule_export]
    use super::checkpoint::{PyCheckpoint, open_each};
    #[pymodule_export]
    use super::command::parse_command;
    #[pymodule_export]
    use super::device::{
        device_obstacle, is_integrated, load_on_device, load_to_devices, trim_pinned,
    };
    #[pymodule_export]
    use super::dlpack::dlpack_capsule;
    #[pymodule_export]
    use super::fetch::fetch;
    #[pymodule_export]
    use super::interruptible::StopFlag;
    #[pymodule_export]
    use super::load::{load, load_into};
    #[pymodule_export]
    use super::mounts::{is_on_mount, locate, mount_table};
    #[pymodule_export]
    use super::stores::{request_counters, set_remote_options};
    #[pymodule_export]
    use super::temp_files::{PyTempFile, check_output_path, remove_stale_file, sync_directory};
    #[pymodule_export]
    use super::tensor::{PyMemory, PyTensor, strided_spans};

    /// Runs the command line. `args` begins with the command's name; `program` with `before` starts this command
    /// again. `environment` has the state of the Python environment, and what to do about it.
    #[pyfunction]
    fn run_command(
        py: Python<'_>,
        args: Vec<OsString>,
        program: PathBuf,
        before: Vec<OsString>,
        environment: Option<(String, String)>,
    ) -> u8 {
        crate::mount::lifecycle::respawn::set_runner(program, before);
        if let Some((state, remedy)) = environment {
            crate::cli::python_environment::set(state, remedy);
        }
        py.detach(|| crate::cli::run(args))
    }

    /// Bytes of a size as people write it.
    #[pyfunction]
    fn parse_size(text: &str) -> PyResult<u64> {
        crate::byte_size::parse_size(text).map_err(PyValueError::new_err)
    }

    /// Whether a path is the URL of a store that can be read.
    #[pyfunction]
    fn is_source_url(path: std::path::PathBuf) -> bool {
        crate::source::is_source_url(&path)
    }

    /// A variable of the environment, in a tenth of the time that `os.environ` takes.
    #[pyfunction]
    fn environment_variable(name: &str) -> Option<String> {
        std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("PanicException", module.py().get_type::<pyo3::panic::PanicException>())?;
        crate::threads::register_fork_handlers();
        // Every element type: its name in a header, what torch and numpy call it, and its bits. Then the elements that
        // torch counts as one, and whether DLPack has it.
        let dtypes: Vec<_> = Dtype::all()
            .map(|dtype| {
                (
                    dtype.name(),
                    dtype.torch_name(),
                    dtype.bits(),
                    dtype.torch_packing(),
                    super::dlpack::type_code(dtype).is_some(),
                )
            })
            .collect();
        module.add("DTYPES", dtypes)?;
        module.add("MAX_SECONDS", crate::source::SECONDS_RANGE.end())?;
        module.add("MAX_CONNECTIONS", crate::source::CONNECTIONS_RANGE.end())?;
        module.add("MAX_PERCENT", crate::source::PERCENT_RANGE.end())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
