//! What a path can do as a source.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

use crate::mount_info::mountinfo::{Spot, shown};

use super::super::Failure;
use super::Check;

const SOURCE: &str = "source";

/// A path that is not looked at, because whoever does would have to wait for a mount on the way to it.
pub(super) fn unreachable(failure: Failure) -> Check {
    Check::problem(SOURCE, failure.message, failure.remedy)
}

pub(super) fn look(path: &Path) -> Vec<Check> {
    let mut checks = vec![check_readable(path)];
    if checks.iter().all(|check| check.verdict == super::Verdict::Ok) {
        checks.push(check_filesystem(path));
        checks.push(check_direct(path));
    }
    checks
}

fn check_readable(path: &Path) -> Check {
    let name = path.display();
    let opened = match fs::metadata(path) {
        Ok(about) if about.is_dir() => fs::read_dir(path).map(|_| "a directory"),
        Ok(about) if about.is_file() => File::open(path).map(|_| "a file"),
        Ok(_) => Err(io::Error::other("neither a regular file nor a directory")),
        Err(error) => Err(error),
    };
    match opened {
        Ok(kind) => Check::ok(SOURCE, format!("{name}: {kind} that this user may read")),
        Err(error) => Check::problem(
            SOURCE,
            format!("{name}: cannot be read: {error}"),
            "check the path, and ask for read permission on it",
        ),
    }
}

/// Types that reach over a network, or to another daemon.
const REMOTE: [&str; 16] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "lustre",
    "glusterfs",
    "9p",
    "afs",
    "gpfs",
    "beegfs",
    "orangefs",
    "virtiofs",
    "fuse",
    "ocfs2",
];

fn check_filesystem(path: &Path) -> Check {
    const WHAT: &str = "filesystem";
    let entry = match Spot::at(path).and_then(|spot| spot.entry()) {
        Ok(Some(entry)) => entry,
        Ok(None) => return Check::ok(WHAT, "unknown"),
        Err(error) => return Check::problem(WHAT, error.to_string(), error.remedy()),
    };
    let kind = shown(&entry.kind);
    let says = format!("{kind}, mounted at {}", entry.mountpoint.display());
    if entry.is_ours() {
        Check::note(WHAT, format!("{says}: ckptfs itself"), "give the source of that mount instead")
    } else if kind.starts_with("fuse.") || REMOTE.contains(&kind.as_str()) {
        Check::note(
            WHAT,
            format!("{says}: not on a local disk, so each read waits longer"),
            "copy the checkpoint to a local disk if it is read often",
        )
    } else {
        Check::ok(WHAT, format!("{says}: local"))
    }
}

/// What disks and filesystems want a read past the cache to be aligned to, at the most.
const ALIGNMENT: usize = 4096;

fn check_direct(path: &Path) -> Check {
    const WHAT: &str = "O_DIRECT";
    let Some(file) = some_file(path) else {
        return Check::ok(WHAT, "no file there to try it on");
    };
    match reads_directly(&file) {
        Ok(()) => Check::ok(WHAT, "works: what is read once need not push out what is cached"),
        Err(error) => Check::note(
            WHAT,
            format!("does not work there ({error}): everything is read through the cache"),
            "nothing needs to be done; local filesystems such as ext4 and xfs have it",
        ),
    }
}

/// The file itself, or one of the directory's that is not empty. What else is mounted in the directory,
/// and may be stuck, is not looked at, nor is what a link leads to there.
fn some_file(path: &Path) -> Option<PathBuf> {
    let is_full = |about: fs::Metadata| about.is_file() && about.len() > 0;
    if path.is_file() {
        return Some(path.to_path_buf()).filter(|path| fs::metadata(path).is_ok_and(is_full));
    }
    let folder = File::open(path).ok()?;
    let is_full = |entry: &fs::DirEntry| {
        // Opened by name alone, which asks nobody, and on the directory's own filesystem.
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let found = openat2(&folder, entry.file_name(), flags, Mode::empty(), resolve);
        found.is_ok_and(|found| File::from(found).metadata().is_ok_and(is_full))
    };
    let mut names = fs::read_dir(path).ok()?.filter_map(Result::ok);
    names.find(is_full).map(|entry| entry.path())
}

fn reads_directly(path: &Path) -> io::Result<()> {
    let flags = (OFlags::DIRECT | OFlags::NONBLOCK).bits();
    let flags = i32::try_from(flags).map_err(io::Error::other)?;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let mut memory = vec![0; 2 * ALIGNMENT];
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    let Some(aligned) = memory.get_mut(start..).and_then(|rest| rest.get_mut(..ALIGNMENT)) else {
        return Ok(());
    };
    std::os::unix::fs::FileExt::read_at(&file, aligned, 0)?;
    Ok(())
}
