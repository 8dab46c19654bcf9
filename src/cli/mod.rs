//! The commands, in words for people: arguments in, text and exit codes out. Whatever is decided
//! here is about words; the work is done in the rooms.

mod args;
mod commands;
mod open_args;
mod progress;
mod python_commands;
#[cfg(feature = "mount")]
pub(crate) mod sizes;
#[cfg(feature = "mount")]
mod stuck_path_check;
mod terminal_text;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use rustix::process::{Resource, getrlimit, setrlimit};

use args::Command;
use commands::{completions, export, inspect, ls, verify};
#[cfg(feature = "mount")]
use commands::{doctor, mount, status, unmount};

/// Why a command did not do what it was asked: the exit code, and what to tell.
#[derive(Debug)]
#[cfg_attr(feature = "mount", derive(serde::Serialize, serde::Deserialize))]
struct CommandError {
    code: u8,
    /// Nothing where the command has told it itself.
    message: String,
    remedy: String,
}

const EXIT_OK: u8 = 0;
const EXIT_FAILED: u8 = 1;
const EXIT_USAGE: u8 = 2;
const EXIT_REFUSED: u8 = 3;

impl CommandError {
    fn new(code: u8, message: impl ToString, remedy: impl ToString) -> Self {
        CommandError { code, message: message.to_string(), remedy: remedy.to_string() }
    }

    /// A failure that the output has told already.
    fn already_reported(code: u8) -> Self {
        CommandError::new(code, "", "")
    }

    /// The last words: there is nobody left to tell that they cannot be said.
    fn print(&self) {
        if !self.message.is_empty() {
            let _ =
                writeln!(io::stderr(), "ckptfs: {}", terminal_text::escape_controls(&self.message));
        }
        if !self.remedy.is_empty() {
            let _ = writeln!(
                io::stderr(),
                "  what to do: {}",
                terminal_text::escape_controls(&self.remedy)
            );
        }
    }
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> Self {
        let message = format!("cannot write the output: {error}");
        let remedy = "let standard output lead to where there is room, and where you may write";
        CommandError::new(EXIT_FAILED, message, remedy)
    }
}

/// Says something beside the output. A standard error that is closed or full keeps nothing from being
/// done, and changes no verdict.
fn print_note(text: &str) {
    let _ = writeln!(io::stderr(), "ckptfs: note: {}", terminal_text::one_line(text));
}

/// An output whose reader may have enough of it (`| head`): the command goes on to its verdict.
struct BrokenPipeFilter<W>(W);

impl<W: Write> BrokenPipeFilter<W> {
    fn unless_closed<T>(done: io::Result<T>, instead: T) -> io::Result<T> {
        match done {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(instead),
            done => done,
        }
    }
}

impl<W: Write> Write for BrokenPipeFilter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Self::unless_closed(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Self::unless_closed(self.0.flush(), ())
    }
}

/// A set of a thousand shards is a thousand open files; what the system lets us have is had for asking.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Refused, the soft limit stays, and too many files are an error of their own.
    let _ =
        setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit });
}

/// Runs the command line of this process, which is the program `ckptfs`.
pub fn main() -> ExitCode {
    ExitCode::from(run(std::env::args_os().collect()))
}

/// Runs a command line, the command's name first, and gives its exit code. To be called once in a
/// process, before anything else in it; where that is not the program `ckptfs`,
/// [`respawn::set_runner`](crate::mount::lifecycle::respawn::set_runner) must have been told what it is.
pub fn run(given: Vec<OsString>) -> u8 {
    if let Some(failure) = python_commands::refuse_python_command(&given) {
        failure.print();
        return failure.code;
    }
    #[cfg(feature = "mount")]
    let (args, started) = match mount::parse_launch(given) {
        Ok(begun) => begun,
        Err(code) => return code,
    };
    #[cfg(not(feature = "mount"))]
    let args = <args::CommandLine as clap::Parser>::parse_from(given);
    raise_descriptor_limit();
    let mut out = io::BufWriter::new(BrokenPipeFilter(io::stdout().lock()));
    // A daemon's paths were looked at by who started it.
    #[cfg(feature = "mount")]
    let reachable =
        if started.is_daemon() { Ok(()) } else { stuck_path_check::check_paths(&args.command) };
    #[cfg(not(feature = "mount"))]
    let reachable = Ok(());
    let done = match (&args.command, reachable) {
        // What the machine can do is told all the same, above all where something is stuck.
        #[cfg(feature = "mount")]
        (Command::Doctor(args), reachable) => doctor::run(args, reachable, &mut out),
        (_, Err(failure)) => Err(failure),
        (Command::Ls(args), Ok(())) => ls::run(args, &mut out),
        (Command::Inspect(args), Ok(())) => inspect::run(args, &mut out),
        (Command::Export(args), Ok(())) => export::run(args, &mut out),
        (Command::Verify(args), Ok(())) => verify::run(args, &mut out),
        #[cfg(feature = "mount")]
        (Command::Mount(args), Ok(())) => mount::run(args, started),
        #[cfg(feature = "mount")]
        (Command::Unmount(args), Ok(())) => unmount::run(args, &mut out),
        #[cfg(feature = "mount")]
        (Command::Status(args), Ok(())) => status::run(args, &mut out),
        (Command::Completions(args), Ok(())) => completions::write_completions(args, &mut out),
        (Command::Man(args), Ok(())) => completions::write_man_pages(args, &mut out),
    };
    let flushed = out.flush().map_err(CommandError::from);
    match done.and(flushed) {
        Ok(()) => EXIT_OK,
        Err(failure) => {
            failure.print();
            failure.code
        }
    }
}
