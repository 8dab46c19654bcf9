//! `run`, `bench`, `enable` and `disable`: commands that only the Python package has, and runs itself.
//!
//! Their options are declared and parsed here; the package gets their values.

use std::ffi::OsString;

use clap::CommandFactory;
#[cfg(feature = "python")]
use clap::FromArgMatches;

use super::args::CommandLine;
use super::error::{CommandError, EXIT_USAGE};
use super::terminal_text::help_width;
#[cfg(feature = "python")]
use super::usage_error;

/// The names of the commands.
const PYTHON_COMMANDS: [&str; 4] = ["run", "bench", "enable", "disable"];

/// Run a Python program that reads with ckptfs in place of safetensors
#[cfg(feature = "mount")]
#[derive(Debug, clap::Parser)]
#[command(
    name = "run",
    after_help = super::help_text::RUN,
    override_usage = "ckptfs run SCRIPT [ARGUMENTS]...\n       ckptfs run -m MODULE [ARGUMENTS]..."
)]
pub struct RunArgs {
    /// Run this module instead of a script
    #[arg(short, value_name = "MODULE", num_args = 1.., allow_hyphen_values = true)]
    pub module: Vec<OsString>,
    /// The program, and the arguments that it gets
    #[arg(value_name = "SCRIPT", trailing_var_arg = true, allow_hyphen_values = true)]
    #[arg(required_unless_present = "module", value_hint = clap::ValueHint::AnyPath)]
    pub script: Vec<OsString>,
}

/// Measure how fast a checkpoint loads, with ckptfs and other libraries
#[cfg(feature = "mount")]
#[derive(Debug, clap::Parser)]
#[command(name = "bench", after_help = super::help_text::BENCH)]
pub struct BenchArgs {
    /// A checkpoint file, or a directory with one
    #[arg(value_hint = clap::ValueHint::AnyPath)]
    pub path: OsString,
    /// Where the tensors go, such as cuda:0
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Libraries to compare with [default: all that are installed]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    #[arg(value_parser = ["safetensors", "fastsafetensors", "runai", "instanttensor", "torch"])]
    pub against: Option<Vec<String>>,
    /// Loads of each kind, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub runs: u16,
    /// Drop all caches of the machine; needs root
    #[arg(long)]
    pub cold: bool,
    /// Print JSON, with the numbers of every load
    #[arg(long)]
    pub json: bool,
    /// Write a page with tables and charts too
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub html: Option<OsString>,
}

/// Let a Python environment read files of mounts from their sources
#[cfg(feature = "mount")]
#[derive(Debug, clap::Parser)]
#[command(name = "enable", after_help = super::help_text::ENABLE)]
pub struct EnableArgs {
    /// Interpreter or environment to enable [default: that of this command]
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    pub python: Option<OsString>,
    /// Enable it for this user only
    #[arg(long)]
    pub user: bool,
}

/// Undo what `ckptfs enable` did
#[cfg(feature = "mount")]
#[derive(Debug, clap::Parser)]
#[command(name = "disable", after_help = super::help_text::DISABLE)]
pub struct DisableArgs {
    /// Interpreter or environment to disable [default: that of this command]
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    pub python: Option<OsString>,
}

/// The table of commands, with those of the Python package if it runs this process.
pub fn command_table() -> clap::Command {
    let table = CommandLine::command().term_width(help_width());
    #[cfg(feature = "mount")]
    if crate::mount::lifecycle::respawn::has_runner() {
        return table.subcommands(python_command_table());
    }
    table
}

/// The commands of the Python package.
#[cfg(feature = "mount")]
pub fn python_command_table() -> [clap::Command; PYTHON_COMMANDS.len()] {
    [RunArgs::command(), BenchArgs::command(), EnableArgs::command(), DisableArgs::command()]
}

/// The command of the Python package that the words ask for, or for its help. Of all options, only `-q` may precede it.
fn named_command(words: &[OsString]) -> Option<&'static str> {
    let is_before = |word: &&OsString| ["help", "-q", "--quiet"].iter().any(|one| *word == one);
    let command = words.iter().skip(1).find(|word| !is_before(word))?;
    PYTHON_COMMANDS.into_iter().find(|name| command == name)
}

/// A command of the Python package, parsed.
#[cfg(feature = "python")]
#[derive(Debug)]
pub enum PythonCommand {
    Run(RunArgs),
    Bench(BenchArgs),
    Enable(EnableArgs),
    Disable(DisableArgs),
}

/// Parses a command line of the Python package's own commands, and whether it asks for quiet. `None` is any other
/// command line; `Err` has the exit code where help or an error was printed.
#[cfg(feature = "python")]
pub fn parse_python_command(words: &[OsString]) -> Option<Result<(PythonCommand, bool), u8>> {
    let name = named_command(words)?;
    let table = CommandLine::command().term_width(help_width());
    let mut table = table.subcommands(python_command_table());
    let parsed = table.try_get_matches_from_mut(words).and_then(|matches| {
        let options = matches.subcommand_matches(name).unwrap_or(&matches);
        let command = match name {
            "run" => PythonCommand::Run(RunArgs::from_arg_matches(options)?),
            "enable" => PythonCommand::Enable(EnableArgs::from_arg_matches(options)?),
            "disable" => PythonCommand::Disable(DisableArgs::from_arg_matches(options)?),
            _ => PythonCommand::Bench(BenchArgs::from_arg_matches(options)?),
        };
        Ok((command, matches.get_flag("quiet")))
    });
    Some(parsed.map_err(|error| usage_error::report(&error, words, &table)))
}

/// The error of a command line that asks for one of them, or for its help, without the Python package.
pub fn refuse_python_command(words: &[OsString]) -> Option<CommandError> {
    #[cfg(feature = "mount")]
    if crate::mount::lifecycle::respawn::has_runner() {
        return None;
    }
    let name = named_command(words)?;
    let message = format!("{name}: only the Python package has this command");
    let remedy = format!(
        "in the repository of ckptfs: scripts/dist && pip install dist/ckptfs-{}-*.whl, then ckptfs {name}",
        env!("CARGO_PKG_VERSION")
    );
    Some(CommandError::new(EXIT_USAGE, message, remedy))
}
