//! `run` and `bench`: commands that only the Python package has, and runs itself.

use std::ffi::OsString;

use clap::CommandFactory;

use super::args::CommandLine;
use super::error::{CommandError, EXIT_USAGE};

/// Their names, and their lines in `--help`.
const PYTHON_COMMANDS: [(&str, &str); 2] = [
    ("run", "Run a Python program that reads with ckptfs in place of safetensors"),
    (
        "bench",
        "Measure how fast a checkpoint loads with ckptfs, through a mount, and with other libraries",
    ),
];

/// The table of commands, with those of the Python package if it runs this process.
pub fn command_table() -> clap::Command {
    let table = CommandLine::command();
    #[cfg(feature = "mount")]
    if crate::mount::lifecycle::respawn::has_runner() {
        return table.subcommands(PYTHON_COMMANDS.map(describe_python_command));
    }
    table
}

/// A command as completions and man pages show it. The package parses its arguments.
#[cfg(feature = "mount")]
fn describe_python_command((name, about): (&'static str, &'static str)) -> clap::Command {
    let arguments = clap::Arg::new("arguments")
        .num_args(0..)
        .trailing_var_arg(true)
        .allow_hyphen_values(true)
        .value_hint(clap::ValueHint::AnyPath)
        .help(format!("See ckptfs {name} --help"));
    clap::Command::new(name).about(about).arg(arguments)
}

/// The error of a command line that asks for one of them, or for its help. The package never passes them on.
pub fn refuse_python_command(words: &[OsString]) -> Option<CommandError> {
    let command = words.iter().skip(1).find(|word| *word != "help")?;
    let (name, _) = PYTHON_COMMANDS.iter().find(|(name, _)| command == name)?;
    let message = format!("{name}: only the Python package has this command");
    let remedy = format!(
        "in the repository of ckptfs: scripts/dist && pip install dist/ckptfs-{}-*.whl, then ckptfs {name}",
        env!("CARGO_PKG_VERSION")
    );
    Some(CommandError::new(EXIT_USAGE, message, remedy))
}
