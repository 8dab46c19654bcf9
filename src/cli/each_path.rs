//! Runs a command for each path that it was given.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::error::{CommandError, EXIT_OK, ErrorFormat};

/// Runs a command for each of its paths. With several paths, an error of one is printed at once and the others still
/// run; the exit code is the highest.
pub fn for_each_path(
    paths: &[PathBuf],
    format: ErrorFormat,
    out: &mut dyn Write,
    mut run: impl FnMut(&Path, &mut dyn Write) -> Result<(), CommandError>,
) -> Result<(), CommandError> {
    if let [path] = paths {
        return run(path, out);
    }
    let mut code = EXIT_OK;
    for path in paths {
        if let Err(error) = run(path, out) {
            // On a terminal, the output before the error stays before it.
            out.flush()?;
            error.print(format);
            code = code.max(error.code);
        }
    }
    match code {
        EXIT_OK => Ok(()),
        code => Err(CommandError::already_reported(code)),
    }
}

/// Writes the JSON of a command: the object of its only path, or a list with the object of each path.
pub fn write_json<T: serde::Serialize>(
    paths: &[PathBuf],
    reports: &[T],
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let json = match (paths, reports) {
        ([_], [report]) => serde_json::to_string_pretty(report),
        // Its only path has no report, but an error.
        ([_], _) => return Ok(()),
        _ => serde_json::to_string_pretty(reports),
    };
    Ok(writeln!(out, "{}", json.map_err(std::io::Error::from)?)?)
}
