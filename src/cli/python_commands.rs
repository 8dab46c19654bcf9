//! `run` and `bench`: the commands that only the Python package has, which runs them itself.
//!
//! In: the table of commands, or the arguments of the program. Out: the table with these two where the
//! package is what runs us; elsewhere, what to tell who asks for them.

use std::ffi::OsString;

use super::{CommandError, EXIT_USAGE};

/// Their names, and what `--help` says of them.
const PYTHON_COMMANDS: [(&str, &str); 2] = [
    ("run", "Run a Python program with the reads of ckptfs in the place of safetensors'"),
    (
        "bench",
        "Tell how fast a checkpoint loads with ckptfs, through a mount, and with other libraries",
    ),
];

/// The table, for who has the package.
#[cfg(feature = "mount")]
pub fn add_python_commands(table: clap::Command) -> clap::Command {
    if !crate::mount::lifecycle::respawn::has_runner() {
        return table;
    }
    table.subcommands(PYTHON_COMMANDS.map(|(name, about)| clap::Command::new(name).about(about)))
}

/// What to tell who asks for one of them, or for help about it. The package does not ask us.
pub fn refuse_python_command(given: &[OsString]) -> Option<CommandError> {
    let asked = given.iter().skip(1).find(|word| *word != "help")?;
    let (name, _) = PYTHON_COMMANDS.iter().find(|(name, _)| asked == name)?;
    let message = format!("{name}: comes with the Python package, and this is the program alone");
    let remedy = format!("pip install ckptfs, and then ckptfs {name}, or python -m ckptfs {name}");
    Some(CommandError::new(EXIT_USAGE, message, remedy))
}
