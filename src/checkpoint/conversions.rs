//! Commands that turn what is not read into a checkpoint that is, with the libraries that wrote it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::shell_word::{shell_text, shell_word};

/// A program of Python as a command. Its arguments are paths.
pub fn python_command(code: &str, arguments: &[&Path]) -> String {
    let mut command = format!("python -c {}", shell_text(code));
    for argument in arguments {
        command.push(' ');
        command += &shell_word(argument);
    }
    command
}

/// The directory that a file lies in.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The path beside another one whose name has this ending as well.
pub fn joined_path(path: &Path, ending: &str) -> PathBuf {
    let mut name = match path.file_name() {
        Some(name) => name.to_owned(),
        // A path such as `.` or `..`.
        None => return path.join(format!("joined{ending}")),
    };
    name.push::<OsString>(ending.into());
    path.with_file_name(name)
}

/// What saves the state dict of a whole model, which runs its code. `keys` lead to it in nested dictionaries.
pub fn module_remedy(path: &Path, keys: &[String]) -> String {
    let out = joined_path(path, ".state_dict.pt");
    let load = "torch.load(sys.argv[1], map_location=\"cpu\", weights_only=False)";
    let (import, model) = match keys {
        [] => ("sys", load.to_owned()),
        _ => {
            let find = format!("functools.reduce(operator.getitem, sys.argv[3:], {load})");
            ("functools, operator, sys", find)
        }
    };
    let code = format!("import {import}, torch; torch.save({model}.state_dict(), sys.argv[2])");
    let mut command = python_command(&code, &[path, &out]);
    for key in keys {
        command.push(' ');
        command += &shell_text(key);
    }
    format!(
        "in the program that wrote it, save model.state_dict() instead of the model; or, only if you trust it, run its code: {command}"
    )
}
