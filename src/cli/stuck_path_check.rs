//! Every path that a command was given, looked at before the command does anything: whoever touches a
//! path in a mount whose daemon is stuck waits as long as that is.
//!
//! In: a command. Out: nothing, or the mount on the way to one of its paths that does not answer.

use std::path::Path;

use crate::mount::stuck_paths;

use super::Failure;
use super::args::Command;

/// A path, and how far it must be possible to go there.
enum Given<'a> {
    /// To what is there.
    Whole(&'a Path),
    /// To where it lies: what is mounted there is to go, stuck or not.
    Way(&'a Path),
}

/// Tells of a stuck mount on the way to a path of the command.
pub fn reachable(command: &Command) -> Result<(), Failure> {
    for given in given(command) {
        match given {
            Given::Whole(path) => stuck_paths::check(path)?,
            Given::Way(path) => stuck_paths::check_way(path)?,
        }
    }
    Ok(())
}

fn given(command: &Command) -> Vec<Given<'_>> {
    use Given::{Way, Whole};
    match command {
        Command::Ls(args) => vec![Whole(&args.path)],
        Command::Inspect(args) => vec![Whole(&args.source.path)],
        Command::Export(args) => vec![Whole(&args.source.path), Whole(&args.out)],
        Command::Verify(args) => {
            let against = args.against.iter().map(|path| Whole(path));
            std::iter::once(Whole(&args.source.path)).chain(against).collect()
        }
        Command::Mount(args) => {
            let log = args.log_file.iter().map(|path| Whole(path));
            [Whole(&args.source), Whole(&args.mountpoint)].into_iter().chain(log).collect()
        }
        Command::Unmount(args) => vec![Way(&args.path)],
        Command::Doctor(args) => args.path.iter().map(|path| Whole(path)).collect(),
        Command::Man(args) => args.dir.iter().map(|path| Whole(path)).collect(),
        Command::Status(_) | Command::Completions(_) => Vec::new(),
    }
}
