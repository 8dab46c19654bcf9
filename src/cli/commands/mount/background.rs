//! Starting the daemon: the command runs itself again without a terminal, and waits for its word.
//!
//! In: the arguments of the process. Out, in the caller's process: success once the mount answers, or
//! the daemon's failure, to be told on the caller's terminal. Out, in the daemon: a [`Caller`].

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::Stdio;

use serde::{Deserialize, Serialize};

use crate::mount::lifecycle::respawn;

use crate::cli::{CommandError, EXIT_FAILED, print_note};

/// Tells the daemon that it is one: the name of the pipe that is its standard output.
const DAEMON_VARIABLE: &str = "CKPTFS_DAEMON";

/// A report is a few lines; a caller that hears more hears nonsense.
const MAX_REPORT_BYTES: u64 = 64 * 1024;

/// What the daemon tells the process that started it, as JSON.
#[derive(Debug, Serialize, Deserialize)]
enum StartReport {
    /// The mount answers; notes for the user.
    Ready(Vec<String>),
    /// There will be no mount.
    Failed(CommandError),
}

/// The process that started this daemon, and waits.
#[derive(Debug)]
pub struct ParentProcess {
    pipe: OwnedFd,
}

/// Runs this very command again as a daemon, and returns when its mount answers.
pub fn spawn_daemon(args: &[OsString]) -> Result<(), CommandError> {
    let failed = |error: io::Error| {
        let message = format!("cannot start the daemon: {error}");
        let remedy =
            "raise the limits on processes and open files (ulimit -u, -n), or use --foreground";
        CommandError::new(EXIT_FAILED, message, remedy)
    };
    let (mut reader, writer) = io::pipe().map_err(failed)?;
    // The same words, so that ps tells what it is.
    let (name, rest) =
        args.split_first().map_or((OsStr::new("ckptfs"), args), |(name, rest)| (name, rest));
    let mut command = respawn::command(name);
    command.args(rest);
    // Its standard error stays ours until it is ready, for words that nobody planned.
    command.env(DAEMON_VARIABLE, pipe_name(&writer).map_err(failed)?);
    command.stdin(Stdio::null()).stdout(writer);
    let mut child = command.spawn().map_err(failed)?;
    // Our own copy of the pipe's end goes, so that the daemon's end is the end.
    drop(command);
    let mut said = Vec::new();
    reader.by_ref().take(MAX_REPORT_BYTES).read_to_end(&mut said).map_err(failed)?;
    match serde_json::from_slice(&said) {
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

/// The system's name for a pipe, the same in every process that has it.
fn pipe_name(pipe: &impl AsFd) -> io::Result<PathBuf> {
    use std::os::fd::AsRawFd;
    std::fs::read_link(format!("/proc/self/fd/{}", pipe.as_fd().as_raw_fd()))
}

/// Makes this process the daemon that a caller wants, if one does: alone in its session, without
/// descriptors of others, its standard output no longer the pipe. Must come before everything else.
pub fn become_daemon() -> Option<ParentProcess> {
    let expected = std::env::var_os(DAEMON_VARIABLE)?;
    remove_variable(DAEMON_VARIABLE);
    // Set by anyone else, the variable names no pipe of ours.
    if pipe_name(&io::stdout()).ok()?.as_os_str() != expected {
        return None;
    }
    close_inherited_descriptors();
    let pipe = rustix::io::fcntl_dupfd_cloexec(io::stdout(), 3).ok()?;
    let nowhere = std::fs::File::options().write(true).open("/dev/null").ok()?;
    rustix::stdio::dup2_stdout(&nowhere).ok()?;
    // Fails only where it leads its session already.
    let _ = rustix::process::setsid();
    Some(ParentProcess { pipe })
}

/// The programs that the daemon runs are no daemons.
#[allow(unsafe_code)]
fn remove_variable(variable: &str) {
    // SAFETY: the environment may be changed while no other thread reads it; `arrive` comes first
    // in the process, before there are threads.
    unsafe { std::env::remove_var(variable) };
}

/// A descriptor that a shell left open would keep its pipe or file in use as long as the mount lives.
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
        // The listing itself had one, which is closed since.
        if std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok() {
            // SAFETY: nothing of ours has opened a descriptor yet, and an interpreter that runs us keeps
            // none of its own; so nothing owns these.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

impl ParentProcess {
    /// Lets go of the caller's terminal and directory, and tells it that the mount answers. What
    /// is written to standard error from here on goes to the log.
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

    /// Tells it why there will be no mount.
    pub fn report_failure(self, failure: CommandError) -> io::Result<()> {
        self.send(&StartReport::Failed(failure))
    }

    fn send(self, report: &StartReport) -> io::Result<()> {
        let text = serde_json::to_vec(report)?;
        std::fs::File::from(self.pipe).write_all(&text)
    }
}
