//! Files without names, and hidden ones, for saving in Python: `temp_file` has the rules.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::Mutex;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use rustix::fs::{Mode, fchmod};

use crate::export;
use crate::temp_file::{self, HiddenName, TempFile};
use crate::threads::lock;

use super::error::export_exception;

/// The permissions of a file that is not complete.
const TEMP_FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// A file that is written in a directory, and then takes its name. `name` is the one that it will take: what a killed
/// process left of it is removed first.
#[pyclass(frozen, subclass, name = "TempFile", module = "ckptfs._ckptfs")]
pub struct PyTempFile(Mutex<WritingStage>);

enum WritingStage {
    Open(TempFile),
    SetAside(HiddenName),
    Closed,
}

#[pymethods]
impl PyTempFile {
    #[new]
    #[pyo3(signature = (directory, name=None))]
    fn new(py: Python<'_>, directory: PathBuf, name: Option<OsString>) -> PyResult<PyTempFile> {
        let create = || TempFile::create(&directory, name.as_deref(), TEMP_FILE_MODE);
        let file = py.detach(create).map_err(|errno| os_error(errno.into()))?;
        Ok(PyTempFile(Mutex::new(WritingStage::Open(file))))
    }

    /// The descriptor, to write to. It belongs to this object.
    fn fileno(&self) -> PyResult<RawFd> {
        match &*lock(&self.0) {
            WritingStage::Open(file) => Ok(file.file().as_raw_fd()),
            WritingStage::SetAside(_) | WritingStage::Closed => Err(closed_file()),
        }
    }

    /// Ends writing. With `sync` everything is on the disk from then on.
    #[pyo3(signature = (mode, sync=true))]
    fn finish(&self, py: Python<'_>, mode: u32, sync: bool) -> PyResult<()> {
        let finish = || match &*lock(&self.0) {
            WritingStage::Open(file) => {
                fchmod(file.file(), Mode::from_raw_mode(mode)).map_err(|e| os_error(e.into()))?;
                if sync { file.file().sync_all().map_err(os_error) } else { Ok(()) }
            }
            WritingStage::SetAside(_) | WritingStage::Closed => Err(closed_file()),
        };
        py.detach(finish)
    }

    /// Closes it, under a hidden name until it takes its own.
    fn set_aside(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let mut stage = lock(&self.0);
            match std::mem::replace(&mut *stage, WritingStage::Closed) {
                WritingStage::Open(file) => {
                    let hidden = file.set_aside().map_err(|errno| os_error(errno.into()))?;
                    *stage = WritingStage::SetAside(hidden);
                    Ok(())
                }
                WritingStage::SetAside(_) | WritingStage::Closed => Err(closed_file()),
            }
        })
    }

    /// Gives it a name in its directory, in the place of another file of that name. If that fails, the file is deleted.
    fn take(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| match self.end() {
            WritingStage::Open(file) => file.take(&path, true).map_err(os_error),
            WritingStage::SetAside(hidden) => hidden.take(&path, true).map_err(os_error),
            WritingStage::Closed => Err(closed_file()),
        })
    }

    /// Deletes it, unless it took a name.
    fn drop(&self, py: Python<'_>) {
        py.detach(|| drop(self.end()));
    }
}

impl PyTempFile {
    fn end(&self) -> WritingStage {
        std::mem::replace(&mut *lock(&self.0), WritingStage::Closed)
    }
}

fn closed_file() -> PyErr {
    PyValueError::new_err("the file is closed")
}

/// Refuses a URL. Unless `any_suffix` is set, also refuses the suffix of another format than safetensors.
#[pyfunction]
pub fn check_output_path(py: Python<'_>, path: PathBuf, any_suffix: bool) -> PyResult<()> {
    export::check_output_path(&path, any_suffix).map_err(|error| export_exception(py, &error))
}

/// Removes what a killed process left of the file of this name.
#[pyfunction]
pub fn remove_stale_file(directory: PathBuf, name: OsString) {
    temp_file::remove_stale(&directory, &name);
}

/// Writes the names in a directory to the disk, where the filesystem can.
#[pyfunction]
pub fn sync_directory(py: Python<'_>, directory: PathBuf) {
    py.detach(|| temp_file::sync_directory(&directory));
}

/// The exception of Python for an error of the system, of the class that belongs to its number.
fn os_error(error: io::Error) -> PyErr {
    let text = error.to_string();
    // Rust appends the number, which Python puts in front.
    let text = text.split(" (os error").next().unwrap_or_default().to_owned();
    match error.raw_os_error() {
        Some(number) => PyOSError::new_err((number, text)),
        None => PyOSError::new_err(text),
    }
}
