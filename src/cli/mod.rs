//! The command line: arguments in, text and exit codes out.
//!
//! Each command is a module of `commands`; `args` declares all commands and options. The work itself is done in the
//! rooms that the commands call.

mod args;
mod commands;
#[cfg(all(test, feature = "mount", feature = "remote"))]
mod documented_options_tests;
mod each_path;
mod error;
mod help_text;
mod open_reader;
#[cfg(feature = "mount")]
mod option_values;
mod output;
mod progress;
pub(crate) mod python_commands;
#[cfg(feature = "mount")]
pub(crate) mod python_environment;
mod store_args;
mod stuck_path_check;
mod terminal_text;
pub(crate) mod usage_error;
mod view_args;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::source::raise_file_limit;

use args::Command;
#[cfg(feature = "remote")]
use commands::{cache, fetch};
use commands::{completions, export, inspect, ls, verify, views};
#[cfg(feature = "mount")]
use commands::{doctor, mount, status, unmount};
use error::{CommandError, EXIT_OK, ErrorFormat};
use output::BrokenPipeFilter;

/// Runs the command line of this process, which is the program `ckptfs`.
pub fn main() -> ExitCode {
    ExitCode::from(run(std::env::args_os().collect()))
}

/// Runs a command line, which starts with the command's name, and returns its exit code.
///
/// To be called once in a process, before anything else in it. A program other than `ckptfs` must have called
/// [`respawn::set_runner`](crate::mount::lifecycle::respawn::set_runner) before.
pub fn run(words: Vec<OsString>) -> u8 {
    if let Some(error) = python_commands::refuse_python_command(&words) {
        error.print(ErrorFormat::from_words(&words));
        return error.code;
    }
    #[cfg(feature = "mount")]
    let (args, launch) = match mount::parse_launch(words) {
        Ok(parsed) => parsed,
        Err(code) => return code,
    };
    #[cfg(not(feature = "mount"))]
    let mut table = python_commands::command_table();
    #[cfg(not(feature = "mount"))]
    let args = match table
        .try_get_matches_from_mut(&words)
        .and_then(|matches| <args::CommandLine as clap::FromArgMatches>::from_arg_matches(&matches))
    {
        Ok(args) => args,
        Err(error) => return usage_error::report(&error, &words, &table),
    };
    if args.quiet {
        output::set_quiet();
    }
    if let Some(args) = args.command.store_args() {
        args.apply();
    }
    // A set of a thousand shards needs a thousand files. If this fails, too many open files are an error of their own.
    raise_file_limit();
    let mut out = io::BufWriter::new(BrokenPipeFilter(io::stdout().lock()));
    // The process that started a daemon has checked its paths.
    #[cfg(feature = "mount")]
    let is_checked = launch.is_daemon();
    #[cfg(not(feature = "mount"))]
    let is_checked = false;
    let reachable = if is_checked { Ok(()) } else { stuck_path_check::check_paths(&args.command) };
    let result = match (&args.command, reachable) {
        // The report on the machine is needed most where a mount is stuck.
        #[cfg(feature = "mount")]
        (Command::Doctor(args), reachable) => doctor::run(args, reachable, &mut out),
        (_, Err(error)) => Err(error),
        (Command::Ls(args), Ok(())) => ls::run(args, &mut out),
        (Command::Inspect(args), Ok(())) => inspect::run(args, &mut out),
        (Command::Export(args), Ok(())) => export::run(args, &mut out),
        (Command::Verify(args), Ok(())) => verify::run(args, &mut out),
        (Command::Views(args), Ok(())) => views::run(args, &mut out),
        #[cfg(feature = "remote")]
        (Command::Fetch(args), Ok(())) => fetch::run(args, &mut out),
        #[cfg(feature = "remote")]
        (Command::Cache(args), Ok(())) => cache::run(args, &mut out),
        #[cfg(feature = "mount")]
        (Command::Mount(args), Ok(())) => mount::run(args, launch),
        #[cfg(feature = "mount")]
        (Command::Unmount(args), Ok(())) => unmount::run(args, &mut out),
        #[cfg(feature = "mount")]
        (Command::Status(args), Ok(())) => status::run(args, &mut out),
        (Command::Completions(args), Ok(())) => completions::write_completions(args, &mut out),
        (Command::Man(args), Ok(())) => completions::write_man_pages(args, &mut out),
    };
    let flushed = out.flush().map_err(CommandError::from);
    match result.and(flushed) {
        Ok(()) => EXIT_OK,
        Err(error) => {
            error.print(args.command.error_format());
            error.code
        }
    }
}
