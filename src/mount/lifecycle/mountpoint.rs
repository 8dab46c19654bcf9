//! Whether a source can be shown at a mountpoint.
//!
//! In: both as the user typed them. Out: both absolute, after a dead mount at the mountpoint was
//! taken away; or why not.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::mount_info::mountinfo::{self, PathHandle};

use super::liveness::Liveness;
use super::stale_mounts;
use crate::mount::error::MountError;
use crate::mount::options::MountOptions;

/// A source and a mountpoint that can be joined.
#[derive(Debug)]
pub(in crate::mount) struct MountPaths {
    pub source: PathBuf,
    pub mountpoint: PathBuf,
}

impl MountPaths {
    /// Whether the mount will lie over a path, as far as that is there.
    pub fn hides(&self, path: &Path) -> bool {
        let there = path.ancestors().find_map(|above| std::fs::canonicalize(above).ok());
        there.is_some_and(|there| there.starts_with(&self.mountpoint))
    }
}

pub(in crate::mount) fn resolve(options: &MountOptions) -> Result<MountPaths, MountError> {
    // Before the source is looked at, which may be this very directory.
    let healed = stale_mounts::heal(&options.mountpoint).map_err(|error| match error {
        MountError::Missing { path } => MountError::NoMountpoint { path },
        error => error,
    })?;
    match healed.remaining {
        None => {}
        Some((entry, Liveness::Silent)) => {
            return Err(MountError::Silent { path: entry.mountpoint });
        }
        Some((entry, _)) => {
            let shown = mountinfo::to_display(&entry.source);
            return Err(MountError::AlreadyMounted { path: entry.mountpoint, shown });
        }
    }
    let about =
        |path: &Path| rustix::fs::stat(path).map_err(|e| MountError::io(path, "look at it", e));
    let is_directory = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    // What it is, and whether it is there, is for the view to say: a set of shards is called by a
    // name that no file has.
    let source = about(&options.source).ok().filter(is_directory);
    let spot = PathHandle::open(&options.mountpoint)?;
    let mountpoint = spot.path().to_path_buf();
    let there = about(&mountpoint)?;
    if !is_directory(&there) {
        return Err(MountError::NotADirectory { path: options.mountpoint.clone() });
    }
    let is_source = |stat: &Stat| {
        let same = |source: Stat| (stat.st_dev, stat.st_ino) == (source.st_dev, source.st_ino);
        source.is_some_and(same)
    };
    if !is_source(&there) {
        for above in mountpoint.ancestors().skip(1) {
            // One that cannot be looked at is not the source, which could be.
            if about(above).is_ok_and(|stat| is_source(&stat)) {
                return Err(MountError::MountpointInSource {
                    path: options.source.clone(),
                    mountpoint,
                });
            }
        }
        if !options.nonempty && !is_empty(&mountpoint)? {
            return Err(MountError::NotEmpty { path: options.mountpoint.clone() });
        }
    }
    // A file keeps the name that was given, which says what it is to be called in the view.
    let full = match source {
        Some(_) => std::fs::canonicalize(&options.source),
        None => std::path::absolute(&options.source),
    };
    let source = full.map_err(|e| MountError::io(&options.source, "find it", e))?;
    if !rustix::process::geteuid().is_root() {
        for (given, option) in [(options.uid, "--uid"), (options.gid, "--gid")] {
            if given.is_some() {
                return Err(MountError::NeedsRoot { path: mountpoint, option });
            }
        }
    }
    Ok(MountPaths { source, mountpoint })
}

fn is_empty(path: &Path) -> Result<bool, MountError> {
    let failed = |e| MountError::io(path, "list it", e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
    for entry in Dir::new(fd).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Descriptors that must be free: a mount has 12 of its own, and needs a few for each file that it inspects.
const MIN_FREE_DESCRIPTORS: usize = 32;

/// Refuses a mount for which this process may not open enough files.
pub fn require_free_descriptors(mountpoint: &Path) -> Result<(), MountError> {
    match open_and_close_descriptors() {
        Ok(()) => Ok(()),
        Err(Errno::MFILE) => Err(MountError::TooFewFiles {
            path: mountpoint.to_path_buf(),
            needed: MIN_FREE_DESCRIPTORS,
        }),
        Err(error) => Err(MountError::io(mountpoint, "open enough files to mount there", error)),
    }
}

/// Opens as many descriptors as are needed, and closes them again.
fn open_and_close_descriptors() -> Result<(), Errno> {
    let first = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let others: Result<Vec<_>, _> =
        (1..MIN_FREE_DESCRIPTORS).map(|_| fcntl_dupfd_cloexec(&first, 0)).collect();
    others.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_mount_will_lie_over_is_hidden_by_whatever_way_it_is_named() {
        let temporary = tempfile::tempdir().unwrap();
        let all = temporary.path().canonicalize().unwrap();
        let mountpoint = all.join("models");
        std::fs::create_dir(&mountpoint).unwrap();
        std::os::unix::fs::symlink(&mountpoint, all.join("link")).unwrap();
        let place = MountPaths { source: all.clone(), mountpoint };
        for hidden in ["models", "models/not/there", "link/cache"] {
            assert!(place.hides(&all.join(hidden)), "{hidden}");
        }
        for shown in ["models2/cache", "cache", ""] {
            assert!(!place.hides(&all.join(shown)), "{shown}");
        }
    }
}
