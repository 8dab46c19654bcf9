//! The commands that the package runs itself, as Python takes their options.

use std::ffi::OsString;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cli::python_commands::{
    BenchArgs, DisableArgs, EnableArgs, PythonCommand, RunArgs, parse_python_command,
};

/// What a command line asks of the package: the name of its command, and the options by their names. `None` is a
/// command of Rust; an exit code says that help or an error was printed.
#[pyfunction]
pub fn parse_command(py: Python<'_>, args: Vec<OsString>) -> PyResult<Option<Py<PyAny>>> {
    let (command, quiet) = match parse_python_command(&args) {
        None => return Ok(None),
        Some(Err(code)) => return Ok(Some(code.into_pyobject(py)?.into_any().unbind())),
        Some(Ok(parsed)) => parsed,
    };
    let options = PyDict::new(py);
    options.set_item("quiet", quiet)?;
    let name = match command {
        PythonCommand::Run(RunArgs { module, script }) => {
            options.set_item("is_module", !module.is_empty())?;
            options.set_item("words", [module, script].concat())?;
            "run"
        }
        PythonCommand::Bench(BenchArgs { path, device, against, runs, cold, json, html }) => {
            options.set_item("path", path)?;
            options.set_item("device", device)?;
            options.set_item("against", against)?;
            options.set_item("runs", runs)?;
            options.set_item("cold", cold)?;
            options.set_item("json", json)?;
            options.set_item("html", html)?;
            "bench"
        }
        PythonCommand::Enable(EnableArgs { python, user }) => {
            options.set_item("python", python)?;
            options.set_item("user", user)?;
            "enable"
        }
        PythonCommand::Disable(DisableArgs { python }) => {
            options.set_item("python", python)?;
            "disable"
        }
    };
    Ok(Some((name, options).into_pyobject(py)?.into_any().unbind()))
}
