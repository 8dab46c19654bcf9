//! Checks the paths of a command before it touches them: a path in a stuck mount would hang.

use std::path::Path;

use super::args::Command;
use super::error::CommandError;

/// Reports a stuck mount on the way to a path that the command uses from its start. Commands check the paths that they
/// take one after the other themselves.
pub fn check_paths(command: &Command) -> Result<(), CommandError> {
    paths_of(command).into_iter().try_for_each(check_path)
}

/// Reports a stuck mount on the way to a path, or at it.
pub fn check_path(path: &Path) -> Result<(), CommandError> {
    #[cfg(feature = "mount")]
    crate::mount::lifecycle::stuck_paths::check_path(path)?;
    #[cfg(not(feature = "mount"))]
    let _ = path;
    Ok(())
}

fn paths_of(command: &Command) -> Vec<&Path> {
    match command {
        Command::Ls(_) | Command::Inspect(_) | Command::Completions(_) => Vec::new(),
        Command::Export(args) => vec![&args.path, &args.out],
        Command::Verify(args) => args.against.as_deref().into_iter().collect(),
        Command::Views(args) => args.source.as_deref().into_iter().collect(),
        Command::Man(args) => args.dir.as_deref().into_iter().collect(),
        // URLs.
        #[cfg(feature = "remote")]
        Command::Fetch(_) | Command::Cache(_) => Vec::new(),
        #[cfg(feature = "mount")]
        Command::Mount(args) => {
            let log = args.log_file.as_deref();
            [&*args.source, &*args.mountpoint].into_iter().chain(log).collect()
        }
        #[cfg(feature = "mount")]
        Command::Doctor(args) => args.path.as_deref().into_iter().collect(),
        #[cfg(feature = "mount")]
        Command::Unmount(_) | Command::Status(_) => Vec::new(),
    }
}
