//! Putting a filesystem into the tree, and taking it out again.
//!
//! In: a mountpoint and a name. Out: the descriptor of /dev/fuse on which the kernel asks, and an
//! [`AttachedMount`], which knows its own mount from every other that may come to lie at the same path.
//!
//! fuser can mount too, but drops the type as root, breaks at commas in names, does not try
//! fusermount3 where /dev/fuse is not for everyone, and unmounts by path whatever is there.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::mount_info::mountinfo::{self, DeviceNumber, MountEntry, PathHandle};
use crate::threads::lock;

use super::fusermount;
use crate::mount::error::MountError;

const FUSE_DEVICE: &str = "/dev/fuse";

/// What is to be mounted.
#[derive(Clone, Copy, Debug)]
pub struct AttachRequest<'a> {
    /// A directory that exists.
    pub mountpoint: &'a Path,
    /// The name that tables of mounts show as its source.
    pub fsname: &'a OsStr,
    /// Whether other users than the one who mounts may use it.
    pub allow_other: bool,
}

/// A mount of this process.
///
/// The kernel gives the numbers of a mount that is gone to the next one that is made, anybody's. They
/// are this mount's for certain only as long as the kernel is connected, which the descriptor tells.
#[derive(Debug)]
pub struct AttachedMount {
    mountpoint: PathBuf,
    id: u64,
    device: DeviceNumber,
    /// Of /dev/fuse; nothing once this mount's end is certain.
    connection: Mutex<Option<OwnedFd>>,
}

/// Mounts; the kernel then waits for an answer to its first question on the descriptor.
pub fn attach(wanted: &AttachRequest<'_>) -> Result<(OwnedFd, AttachedMount), MountError> {
    let spot = PathHandle::open(wanted.mountpoint)?;
    let path = spot.path().to_path_buf();
    let fd = match mount_directly(wanted, &spot)? {
        Some(fd) => fd,
        None => fusermount::mount(&path, fusermount_options(wanted))?,
    };
    drop(spot);
    match mountinfo::mount_at(&path)? {
        Some(MountEntry { id, device, fs_type: kind, .. })
            if kind == mountinfo::FILESYSTEM_TYPE =>
        {
            let connection = fcntl_dupfd_cloexec(&fd, 3)
                .map_err(|e| MountError::io(Path::new(FUSE_DEVICE), "keep it open", e))?;
            let connection = Mutex::new(Some(connection));
            Ok((fd, AttachedMount { mountpoint: path, id, device, connection }))
        }
        // Something else was mounted over it at once. Closing the descriptor leaves ours dead.
        _ => Err(MountError::Io {
            path,
            action: "find the mount that was just made",
            source: std::io::Error::other("something else is mounted there"),
        }),
    }
}

/// Mounts by ourselves; `None` where the system lets only the helper do it.
fn mount_directly(
    wanted: &AttachRequest<'_>,
    spot: &PathHandle,
) -> Result<Option<OwnedFd>, MountError> {
    let path = || wanted.mountpoint.to_path_buf();
    let fd = match rustix::fs::open(FUSE_DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(fd) => fd,
        Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => {
            return Err(MountError::NoDevice { path: path() });
        }
        Err(Errno::ACCESS | Errno::PERM) => return Ok(None),
        Err(e) => return Err(MountError::io(Path::new(FUSE_DEVICE), "open it", e)),
    };
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,subtype=ckptfs",
        fd.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if wanted.allow_other {
        data.push_str(",allow_other");
    }
    // Text of ours, without a zero byte.
    let data = CString::new(data).map_err(|e| MountError::io(wanted.mountpoint, "mount", e))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::RDONLY;
    match rustix::mount::mount(wanted.fsname, spot.path(), "fuse", flags, data.as_c_str()) {
        Ok(()) => Ok(Some(fd)),
        Err(Errno::PERM | Errno::ACCESS) => Ok(None),
        Err(e) => Err(MountError::io(wanted.mountpoint, "mount", e)),
    }
}

fn fusermount_options(wanted: &AttachRequest<'_>) -> OsString {
    let mut options = b"ro,nosuid,nodev,default_permissions,subtype=ckptfs,fsname=".to_vec();
    for &byte in wanted.fsname.as_bytes() {
        // A comma in a name must not begin an option.
        if matches!(byte, b',' | b'\\') {
            options.push(b'\\');
        }
        options.push(byte);
    }
    if wanted.allow_other {
        options.extend(b",allow_other");
    }
    OsString::from_vec(options)
}

impl AttachedMount {
    /// Where it was mounted, absolute and without links.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// The number that the kernel gave the filesystem.
    pub fn device(&self) -> DeviceNumber {
        self.device
    }

    fn connection(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        // A plain value: whoever panicked with it left it whole.
        lock(&self.connection)
    }

    /// Lets the kernel go: those who wait for an answer get an error, and the numbers of this mount
    /// may become another's.
    pub(in crate::mount) fn disconnect(&self) {
        *self.connection() = None;
    }

