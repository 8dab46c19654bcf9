//! Where the log of a mount goes, and how much of it.
//!
//! In: the options, and `RUST_LOG`. Out: a log that was started, or why it cannot be.

use std::fs::{self, File};
use std::io::{self, IsTerminal};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::OFlags;
use rustix::io::Errno;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::SubscriberBuilder;
use tracing_subscriber::util::SubscriberInitExt;

use crate::mount_info::mountinfo::PathHandle;

use crate::cli::args::MountArgs;
use crate::cli::{CommandError, EXIT_FAILED, EXIT_USAGE};

/// A log that cannot be written, because its disk is full or its reader has gone, is lost and nothing
/// else: telling that would end the mount, as it is told by a panic.
fn subscriber() -> SubscriberBuilder {
    tracing_subscriber::fmt().log_internal_errors(false)
}

/// A log that was started.
pub struct MountLog {
    /// The file that it goes to, if it goes to one.
    pub file: Option<File>,
    /// What the user should know of it.
    pub note: Option<String>,
}

/// Starts logging: to the file if one was named, else to standard error in the foreground, else
/// nowhere.
pub fn start(args: &MountArgs, in_foreground: bool) -> Result<MountLog, CommandError> {
    let file = match &args.log_file {
        None => None,
        Some(path) => {
            require_outside_mountpoint(path, &args.mountpoint)?;
            Some(open_log(path)?)
        }
    };
    let (filter, note) = log_filter(args.verbose);
    let started = match &file {
        Some(file) => {
            let file = file.try_clone().map_err(|error| {
                let message = format!("cannot log to a file: {error}");
                CommandError::new(EXIT_FAILED, message, "raise the limit on open files (ulimit -n)")
            })?;
            let to_file = subscriber().with_ansi(false).with_writer(Mutex::new(file));
            to_file.with_env_filter(filter).finish().try_init()
        }
        None if in_foreground => {
            let is_terminal = io::stderr().is_terminal();
            let to_stderr = subscriber().with_ansi(is_terminal).with_writer(io::stderr);
            to_stderr.with_env_filter(filter).finish().try_init()
        }
        None => Ok(()),
    };
    // Only once in a process, and this is the place.
    debug_assert!(started.is_ok());
    Ok(MountLog { file, note })
}

/// Opens the log so that neither opening it nor writing to it blocks. A pipe may have no reader, or one that
/// stalls, and a terminal may be stopped. Lines that they have no room for are lost.
fn open_log(path: &Path) -> Result<File, CommandError> {
    // The daemon has no controlling terminal, and the log must not become one.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = File::options();
    options.append(true).create(true).custom_flags(flags.bits().cast_signed());
    options.open(path).map_err(|error| {
        let is_pipe = fs::metadata(path).is_ok_and(|about| about.file_type().is_fifo());
        let is_unread = is_pipe && Errno::from_io_error(&error) == Some(Errno::NXIO);
        let (why, remedy) = match is_unread {
            true => (
                "no program reads this pipe".to_owned(),
                "start its reader first, or give a regular file: --log-file FILE",
            ),
            false => (error.to_string(), "name a file that can be written to"),
        };
        let message = format!("{}: cannot log to it: {why}", path.display());
        CommandError::new(EXIT_FAILED, message, remedy)
    })
}

/// The mount would lie over it, and a mountpoint with a log in it is not empty.
fn require_outside_mountpoint(log: &Path, mountpoint: &Path) -> Result<(), CommandError> {
    let folder = match log.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // What is not there is for those to say who want it.
    let (Ok(folder), Ok(hidden)) = (PathHandle::open(folder), PathHandle::open(mountpoint)) else {
        return Ok(());
    };
    if !folder.path().starts_with(hidden.path()) {
        return Ok(());
    }
    let (log, mountpoint) = (log.display(), mountpoint.display());
    let message = format!("{log}: lies inside {mountpoint}, which is to be mounted over");
    Err(CommandError::new(EXIT_USAGE, message, "name a --log-file outside of the mountpoint"))
}

/// What is logged, as `RUST_LOG` says or else the options; and that `RUST_LOG` says nothing that can be
/// understood.
fn log_filter(verbose: u8) -> (EnvFilter, Option<String>) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    // An answer that nobody waits for any more, because the reader was interrupted, is no error.
    let level = if verbose < 2 { format!("{level},fuser::reply=off") } else { level.to_owned() };
    let Some(said) = std::env::var_os(EnvFilter::DEFAULT_ENV) else {
        return (EnvFilter::new(level), None);
    };
    let parsed = said.to_str().ok_or_else(|| "is not UTF-8".to_owned());
    match parsed.and_then(|text| EnvFilter::try_new(text).map_err(|error| error.to_string())) {
        Ok(filter) => (filter, None),
        Err(error) => {
            let name = EnvFilter::DEFAULT_ENV;
            let said = said.display();
            let note = format!("{name}={said} is ignored: {error}; say warn, info, debug or trace");
            (EnvFilter::new(level), Some(note))
        }
    }
}
