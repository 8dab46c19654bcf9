//! Where the log of a mount goes, and how much of it.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::sync::Mutex;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::SubscriberBuilder;
use tracing_subscriber::util::SubscriberInitExt;

use super::super::args::Mount;
use super::super::{FAILED, Failure};

/// A log that cannot be written, because its disk is full or its reader has gone, is lost and nothing
/// else: telling that would end the mount, as it is told by a panic.
fn written() -> SubscriberBuilder {
    tracing_subscriber::fmt().log_internal_errors(false)
}

/// Starts logging: to the file if one was named, else to standard error in the foreground, else
/// nowhere. Gives the file.
pub fn start(args: &Mount, in_foreground: bool) -> Result<Option<File>, Failure> {
    let file = match &args.log_file {
        None => None,
        Some(path) => {
            let opened = File::options().append(true).create(true).open(path);
            Some(opened.map_err(|error| {
                let message = format!("{}: cannot log to it: {error}", path.display());
                Failure::new(FAILED, message, "name a file that can be written to")
            })?)
        }
    };
    let level = match args.verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    // An answer that nobody waits for any more, because the reader was interrupted, is no error.
    let level =
        if args.verbose < 2 { format!("{level},fuser::reply=off") } else { level.to_owned() };
    let filter = || EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(&level));
    let started = match &file {
        Some(file) => {
            let file = file.try_clone().map_err(|error| {
                let message = format!("cannot log to a file: {error}");
                Failure::new(FAILED, message, "raise the limit on open files (ulimit -n)")
            })?;
            let to_file = written().with_ansi(false).with_writer(Mutex::new(file));
            to_file.with_env_filter(filter()).finish().try_init()
        }
        None if in_foreground => {
            let is_terminal = io::stderr().is_terminal();
            let to_stderr = written().with_ansi(is_terminal).with_writer(io::stderr);
            to_stderr.with_env_filter(filter()).finish().try_init()
        }
        None => Ok(()),
    };
    // Only once in a process, and this is the place.
    debug_assert!(started.is_ok());
    Ok(file)
}
