//! Checks that a mount can have the file descriptors that it needs, before it begins anything. A mount that runs
//! out of them halfway can leave a dead mount behind, and tokio panics.

use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::mount::error::MountError;

/// Descriptors that must be free: a mount has 12 of its own, and needs a few for each file that it inspects.
const MIN_FREE_DESCRIPTORS: usize = 32;

/// Refuses a mount for which this process may not open enough files.
pub fn require_free(mountpoint: &Path) -> Result<(), MountError> {
    match open_and_close() {
        Ok(()) => Ok(()),
        Err(Errno::MFILE) => Err(MountError::TooFewFiles {
            path: mountpoint.to_path_buf(),
            needed: MIN_FREE_DESCRIPTORS,
        }),
        Err(error) => Err(MountError::io(mountpoint, "open enough files to mount there", error)),
    }
}

/// Opens as many descriptors as are needed, and closes them again.
fn open_and_close() -> Result<(), Errno> {
    let first = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let others: Result<Vec<_>, _> =
        (1..MIN_FREE_DESCRIPTORS).map(|_| fcntl_dupfd_cloexec(&first, 0)).collect();
    others.map(drop)
}
