//! Starts the daemon of a mount: the command runs itself again without a terminal, and waits for its report.
//!
//! The parent process ends once the mount answers, or with the daemon's error.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::Stdio;

use serde::{Deserialize, Serialize};

use crate::mount::fuse_device::{is_dev_empty, no_device_remedy};
use crate::mount::lifecycle::respawn;

use crate::cli::error::{CommandError, EXIT_FAILED};
use crate::cli::output::print_note;

/// Tells a process that it is a daemon: the name of the pipe that is its standard output.
const DAEMON_VARIABLE: &str = "CKPTFS_DAEMON";

/// A report is a few lines.
const MAX_REPORT_BYTES: u64 = 64 * 1024;

/// The report of the daemon to its parent process, sent as JSON.
#[derive(Debug, Serialize, Deserialize)]
enum StartReport {
    /// The mount answers; notes for the user.
    Ready(Vec<String>),
    /// There will be no mount.
    Failed(CommandError),
}

/// The process that started this daemon, and waits for its report.
#[derive(Debug)]
pub struct ParentProcess {
    pipe: OwnedFd,
}

/// Runs this command again as a daemon, and returns when its mount answers. `with_stdin` passes standard input on.
pub fn spawn_daemon(args: &[OsString], with_stdin: bool) -> Result<(), CommandError> {
    let failed = |error: io::Error| {
        if is_dev_empty() {
            let message = "cannot start the daemon: /dev has no devices, not even /dev/null";
            return CommandError::new(EXIT_FAILED, message, no_device_remedy());
        }
        let message = format!("cannot start the daemon: {error}");
        let remedy =
            "raise the limits on processes and open files (ulimit -u, -n), or use --foreground";
        CommandError::new(EXIT_FAILED, message, remedy)
    };
    let (mut reader, writer) = io::pipe().map_err(failed)?;
    // The same arguments, which ps then shows.
    let (name, rest) =
        args.split_first().map_or((OsStr::new("ckptfs"), args), |(name, rest)| (name, rest));
    let mut command = respawn::command(name);
    command.args(rest);
    // Until the daemon is ready, its standard error is ours: a panic message reaches the terminal.
    command.env(DAEMON_VARIABLE, pipe_name(&writer).map_err(failed)?);
    command.stdin(if with_stdin { Stdio::inherit() } else { Stdio::null() }).stdout(writer);
    let mut child = command.spawn().map_err(failed)?;
    // Closes our copy of the pipe's write end, so that the daemon's copy is the last.
    drop(command);
    let mut report = Vec::new();
    reader.by_ref().take(MAX_REPORT_BYTES).read_to_end(&mut report).map_err(failed)?;
    match serde_json::from_slice(&report) {
        Ok(StartReport::Ready(notes)) => {
            notes.iter().for_each(|text| print_note(text));
            Ok(())
        }
        Ok(StartReport::Failed(failure)) => Err(failure),
        Err(_) => {
            let status = child.wait().map_err(failed)?;
            let message = format!("the daemon ended before its mount answered ({status})");
            Err(CommandError::new(EXIT_FAILED, message, "use --foreground -v to see what it does"))
        }
    }
}

/// The kernel's name of a pipe, which is the same in every process.
fn pipe_name(pipe: &impl AsFd) -> io::Result<PathBuf> {
    use std::os::fd::AsRawFd;
    std::fs::read_link(format!("/proc/self/fd/{}", pipe.as_fd().as_raw_fd()))
}

/// Makes this process a daemon if a parent process asks for one. Must be called before everything else.
///
/// The daemon has a session of its own and no inherited descriptors. Its standard output leads nowhere.
pub fn become_daemon() -> Option<ParentProcess> {
    let expected = std::env::var_os(DAEMON_VARIABLE)?;
    remove_variable(DAEMON_VARIABLE);
    // Set by any other program, the variable does not name our standard output.
    if pipe_name(&io::stdout()).ok()?.as_os_str() != expected {
        return None;
    }
    close_inherited_descriptors();
    let pipe = rustix::io::fcntl_dupfd_cloexec(io::stdout(), 3).ok()?;
    let nowhere = std::fs::File::options().write(true).open("/dev/null").ok()?;
    rustix::stdio::dup2_stdout(&nowhere).ok()?;
    // Fails only if this process leads its session already.
    let _ = rustix::process::setsid();
    Some(ParentProcess { pipe })
}

/// Has standard input lead nowhere, after the daemon has read what it needs of it.
pub fn close_stdin() {
    if let Ok(nowhere) = std::fs::File::open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&nowhere);
    }
}

/// Removes the variable, so that programs run by the daemon do not become daemons.
#[allow(unsafe_code)]
fn remove_variable(variable: &str) {
    // SAFETY: the environment may be changed while no other thread reads it; `become_daemon` runs first in the
    // process, before there are threads.
    unsafe { std::env::remove_var(variable) };
}

/// Closes inherited descriptors. One that a shell left open would stay in use as long as the mount.
#[allow(unsafe_code)]
fn close_inherited_descriptors() {
    let Ok(listed) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let numbers: Vec<RawFd> = listed
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&number| number > 2)
        .collect();
    for number in numbers {
        // The listing had a descriptor of its own, which is closed by now.
        if std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok() {
            // SAFETY: nothing of ours has opened a descriptor yet, and an interpreter that runs us keeps none of its
            // own, so nothing owns these.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

impl ParentProcess {
    /// Releases the parent's terminal and directory, and reports that the mount answers. From then on standard error
    /// is the log.
    pub fn report_ready(self, notes: Vec<String>, log: Option<&std::fs::File>) -> io::Result<()> {
        std::env::set_current_dir("/")?;
        match log {
            Some(log) => rustix::stdio::dup2_stderr(log)?,
            None => {
                let nowhere = std::fs::File::options().write(true).open("/dev/null")?;
                rustix::stdio::dup2_stderr(&nowhere)?;
            }
        }
        self.send(&StartReport::Ready(notes))
    }

    /// Reports why there will be no mount.
    pub fn report_failure(self, failure: CommandError) -> io::Result<()> {
        self.send(&StartReport::Failed(failure))
    }

    fn send(self, report: &StartReport) -> io::Result<()> {
        let text = serde_json::to_vec(report)?;
        std::fs::File::from(self.pipe).write_all(&text)
    }
}
