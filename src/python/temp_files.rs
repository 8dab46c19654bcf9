//! Names, files without names, and hidden ones, for saving in Python: `export` has the rules.
//!
//! Descriptors that are returned belong to the caller.

use std::ffi::OsString;
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};
use std::path::PathBuf;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use rustix::fs::Mode;
use rustix::io::Errno;

use crate::export::{check_suffix, temp_file};

use super::error::export_exception;

/// The permissions of a file that is not complete.
const TEMP_FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Refuses a path with the suffix of another format than safetensors.
#[pyfunction]
pub fn check_file_suffix(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    check_suffix(&path).map_err(|error| export_exception(py, &error))
}

/// Removes what a killed process left of the file of this name.
#[pyfunction]
pub fn remove_stale_file(directory: PathBuf, name: OsString) {
    temp_file::remove_stale(&temp_file::hidden_path(&directory, &name));
}

/// Opens a file without a name; `None` where there can be none.
#[pyfunction]
pub fn open_unnamed_file(directory: PathBuf) -> Option<RawFd> {
    temp_file::open_unnamed(&directory, TEMP_FILE_MODE).map(IntoRawFd::into_raw_fd)
}

/// Creates a file under the hidden name of `name`, or under a unique one. Returns it with its path.
#[pyfunction]
pub fn create_hidden_file(
    directory: PathBuf,
    name: Option<OsString>,
) -> PyResult<(RawFd, OsString)> {
    let made = temp_file::create_hidden(&directory, name.as_deref(), TEMP_FILE_MODE);
    let (file, path) = made.map_err(os_error)?;
    Ok((file.into_raw_fd(), path.into()))
}

/// Gives a file without a name the hidden name of `name`, or a unique one. Returns its path.
#[pyfunction]
pub fn link_hidden_file(
    file: RawFd,
    directory: PathBuf,
    name: Option<OsString>,
) -> PyResult<OsString> {
    if file < 0 {
        return Err(PyValueError::new_err("no descriptor is negative"));
    }
    // SAFETY: the number is looked up in `/proc` alone. The caller holds the file open until this returns.
    #[allow(unsafe_code)]
    let file = unsafe { BorrowedFd::borrow_raw(file) };
    let path = temp_file::link_hidden(&file, &directory, name.as_deref()).map_err(os_error)?;
    Ok(path.into())
}

/// The exception of Python for an error of the system, of the class that belongs to its number.
fn os_error(errno: Errno) -> PyErr {
    let number = errno.raw_os_error();
    let text = std::io::Error::from(errno).to_string();
    // Rust appends the number, which Python puts in front.
    let text = text.split(" (os error").next().unwrap_or_default().to_owned();
    PyOSError::new_err((number, text))
}
