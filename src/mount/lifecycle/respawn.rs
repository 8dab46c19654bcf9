//! Starts this command again: as the daemon of a mount, or as a child process that probes a mount.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// A program that runs this command, and its arguments before those of the command.
type Runner = (PathBuf, Vec<OsString>);

static RUNNER: OnceLock<Runner> = OnceLock::new();

/// Sets the program that runs this command, with its arguments before those of the command.
///
/// An interpreter is such a program: `/proc/self/exe` alone would not run the command.
pub fn set_runner(program: PathBuf, leading_args: Vec<OsString>) {
    // Only the first call counts: a process is one command.
    let _ = RUNNER.set((program, leading_args));
}

/// Whether a program other than `ckptfs` runs this command.
pub fn has_runner() -> bool {
    RUNNER.get().is_some()
}

/// This command again, by that name unless another program runs it.
pub fn command(name: &OsStr) -> Command {
    match RUNNER.get() {
        Some((program, leading_args)) => {
            let mut command = Command::new(program);
            command.args(leading_args);
            command
        }
        None => {
            let mut command = Command::new("/proc/self/exe");
            command.arg0(name);
            command
        }
    }
}