    /// Whether the filesystem is still there for somebody, so that its numbers are its own.
    fn is_connected(&self) -> bool {
        self.connection().as_ref().is_some_and(|fd| {
            let mut asked = [PollFd::new(fd, PollFlags::empty())];
            let at_once = Timespec::default();
            poll(&mut asked, Some(&at_once)).is_ok()
                && !asked[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL)
        })
    }

    fn entry(&self) -> Result<Option<MountEntry>, MountError> {
        if !self.is_connected() {
            return Ok(None);
        }
        let is_this = |entry: &MountEntry| entry.id == self.id && entry.device == self.device;
        Ok(mountinfo::mounts()?.into_iter().find(is_this))
    }

    /// Whether it is still in the tree, here or where it was moved to.
    pub fn is_attached(&self) -> Result<bool, MountError> {
        Ok(self.entry()?.is_some())
    }

    /// Takes it out of the tree at once; who uses it may go on. Does nothing where it is out
    /// already, and nothing to what others have mounted at or over its place.
    pub fn detach(&self) -> Result<(), MountError> {
        let Some(entry) = self.entry()? else {
            return Ok(());
        };
        let spot = PathHandle::open(&entry.mountpoint)?;
        if spot.mount_id() != entry.id {
            return Err(MountError::Io {
                path: entry.mountpoint,
                action: "detach",
                source: std::io::Error::other("something else is mounted over it"),
            });
        }
        detach(&spot)
    }

    /// Lets the kernel read ahead so far, and tells whether that is allowed: only root may.
    pub fn raise_readahead(&self, bytes: u64) -> bool {
        let knob = format!("/sys/class/bdi/{}/read_ahead_kb", self.device);
        let Err(error) = std::fs::write(&knob, (bytes / 1024).to_string()) else { return true };
        tracing::debug!("{knob}: {error}");
        // Somebody was quick to unmount it.
        error.kind() == std::io::ErrorKind::NotFound
    }
}

/// Takes the mount whose root is this spot out of the tree, busy or not.
pub(in crate::mount) fn detach(spot: &PathHandle) -> Result<(), MountError> {
    // By descriptor: a mount that comes to lie over the path in between is not the one to go.
    match rustix::mount::unmount(spot.fd_path(), UnmountFlags::DETACH) {
        Err(Errno::PERM) => unmount_by_fusermount(spot.path(), true),
        // No longer mounted: somebody else was faster.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(e) => Err(MountError::io(spot.path(), "detach", e)),
    }
}

/// How long somebody may be in the way who only looks, as `ckptfs status` does and file managers do.
pub(in crate::mount) const BUSY_TIMEOUT: Duration = Duration::from_millis(500);

/// Unmounts what shows at a path, unless something uses it for longer than that.
pub(in crate::mount) fn unmount(path: &Path, passing_by: Duration) -> Result<(), MountError> {
    let began = Instant::now();
    loop {
        match try_unmount(path) {
            Err(MountError::Busy { .. }) if began.elapsed() < passing_by => {
                std::thread::sleep(Duration::from_millis(5));
            }
            done => return done,
        }
    }
}

fn try_unmount(path: &Path) -> Result<(), MountError> {
    match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => unmount_by_fusermount(path, false),
        Err(Errno::BUSY) => Err(MountError::Busy { path: path.to_path_buf() }),
        Err(e) => Err(MountError::io(path, "unmount", e)),
        Ok(()) => Ok(()),
    }
}

/// Has the program do it that lets ordinary users unmount what is theirs.
fn unmount_by_fusermount(path: &Path, lazy: bool) -> Result<(), MountError> {
    let user = rustix::process::getuid();
    let owner = mountinfo::mount_at(path)?.and_then(|entry| entry.owner_uid());
    match owner {
        Some(owner) if owner != user.as_raw() && !user.is_root() => {
            Err(MountError::OtherOwner { path: path.to_path_buf(), owner: user_label(owner) })
        }
        _ => fusermount::unmount(path, lazy),
    }
}

/// A user as people know them; one whom only the network knows, by the number.
fn user_label(user: u32) -> String {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _password) = (fields.next()?, fields.next()?);
        (fields.next()?.parse() == Ok(user)).then_some(name)
    });
    name.map_or_else(|| format!("user {user}"), |name| format!("{name} (user {user})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_called_by_their_names() {
        assert_eq!(user_label(0), "root (user 0)");
        assert_eq!(user_label(4_000_000_000), "user 4000000000");
    }

    #[test]
    fn a_name_cannot_become_an_option() {
        let fsname = OsStr::from_bytes(b"/m,allow_other,\\x\xff");
        let wanted = AttachRequest { mountpoint: Path::new("/m"), fsname, allow_other: false };
        let options = fusermount_options(&wanted).into_vec();
        assert!(options.ends_with(b"fsname=/m\\,allow_other\\,\\\\x\xff"), "{options:?}");
        let wanted = AttachRequest { allow_other: true, ..wanted };
        assert!(fusermount_options(&wanted).into_vec().ends_with(b"\xff,allow_other"));
    }
}
