//! Starts the log of a mount: its target and its level, from the options, the system and `RUST_LOG`.

mod state_file;
mod system_log;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::OFlags;
use rustix::io::Errno;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::SubscriberBuilder;
use tracing_subscriber::util::SubscriberInitExt;

use crate::mount::lifecycle::stuck_paths;
use crate::mount::stats::LogStats;
use crate::mount_info::mountinfo::PathHandle;
use crate::private_folder::xdg_folder;

use crate::cli::args::MountArgs;
use crate::cli::error::{CommandError, EXIT_FAILED, EXIT_USAGE};
use crate::cli::terminal_text::one_line;

use state_file::StateFile;
pub use system_log::{IDENTIFIER, MOUNTPOINT_FIELD};
use system_log::{LogProtocol, SystemLog};

/// A subscriber that drops lines which it cannot write, because the disk is full or the reader has gone.
///
/// tracing reports such errors by a panic, which would end the mount.
fn subscriber() -> SubscriberBuilder {
    // Without colors, no control character is ours.
    tracing_subscriber::fmt().log_internal_errors(false).with_ansi(false)
}

/// Writes each record of a log as one line: names in it may have line breaks and other control characters.
struct RecordWriter<W>(W);

impl<W: Write> Write for RecordWriter<W> {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(record);
        self.0.write_all(format!("{}\n", one_line(text.trim_end())).as_bytes())?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A log that was started.
pub struct MountLog {
    /// The log file, if there is one.
    pub file: Option<File>,
    /// A note for the user.
    pub note: Option<String>,
    /// Where the lines go, for the statistics.
    pub stats: LogStats,
}

/// Starts the log in the file of the options. Without one, a mount in the foreground logs to standard error. A daemon
/// logs to the journal or the syslog, or else to a file of this user's.
pub fn start(args: &MountArgs, in_foreground: bool) -> Result<MountLog, CommandError> {
    let file = match &args.log_file {
        None => None,
        Some(path) => {
            require_outside_mountpoint(path, &args.mountpoint)?;
            Some(open_log(path)?)
        }
    };
    let (filter, note) = log_filter(args.verbose);
    let target = |target: &str, path: Option<PathBuf>| LogStats { target: target.to_owned(), path };
    let (started, stats) = match &file {
        Some(file) => {
            let file = file.try_clone().map_err(|error| {
                let message = format!("cannot log to a file: {error}");
                CommandError::new(EXIT_FAILED, message, "raise the limit on open files (ulimit -n)")
            })?;
            let to_file = subscriber().with_writer(Mutex::new(RecordWriter(file)));
            let path = args.log_file.as_ref().and_then(|path| std::path::absolute(path).ok());
            (to_file.with_env_filter(filter).finish().try_init(), target("file", path))
        }
        None if in_foreground => {
            let to_stderr = subscriber().with_writer(|| RecordWriter(io::stderr()));
            (to_stderr.with_env_filter(filter).finish().try_init(), target("stderr", None))
        }
        None => {
            // Standard error leads nowhere once the mount is ready.
            log_panics();
            // As `status` names it. Where it is missing, there will be no mount.
            let mountpoint = PathHandle::open(&args.mountpoint);
            let mountpoint = mountpoint.map_or(args.mountpoint.clone(), |at| at.path().to_owned());
            if let Some(log) = SystemLog::find(&mountpoint) {
                let name = match log.protocol() {
                    LogProtocol::Journal => "journal",
                    LogProtocol::Syslog => "syslog",
                };
                // The log adds the time, and stores the level.
                let lines = subscriber().without_time().with_level(false);
                let lines = lines.with_target(false).with_writer(log).with_env_filter(filter);
                (lines.finish().try_init(), target(name, None))
            } else if let Some(log) = create_state_file(&mountpoint) {
                let path = Some(log.path().to_path_buf());
                let lines = subscriber().with_writer(Mutex::new(RecordWriter(log)));
                (lines.with_env_filter(filter).finish().try_init(), target("file", path))
            } else {
                (Ok(()), target("none", None))
            }
        }
    };
    // This is the only place that starts a log.
    debug_assert!(started.is_ok());
    Ok(MountLog { file, note, stats })
}

/// The log file of this user for a mount; `None` if it cannot be created, or the mount would hide it.
fn create_state_file(mountpoint: &Path) -> Option<StateFile> {
    let folder = xdg_folder("XDG_STATE_HOME", ".local/state")?.join("ckptfs");
    stuck_paths::check_path(&folder).ok()?;
    // Before anything is created: the mountpoint must stay empty.
    let existing = folder.ancestors().find(|path| path.exists())?;
    if is_inside(existing, mountpoint) {
        return None;
    }
    StateFile::create(&folder, mountpoint).ok()
}

/// Logs every panic, too.
fn log_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        tracing::error!("{panic}");
    }));
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
    if !is_inside(folder, mountpoint) {
        return Ok(());
    }
    let (log, mountpoint) = (log.display(), mountpoint.display());
    let message = format!("{log}: lies inside {mountpoint}, which is to be mounted over");
    Err(CommandError::new(EXIT_USAGE, message, "name a --log-file outside of the mountpoint"))
}

/// Whether a folder is a directory or lies in it. A path that is missing is reported where it is opened.
fn is_inside(folder: &Path, directory: &Path) -> bool {
    match (PathHandle::open(folder), PathHandle::open(directory)) {
        (Ok(folder), Ok(directory)) => folder.path().starts_with(directory.path()),
        _ => false,
    }
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
