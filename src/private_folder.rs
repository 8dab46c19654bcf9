//! Folders of the user's own, which no other user can write to: what is in them is believed.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, Stat, fstat, mkdirat, openat};
use rustix::io::Errno;

const DIRECTORY_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The folder of the XDG Base Directory Specification that `variable` names, by default `fallback` in the home
/// directory. The specification ignores relative paths. A daemon without a home directory has none.
pub fn xdg_folder(variable: &str, fallback: &str) -> Option<PathBuf> {
    let named = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    named(variable).or_else(|| Some(named("HOME")?.join(fallback)))
}

/// Opens a folder, if it is there and no other user can write to it.
pub fn open_private(folder: &Path) -> io::Result<OwnedFd> {
    let folder = rustix::fs::open(folder, DIRECTORY_FLAGS | OFlags::NOFOLLOW, Mode::empty())?;
    check_private(&fstat(&folder)?)?;
    Ok(folder)
}

/// Opens a folder, and creates it if it is not there. Nothing is created in another user's directory: a daemon that
/// runs with another user's home must not leave there what that user cannot remove.
pub fn create_private(folder: &Path) -> io::Result<OwnedFd> {
    let Some(existing) = folder.ancestors().find(|path| path.exists()) else {
        return open_private(folder);
    };
    let Ok(missing) = folder.strip_prefix(existing) else { return open_private(folder) };
    if missing.as_os_str().is_empty() {
        return open_private(folder);
    }
    // A link must be the user's own, too: its owner decides where it leads.
    check_owner(&rustix::fs::lstat(existing)?)?;
    let mut created = rustix::fs::open(existing, DIRECTORY_FLAGS, Mode::empty())?;
    for name in missing {
        check_owner(&fstat(&created)?)?;
        match mkdirat(&created, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        created = openat(&created, name, DIRECTORY_FLAGS | OFlags::NOFOLLOW, Mode::empty())?;
    }
    check_private(&fstat(&created)?)?;
    Ok(created)
}

/// Refuses a file or folder that another user owns or can write to.
pub fn check_private(stat: &Stat) -> io::Result<()> {
    check_owner(stat)?;
    if stat.st_mode & 0o022 != 0 {
        return Err(io::Error::other("others may write to it"));
    }
    Ok(())
}

fn check_owner(stat: &Stat) -> io::Result<()> {
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it is another user's"));
    }
    Ok(())
}
