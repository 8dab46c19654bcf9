//! The descriptors that a mount needs, seen to be free before it begins anything: one that runs out of them
//! halfway can leave a dead mount behind, and tokio panics.

use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::Error;

/// A mount has 12 of its own, and needs a few for each file that is looked at.
const LEAST: usize = 32;

/// Refuses a mount for which this process may not open enough files.
pub fn require(mountpoint: &Path) -> Result<(), Error> {
    match taken() {
        Ok(()) => Ok(()),
        Err(Errno::MFILE) => {
            Err(Error::TooFewFiles { path: mountpoint.to_path_buf(), needs: LEAST })
        }
        Err(error) => Err(Error::io(mountpoint, "open enough files to mount there", error)),
    }
}

/// Takes as many as are needed, and gives them back.
fn taken() -> Result<(), Errno> {
    let first = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let others: Result<Vec<_>, _> = (1..LEAST).map(|_| fcntl_dupfd_cloexec(&first, 0)).collect();
    others.map(drop)
}
