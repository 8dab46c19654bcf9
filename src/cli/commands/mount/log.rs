//! Starts the log of a mount: its target and its level, from the options and `RUST_LOG`.

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
use crate::cli::error::{CommandError, EXIT_FAILED, EXIT_USAGE};

/// A subscriber that drops lines which it cannot write, because the disk is full or the reader has gone.
///
/// tracing reports such errors by a panic, which would end the mount.
fn subscriber() -> SubscriberBuilder {
    tracing_subscriber::fmt().log_internal_errors(false)
}

/// A log that was started.
pub struct MountLog {
    /// The log file, if there is one.
    pub file: Option<File>,
    /// A note for the user.
    pub note: Option<String>,
}

/// Starts the log: in the file of the options, else in the foreground to standard error, else nowhere.
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
    // This is the only place that starts a log.
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
        let is_pipe = fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo());
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

/// Refuses a log inside the mountpoint: the mount would hide it, and it makes the mountpoint not empty.
fn require_outside_mountpoint(log: &Path, mountpoint: &Path) -> Result<(), CommandError> {
    let folder = match log.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // A path that is missing is reported where it is opened.
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

/// The filter of `RUST_LOG`, or of the options; with a note if `RUST_LOG` cannot be parsed.
fn log_filter(verbose: u8) -> (EnvFilter, Option<String>) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    // A reply to a reader that was interrupted meanwhile is no error.
    let level = if verbose < 2 { format!("{level},fuser::reply=off") } else { level.to_owned() };
    let Some(value) = std::env::var_os(EnvFilter::DEFAULT_ENV) else {
        return (EnvFilter::new(level), None);
    };
    let parsed = value.to_str().ok_or_else(|| "is not UTF-8".to_owned());
    match parsed.and_then(|text| EnvFilter::try_new(text).map_err(|error| error.to_string())) {
        Ok(filter) => (filter, None),
        Err(error) => {
            let name = EnvFilter::DEFAULT_ENV;
            let value = value.display();
            let note =
                format!("{name}={value} is ignored: {error}; use warn, info, debug or trace");
            (EnvFilter::new(level), Some(note))
        }
    }
}
