//! Starting this very command again: as the daemon of a mount, or to ask a mount for this process.
//!
//! In: how this process came to be the command, if it is not the program `ckptfs` itself. Out: a
//! [`Command`] that runs it anew, to be given its arguments.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// A program that runs this command, and the arguments that it wants before those of the command.
type Runner = (PathBuf, Vec<OsString>);

static RUNNER: OnceLock<Runner> = OnceLock::new();

/// From now on this command is started again by that program with these arguments before its own: an
/// interpreter, of which `/proc/self/exe` would be only the half.
pub fn set_runner(program: PathBuf, before: Vec<OsString>) {
    // A process is one command, and was started in one way.
    let _ = RUNNER.set((program, before));
}

/// Whether it is not the program `ckptfs` that runs this command.
pub fn has_runner() -> bool {
    RUNNER.get().is_some()
}

/// This very command, under that name where it has a name of its own.
pub fn command(name: &OsStr) -> Command {
    match RUNNER.get() {
        Some((program, before)) => {
            let mut command = Command::new(program);
            command.args(before);
            command
        }
        None => {
            let mut command = Command::new("/proc/self/exe");
            command.arg0(name);
            command
        }
    }
}
