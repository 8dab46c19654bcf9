//! Checks the paths of a command before it starts: touching a path in a stuck mount would hang.

use std::path::Path;

use crate::mount::lifecycle::stuck_paths;

use super::args::Command;
use super::error::CommandError;

/// A path of a command, and how far a lookup of it goes.
enum CheckedPath<'a> {
    /// To the file itself.
    Target(&'a Path),
    /// To its directory: a mount at the path itself may be stuck.
    Parents(&'a Path),
}

/// Reports a stuck mount on the way to a path of the command.
pub fn check_paths(command: &Command) -> Result<(), CommandError> {
    for path in paths_of(command) {
        match path {
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
