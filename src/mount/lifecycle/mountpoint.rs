//! Checks that a source can be mounted at a mountpoint, before anything is begun.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::mount_info::mountinfo::{self, PathHandle};
use crate::source::{is_remote_name, is_source_url};

use super::liveness::Liveness;
use super::stale_mounts;
use crate::mount::error::MountError;
use crate::mount::options::MountOptions;

/// The absolute paths of a source that can be mounted at a mountpoint.
#[derive(Debug)]
pub(in crate::mount) struct MountPaths {
    pub source: PathBuf,
    pub mountpoint: PathBuf,
}

impl MountPaths {
    /// Whether the mount will hide a path, or its deepest existing directory.
    pub fn hides(&self, path: &Path) -> bool {
        let existing = path.ancestors().find_map(|above| std::fs::canonicalize(above).ok());
        existing.is_some_and(|existing| existing.starts_with(&self.mountpoint))
    }
}

pub(in crate::mount) fn resolve(options: &MountOptions) -> Result<MountPaths, MountError> {
    // First of all, because the source may be this directory.
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
    let stat_path =
        |path: &Path| rustix::fs::stat(path).map_err(|e| MountError::io(path, "look at it", e));
    let is_directory = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    // The view reports a source that is missing: a set of shards has a name that no file has.
    let source = stat_path(&options.source).ok();
    let is_url = is_source_url(&options.source);
    if source.is_none() && !is_url && is_remote_name(&options.source) {
        return Err(MountError::Missing { path: options.source.clone() });
    }
    let source = source.filter(is_directory);
    let handle = PathHandle::open(&options.mountpoint)?;
    let mountpoint = handle.path().to_path_buf();
    let stat = stat_path(&mountpoint)?;
    if !is_directory(&stat) {
        return Err(MountError::NotADirectory { path: options.mountpoint.clone() });
    }
    let is_source = |stat: &Stat| {
        let same = |source: Stat| (stat.st_dev, stat.st_ino) == (source.st_dev, source.st_ino);
        source.is_some_and(same)
    };
    if !is_source(&stat) {
        for above in mountpoint.ancestors().skip(1) {
            // A directory that cannot be inspected is not the source, which could be.
            if stat_path(above).is_ok_and(|stat| is_source(&stat)) {
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
    // The path of a file keeps its links: the view shows the file by the name that the user gave.
    let absolute = match source {
        _ if is_url => Ok(options.source.clone()),
        Some(_) => std::fs::canonicalize(&options.source),
        None => std::path::absolute(&options.source),
    };
    let source = absolute.map_err(|e| MountError::io(&options.source, "find it", e))?;
    if !rustix::process::geteuid().is_root() {
        for (value, option) in [(options.uid, "--uid"), (options.gid, "--gid")] {
            if value.is_some() {
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

/// A mount holds 12 descriptors of its own, and needs a few for each file that it inspects.
const MIN_FREE_DESCRIPTORS: usize = 32;

/// Fails if this process may not open enough files. A mount that runs out of them halfway can leave a dead mount
/// behind, and tokio panics.
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

/// Opens as many descriptors as must be free, and closes them.
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
    fn a_path_in_the_mountpoint_is_hidden_however_it_is_named() {
        let temporary = tempfile::tempdir().unwrap();
        let all = temporary.path().canonicalize().unwrap();
        let mountpoint = all.join("models");
        std::fs::create_dir(&mountpoint).unwrap();
        std::os::unix::fs::symlink(&mountpoint, all.join("link")).unwrap();
        let paths = MountPaths { source: all.clone(), mountpoint };
        for hidden in ["models", "models/not/there", "link/cache"] {
            assert!(paths.hides(&all.join(hidden)), "{hidden}");
        }
        for shown in ["models2/cache", "cache", ""] {
            assert!(!paths.hides(&all.join(shown)), "{shown}");
        }
    }
}
