//! Every path that a command was given, looked at before the command does anything: whoever touches a
//! path in a mount whose daemon is stuck waits as long as that is.
//!
//! In: a command. Out: nothing, or the mount on the way to one of its paths that does not answer.

use std::path::Path;

use crate::mount::lifecycle::stuck_paths;

use super::CommandError;
use super::args::Command;

/// A path, and how far it must be possible to go there.
enum CheckedPath<'a> {
    /// To what is there.
    Target(&'a Path),
    /// To where it lies: what is mounted there is to go, stuck or not.
    Parents(&'a Path),
}

/// Tells of a stuck mount on the way to a path of the command.
pub fn check_paths(command: &Command) -> Result<(), CommandError> {
    for given in paths_of(command) {
        match given {
            CheckedPath::Target(path) => stuck_paths::check_path(path)?,
            CheckedPath::Parents(path) => stuck_paths::check_parents(path)?,
        }
    }
    Ok(())
}

fn paths_of(command: &Command) -> Vec<CheckedPath<'_>> {
    use CheckedPath::{Parents, Target};
    match command {
        Command::Ls(args) => vec![Target(&args.path)],
        Command::Inspect(args) => vec![Target(&args.source.path)],
        Command::Export(args) => vec![Target(&args.source.path), Target(&args.out)],
        Command::Verify(args) => {
            let against = args.against.iter().map(|path| Target(path));
            std::iter::once(Target(&args.source.path)).chain(against).collect()
        }
        Command::Mount(args) => {
            let log = args.log_file.iter().map(|path| Target(path));
            [Target(&args.source), Target(&args.mountpoint)].into_iter().chain(log).collect()
        }
        Command::Unmount(args) => vec![Parents(&args.path)],
        Command::Doctor(args) => args.path.iter().map(|path| Target(path)).collect(),
        Command::Man(args) => args.dir.iter().map(|path| Target(path)).collect(),
        Command::Status(_) | Command::Completions(_) => Vec::new(),
    }
}
