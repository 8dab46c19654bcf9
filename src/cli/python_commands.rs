//! `run` and `bench`: commands that only the Python package has, and runs itself.

use std::ffi::OsString;

use super::error::{CommandError, EXIT_USAGE};

/// Their names, and their lines in `--help`.
const PYTHON_COMMANDS: [(&str, &str); 2] = [
    ("run", "Run a Python program that reads with ckptfs in place of safetensors"),
    (
        "bench",
        "Measure how fast a checkpoint loads with ckptfs, through a mount, and with other libraries",
    ),
];

/// Adds them to the table of commands if the Python package runs this process.
#[cfg(feature = "mount")]
pub fn add_python_commands(table: clap::Command) -> clap::Command {
    if !crate::mount::lifecycle::respawn::has_runner() {
        return table;
    }
    table.subcommands(PYTHON_COMMANDS.map(|(name, about)| clap::Command::new(name).about(about)))
}

/// The error of a command line that asks for one of them, or for its help. The package never passes them on.
pub fn refuse_python_command(words: &[OsString]) -> Option<CommandError> {
    let command = words.iter().skip(1).find(|word| *word != "help")?;
    let (name, _) = PYTHON_COMMANDS.iter().find(|(name, _)| command == name)?;
    let message = format!("{name}: only the Python package has this command");
    let remedy = format!("pip install ckptfs; then run ckptfs {name}, or python -m ckptfs {name}");
    Some(CommandError::new(EXIT_USAGE, message, remedy))
}
