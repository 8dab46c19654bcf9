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
    let errno = of_source(error).and_then(source::Error::errno);
    made(py, kind(error), error.to_string(), error.remedy(), Some(error.path()), errno)
}

/// The exception for one of a device.
pub fn raised_of_device(py: Python<'_>, error: &cuda::Error) -> PyErr {
    match error {
        cuda::Error::Load(error) => raised(py, error),
        cuda::Error::Memory { .. } => {
            made(py, "memory", error.to_string(), error.remedy(), None, None)
        }
        error => made(py, "refused", error.to_string(), error.remedy(), None, None),
    }
}

fn made(
    py: Python<'_>,
    kind: &str,
    told: String,
    remedy: &str,
    path: Option<&Path>,
    errno: Option<i32>,
) -> PyErr {
    let made = || {
        let of = py.import("ckptfs._errors")?.getattr("of")?;
        of.call1((kind, told, remedy, path, errno))
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
            Some(source::Error::Dangling { .. }) => "dangling",
            Some(error) if error.is_no_memory() => "memory",
            Some(error) if error.errno().is_some() => "system",
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
