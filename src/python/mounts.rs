//! What shows at a path, and which mounts the system has.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::mount_info;
use crate::mount_info::mountinfo::{self, PathHandle};

/// Whether a file is on a mount of ours. This asks the mount's daemon.
#[pyfunction]
pub fn is_on_mount(py: Python<'_>, path: PathBuf) -> bool {
    py.detach(|| mount_info::mount_origin(&path).is_some())
}

/// The path of a file without links, and the number of the mount that shows there; `None` where nothing is.
#[pyfunction]
pub fn locate(path: PathBuf) -> Option<(OsString, u64)> {
    let handle = PathHandle::open(&path).ok()?;
    Some((handle.path().into(), handle.mount_id()))
}

/// Maps the number of each mount that this process sees to its mountpoint, its type and its source.
#[pyfunction]
pub fn mount_table() -> PyResult<BTreeMap<u64, (OsString, OsString, OsString)>> {
    let mounts = mountinfo::mounts().map_err(|error| PyOSError::new_err(error.to_string()))?;
    Ok(mounts
        .into_iter()
        .map(|entry| (entry.id, (entry.mountpoint.into(), entry.fs_type, entry.source)))
        .collect())
}
