//! The commands, in words for people: arguments in, text and exit codes out. Whatever is decided
//! here is about words; the work is done in the rooms.

mod args;
mod export;
mod inspect;
mod meter;
mod open;
mod pages;
mod report;
mod verify;
mod words;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};

/// Why a command did not do what it was asked: the exit code, and what to tell.
struct Failure {
    code: u8,
    /// Nothing where the command has told it itself.
    message: String,
    remedy: String,
}

const FAILED: u8 = 1;
const USAGE: u8 = 2;
const REFUSED: u8 = 3;

impl Failure {
    fn new(code: u8, message: impl ToString, remedy: impl ToString) -> Self {
        Failure { code, message: message.to_string(), remedy: remedy.to_string() }
    }

    /// A failure that the output has told already.
    fn told(code: u8) -> Self {
        Failure::new(code, "", "")
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // Whoever reads the output has enough of it (`| head`).
            io::ErrorKind::BrokenPipe => Failure::told(0),
            _ => Failure::new(
                FAILED,
                format!("cannot write the output: {error}"),
                "see the system's message above",
            ),
        }
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let mut out = io::BufWriter::new(io::stdout().lock());
    let done = match &args.command {
        Command::Inspect(args) => inspect::run(args, &mut out),
        Command::Export(args) => export::run(args, &mut out),
        Command::Verify(args) => verify::run(args, &mut out),
        Command::Completions(args) => pages::completions(args, &mut out),
        Command::Man(args) => pages::man(args, &mut out),
    };
    let flushed = out.flush().map_err(Failure::from);
    match done.and(flushed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // The last words: there is nobody left to tell that they cannot be said.
            if !failure.message.is_empty() {
                let _ = writeln!(io::stderr(), "ckptfs: {}", words::plain(&failure.message));
            }
            if !failure.remedy.is_empty() {
                let _ = writeln!(io::stderr(), "  what to do: {}", words::plain(&failure.remedy));
            }
            ExitCode::from(failure.code)
        }
    }
}
