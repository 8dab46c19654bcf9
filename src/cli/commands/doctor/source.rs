//! Checks of a path as a source.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

use crate::mount_info::mountinfo::{MountEntry, PathHandle, to_display};
use crate::shell_word::shell_word;
use crate::source::SourceError;
#[cfg(not(feature = "remote"))]
use crate::source::is_source_url;

use super::check::{Check, Verdict};
use crate::cli::error::CommandError;

const SOURCE_CHECK: &str = "source";

/// The check of a path that leads through a stuck mount: looking at it would hang.
pub(super) fn unreachable_check(failure: CommandError) -> Check {
    Check::problem(SOURCE_CHECK, failure.whole_message(), failure.remedy)
}

pub(super) fn check_source(path: &Path) -> Vec<Check> {
    if let Some(checks) = check_url(path) {
        return checks;
    }
    let mut checks = vec![check_readable(path)];
    if checks.iter().all(|check| check.verdict == Verdict::Ok) {
        checks.push(check_filesystem(path));
        checks.push(check_direct_read(path));
    }
    checks
}

#[cfg(feature = "remote")]
use super::store::check_url;

/// A build without stores reports every URL as a problem.
#[cfg(not(feature = "remote"))]
fn check_url(path: &Path) -> Option<Vec<Check>> {
    let refused = SourceError::NoRemote { path: path.to_path_buf() };
    let check = || Check::problem(SOURCE_CHECK, refused.to_string(), refused.remedy());
    is_source_url(path).then(|| vec![check()])
}

fn check_readable(path: &Path) -> Check {
    let name = path.display();
    let opened = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::read_dir(path).map(|_| "a directory"),
        Ok(metadata) if metadata.is_file() => File::open(path).map(|_| "a file"),
        Ok(_) => {
            let says = format!("{name}: neither a regular file nor a directory");
            return Check::problem(SOURCE_CHECK, says, "give a checkpoint file, or a directory");
        }
        Err(error) => Err(error),
    };
    let error = match opened {
        Ok(kind) => {
            return Check::ok(SOURCE_CHECK, format!("{name}: {kind} that this user may read"));
        }
        Err(error) => SourceError::io(path, "read it", error),
    };
    if matches!(error, SourceError::StaleMount { .. })
        && let Some(mountpoint) = own_mountpoint(path)
    {
        let says = format!("{name}: on a dead ckptfs mount: its daemon was killed");
        let remedy = format!("remove it: ckptfs unmount {}", shell_word(&mountpoint));
        return Check::problem(SOURCE_CHECK, says, remedy);
    }
    Check::problem(SOURCE_CHECK, error.to_string(), error.remedy())
}

/// The mountpoint of the ckptfs mount that a path lies on.
fn own_mountpoint(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    // Below a dead mount no path can be found.
    let handle = path.ancestors().find_map(|above| PathHandle::open(above).ok())?;
    let entry = handle.mount_entry().ok()?.filter(MountEntry::is_ckptfs)?;
    Some(entry.mountpoint)
}

/// Filesystem types whose reads cross a network, or go through another daemon.
const REMOTE_FILESYSTEMS: [&str; 16] = [
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
    const CHECK_NAME: &str = "filesystem";
    let entry = match PathHandle::open(path).and_then(|handle| handle.mount_entry()) {
        Ok(Some(entry)) => entry,
        Ok(None) => return Check::ok(CHECK_NAME, "unknown"),
        Err(error) => return Check::problem(CHECK_NAME, error.to_string(), error.remedy()),
    };
    let kind = to_display(&entry.fs_type);
    let says = format!("{kind}, mounted at {}", entry.mountpoint.display());
    if entry.is_ckptfs() {
        Check::note(
            CHECK_NAME,
            format!("{says}: ckptfs itself"),
            "give the source of that mount instead",
        )
    } else if kind.starts_with("fuse.") || REMOTE_FILESYSTEMS.contains(&kind.as_str()) {
        Check::note(
            CHECK_NAME,
            format!("{says}: not on a local disk, so each read waits longer"),
            "copy the checkpoint to a local disk if it is read often",
        )
    } else {
        Check::ok(CHECK_NAME, format!("{says}: local"))
    }
}

/// The largest alignment that disks and filesystems require of direct reads.
const ALIGNMENT_BYTES: usize = 4096;

fn check_direct_read(path: &Path) -> Check {
    const CHECK_NAME: &str = "O_DIRECT";
    let Some(file) = file_in(path) else {
        let why = if path.is_file() {
            "the file is empty"
        } else {
            "no file lies directly in this directory"
        };
        return Check::ok(CHECK_NAME, format!("not tried: {why}"));
    };
    match reads_directly(&file) {
        Ok(()) => Check::ok(CHECK_NAME, "works: reads need not evict what the page cache holds"),
        Err(error) => Check::note(
            CHECK_NAME,
            format!("does not work there ({error}): everything is read through the cache"),
            "nothing needs to be done; local filesystems such as ext4 and xfs have it",
        ),
    }
}

/// The file itself, or a file in the directory that is not empty. Mounts in the directory may be stuck, so they and
/// the targets of links are left alone.
fn file_in(path: &Path) -> Option<PathBuf> {
    let is_full = |metadata: fs::Metadata| metadata.is_file() && metadata.len() > 0;
    if path.is_file() {
        return Some(path.to_path_buf()).filter(|path| fs::metadata(path).is_ok_and(is_full));
    }
    let folder = File::open(path).ok()?;
    let is_full = |entry: &fs::DirEntry| {
        // O_PATH asks no daemon, and NO_XDEV stays on the directory's own filesystem.
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let opened = openat2(&folder, entry.file_name(), flags, Mode::empty(), resolve);
        opened.is_ok_and(|file| File::from(file).metadata().is_ok_and(is_full))
    };
    let mut names = fs::read_dir(path).ok()?.filter_map(Result::ok);
    names.find(is_full).map(|entry| entry.path())
}

fn reads_directly(path: &Path) -> io::Result<()> {
    let flags = (OFlags::DIRECT | OFlags::NONBLOCK).bits();
    let flags = i32::try_from(flags).map_err(io::Error::other)?;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let mut memory = vec![0; 2 * ALIGNMENT_BYTES];
    let start = memory.as_ptr().align_offset(ALIGNMENT_BYTES);
    let Some(aligned) = memory.get_mut(start..).and_then(|rest| rest.get_mut(..ALIGNMENT_BYTES))
    else {
        return Ok(());
    };
    std::os::unix::fs::FileExt::read_at(&file, aligned, 0)?;
    Ok(())
}
