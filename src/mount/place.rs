//! Whether a source can be shown at a mountpoint.
//!
//! In: both as the user typed them. Out: both absolute, after a dead mount at the mountpoint was
//! taken away; or why not.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, Stat};

use super::probe::Answer;
use super::table::{self, Spot};
use super::{Error, Options, heal};

/// A source and a mountpoint that can be joined.
#[derive(Debug)]
pub(super) struct Place {
    pub source: PathBuf,
    pub mountpoint: PathBuf,
}

pub(super) fn check(options: &Options) -> Result<Place, Error> {
    // First, because the source may be this very directory.
    match heal::heal(&options.mountpoint)?.left {
        None => {}
        Some((entry, Answer::Silent)) => return Err(Error::Silent { path: entry.mountpoint }),
        Some((entry, _)) => {
            let shown = table::shown(&entry.source);
            return Err(Error::Mounted { path: entry.mountpoint, shown });
        }
    }
    let about = |path: &Path| rustix::fs::stat(path).map_err(|e| Error::io(path, "look at it", e));
    let kind = |stat: &Stat| FileType::from_raw_mode(stat.st_mode);
    let source = match about(&options.source) {
        Ok(source) => Some(source),
        // The name of a set or of an image, which no file has; the view knows it, or says so.
        Err(Error::Missing { .. }) => None,
        Err(error) => return Err(error),
    };
    let is_shown = |stat| matches!(kind(stat), FileType::Directory | FileType::RegularFile);
    if !source.as_ref().is_none_or(is_shown) {
        return Err(Error::NoSource { path: options.source.clone() });
    }
    let spot = Spot::at(&options.mountpoint)?;
    let mountpoint = spot.path().to_path_buf();
    let there = about(&mountpoint)?;
    if kind(&there) != FileType::Directory {
        return Err(Error::NotADirectory { path: options.mountpoint.clone() });
    }
    let identity = |stat: &Stat| (stat.st_dev, stat.st_ino);
    let is_source = |stat: &Stat| source.as_ref().map(identity) == Some(identity(stat));
    if !is_source(&there) {
        for above in mountpoint.ancestors().skip(1) {
            // One that cannot be looked at is not the source, which could be.
            if about(above).is_ok_and(|stat| is_source(&stat)) {
                return Err(Error::Inside { path: options.source.clone(), mountpoint });
            }
        }
        if !options.nonempty && !is_empty(&mountpoint)? {
            return Err(Error::NotEmpty { path: options.mountpoint.clone() });
        }
    }
    // A file keeps the name that was given, which says what it is to be called in the view.
    let full = match source.as_ref().map(kind) {
        Some(FileType::Directory) => std::fs::canonicalize(&options.source),
        _ => std::path::absolute(&options.source),
    };
    let source = full.map_err(|e| Error::io(&options.source, "find it", e))?;
    if !rustix::process::geteuid().is_root() {
        for (given, option) in [(options.uid, "--uid"), (options.gid, "--gid")] {
            if given.is_some() {
                return Err(Error::NeedsRoot { path: mountpoint, option });
            }
        }
    }
    Ok(Place { source, mountpoint })
}

fn is_empty(path: &Path) -> Result<bool, Error> {
    let failed = |e| Error::io(path, "list it", e);
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
