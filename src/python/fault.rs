//! What goes wrong, as an exception.
//!
//! In: an error of the loader. Out: what `ckptfs._errors.of` makes of its kind, words and remedy: which
//! class it is, is decided there.

use std::path::Path;

use pyo3::prelude::*;

use crate::cuda;
use crate::loader::Error;
use crate::{checkpoint, image, source, view};

/// The exception for an error.
pub fn raised(py: Python<'_>, error: &Error) -> PyErr {
    made(py, kind(error), error.to_string(), error.remedy(), Some(error.path()))
}

/// The exception for one of a device.
pub fn raised_of_device(py: Python<'_>, error: &cuda::Error) -> PyErr {
    match error {
        cuda::Error::Load(error) => raised(py, error),
        cuda::Error::Memory { .. } => made(py, "memory", error.to_string(), error.remedy(), None),
        error => made(py, "refused", error.to_string(), error.remedy(), None),
    }
}

fn made(py: Python<'_>, kind: &str, told: String, remedy: &str, path: Option<&Path>) -> PyErr {
    let made = || {
        let of = py.import("ckptfs._errors")?.getattr("of")?;
        of.call1((kind, told, remedy, path))
    };
    made().map_or_else(|error| error, PyErr::from_value)
}

/// In a word, what the package tells apart.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::Unknown { .. } => "unknown",
        Error::Part { .. } => "part",
        Error::Memory { .. } => "memory",
        Error::Stopped { .. } => "stopped",
        error => match of_source(error) {
            Some(source::Error::Missing { .. }) => "missing",
            Some(error) if error.is_no_memory() => "memory",
            _ => "refused",
        },
    }
}

fn of_source(error: &Error) -> Option<&source::Error> {
    match error {
        Error::Source(error)
        | Error::Image(image::Error::Source(error))
        | Error::View(
            view::Error::Source(error)
            | view::Error::Checkpoint(checkpoint::Error::Source(error))
            | view::Error::Image(image::Error::Source(error)),
        ) => Some(error),
        _ => None,
    }
}
