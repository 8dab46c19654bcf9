//! Errors as exceptions of Python. `ckptfs.errors.from_loader` decides the class by the kind of the error.

use std::path::Path;

use pyo3::prelude::*;

use crate::cuda;
use crate::fetch::FetchError;
use crate::loader::LoadError;
use crate::{checkpoint, export, source, view, virtual_file};

/// The exception for an error.
pub fn load_exception(py: Python<'_>, error: &LoadError) -> PyErr {
    let errno = source_error(error).and_then(source::SourceError::errno);
    build_exception(
        py,
        error_kind(error),
        error.to_string(),
        &error.remedy(),
        Some(error.path()),
        errno,
    )
}

/// The exception for an error of a device.
pub fn cuda_exception(py: Python<'_>, error: &cuda::CudaError) -> PyErr {
    match error {
        cuda::CudaError::Load(error) => load_exception(py, error),
        cuda::CudaError::OutOfMemory { .. } => {
            build_exception(py, "memory", error.to_string(), &error.remedy(), None, None)
        }
        error => build_exception(py, "refused", error.to_string(), &error.remedy(), None, None),
    }
}

/// The exception for an error of writing a file.
pub fn export_exception(py: Python<'_>, error: &export::ExportError) -> PyErr {
    build_exception(py, "refused", error.to_string(), &error.remedy(), None, None)
}

/// The exception for an error of a fetch.
pub fn fetch_exception(py: Python<'_>, error: FetchError) -> PyErr {
    match error {
        FetchError::View(error) => load_exception(py, &LoadError::View(error)),
        FetchError::VirtualFile(error) => load_exception(py, &LoadError::VirtualFile(error)),
        FetchError::Source(error) => load_exception(py, &LoadError::Source(error)),
        error @ (FetchError::Remote(_)
        | FetchError::NotRemote { .. }
        | FetchError::NoCache { .. }
        | FetchError::NoRoom { .. }
        | FetchError::NotKept { .. }
        | FetchError::Stopped) => {
            build_exception(py, "refused", error.to_string(), &error.python_remedy(), None, None)
        }
    }
}

fn build_exception(
    py: Python<'_>,
    kind: &str,
    message: String,
    remedy: &str,
    path: Option<&Path>,
    errno: Option<i32>,
) -> PyErr {
    let build = || {
        let from_loader = py.import("ckptfs.errors")?.getattr("from_loader")?;
        from_loader.call1((kind, message, remedy, path, errno))
    };
    build().map_or_else(|error| error, PyErr::from_value)
}

/// The kind of an error, as the package distinguishes them.
fn error_kind(error: &LoadError) -> &'static str {
    match error {
        LoadError::UnknownTensor { .. } => "unknown",
        LoadError::Slice { .. } => "part",
        LoadError::OutOfMemory { .. } => "memory",
        LoadError::Stopped { .. } => "stopped",
        error => match source_error(error) {
            Some(source::SourceError::Missing { path }) if source::is_remote_name(path) => "remote",
            Some(source::SourceError::Missing { .. }) => "missing",
            Some(source::SourceError::Dangling { .. }) => "dangling",
            Some(error) if error.is_out_of_memory() => "memory",
            Some(error) if error.errno().is_some() => "system",
            _ => "refused",
        },
    }
}

fn source_error(error: &LoadError) -> Option<&source::SourceError> {
    match error {
        LoadError::Source(error)
        | LoadError::VirtualFile(virtual_file::VirtualFileError::Source(error))
        | LoadError::View(
            view::ViewError::Source(error)
            | view::ViewError::Checkpoint(checkpoint::CheckpointError::Source(error))
            | view::ViewError::VirtualFile(virtual_file::VirtualFileError::Source(error)),
        ) => Some(error),
        _ => None,
    }
}
