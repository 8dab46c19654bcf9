//! Commands that turn what is not read into a checkpoint that is, with the libraries that wrote it.

use std::ffi::OsStr;
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

/// The name of a path with this ending, as a path in the current directory: the path's own may be a mount, which is
/// read-only.
pub fn output_path(path: &Path, ending: &str) -> PathBuf {
    // A path such as `.` or `..` has no name of its own.
    let absolute = std::path::absolute(path).unwrap_or_default();
    let mut name =
        path.file_name().or(absolute.file_name()).unwrap_or(OsStr::new("joined")).to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// What saves the state dict of a whole model, which runs its code. `keys` lead to it in nested dictionaries.
/// `script_class` is a class of the script that saved it, which no other program can import.
pub fn module_remedy(path: &Path, keys: &[String], script_class: Option<&str>) -> String {
    let out = output_path(path, ".state_dict.pt");
    if let Some(class) = script_class {
        // Strings of JSON are strings of Python too.
        let text = |text: &str| serde_json::Value::from(text).to_string();
        let path_text = |path: &Path| text(&path.to_string_lossy());
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let items: String = keys.iter().map(|key| format!("[{}]", text(key))).collect();
        return format!(
            "in the program that defines class {class}, save the state dict: torch.save(model.state_dict(), {out}); \
             or, only if you trust the file, convert it in that program: torch.save(torch.load({}, map_location=\"cpu\", weights_only=False){items}.state_dict(), {out})",
            path_text(&absolute),
            out = path_text(&out),
        );
    }
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
