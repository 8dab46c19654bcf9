//! Attaches a filesystem to the tree, and detaches it.
//!
//! An [`AttachedMount`] distinguishes its own mount from every other that may come to lie at the same path.
//!
//! fuser can mount too, but as root it drops the type, and it breaks at commas in names. It does not try fusermount3
//! if /dev/fuse is closed to users, and it unmounts whatever lies at the path.

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
use crate::mount::fuse_device::FUSE_DEVICE;

/// The mount to make.
#[derive(Clone, Copy, Debug)]
pub struct AttachRequest<'a> {
    /// An existing directory.
    pub mountpoint: &'a Path,
    /// The source in the tables of mounts.
    pub fsname: &'a OsStr,
    /// Whether other users may use it.
    pub allow_other: bool,
}

/// A mount of this process.
///
/// The kernel reuses the numbers of a mount that is gone for the next mount, of any process. They certainly belong to
/// this mount as long as the kernel is connected, which the descriptor tells.
#[derive(Debug)]
pub struct AttachedMount {
    mountpoint: PathBuf,
    id: u64,
    device: DeviceNumber,
    /// A descriptor of /dev/fuse; `None` once the mount has certainly ended.
    connection: Mutex<Option<OwnedFd>>,
}

/// Mounts. The kernel then waits on the descriptor for the reply to its first request.
pub fn attach(request: &AttachRequest<'_>) -> Result<(OwnedFd, AttachedMount), MountError> {
    let handle = PathHandle::open(request.mountpoint)?;
    let path = handle.path().to_path_buf();
    let fd = match mount_directly(request, &handle)? {
        Some(fd) => fd,
        None => fusermount::mount(&path, fusermount_options(request))?,
    };
    drop(handle);
    match mountinfo::mount_at(&path)? {
        Some(MountEntry { id, device, fs_type: kind, .. })
            if kind == mountinfo::FILESYSTEM_TYPE =>
        {
            let connection = fcntl_dupfd_cloexec(&fd, 3)
                .map_err(|e| MountError::io(Path::new(FUSE_DEVICE), "keep it open", e))?;
            let connection = Mutex::new(Some(connection));
            Ok((fd, AttachedMount { mountpoint: path, id, device, connection }))
        }
        // Another mount covered it at once. Closing the descriptor leaves ours dead.
        _ => Err(MountError::Io {
            path,
            action: "find the mount that was just made",
            source: std::io::Error::other("something else is mounted there"),
        }),
    }
}

/// Mounts without fusermount3; `None` if the system does not let this user.
fn mount_directly(
    request: &AttachRequest<'_>,
    handle: &PathHandle,
) -> Result<Option<OwnedFd>, MountError> {
    let path = || request.mountpoint.to_path_buf();
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
    if request.allow_other {
        data.push_str(",allow_other");
    }
    // This text has no zero byte.
    let data = CString::new(data).map_err(|e| MountError::io(request.mountpoint, "mount", e))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::RDONLY;
    match rustix::mount::mount(request.fsname, handle.path(), "fuse", flags, data.as_c_str()) {
        Ok(()) => Ok(Some(fd)),
        Err(Errno::PERM | Errno::ACCESS) => Ok(None),
        Err(e) => Err(MountError::io(request.mountpoint, "mount", e)),
    }
}

fn fusermount_options(request: &AttachRequest<'_>) -> OsString {
    let mut options = b"ro,nosuid,nodev,default_permissions,subtype=ckptfs,fsname=".to_vec();
    for &byte in request.fsname.as_bytes() {
        // A comma in a name must not begin an option.
        if matches!(byte, b',' | b'\\') {
            options.push(b'\\');
        }
        options.push(byte);
    }
    if request.allow_other {
        options.extend(b",allow_other");
    }
    OsString::from_vec(options)
}

impl AttachedMount {
    /// The path that it was mounted at, absolute and without links.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// The device number of the filesystem.
    pub fn device(&self) -> DeviceNumber {
        self.device
    }

    fn connection(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        // No thread can panic while it changes this value.
        lock(&self.connection)
    }

    /// Closes the connection: requests that wait for a reply fail, and the kernel may reuse the numbers of this mount.
    pub(super) fn disconnect(&self) {
        *self.connection() = None;
    }

    /// Whether the filesystem still exists, so that its numbers are its own.
    fn is_connected(&self) -> bool {
        self.connection().as_ref().is_some_and(|fd| {
            let mut polled = [PollFd::new(fd, PollFlags::empty())];
            let at_once = Timespec::default();
            poll(&mut polled, Some(&at_once)).is_ok()
                && !polled[0]
                    .revents()
                    .intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL)
        })
    }

    fn entry(&self) -> Result<Option<MountEntry>, MountError> {
        if !self.is_connected() {
            return Ok(None);
        }
        let is_this = |entry: &MountEntry| entry.id == self.id && entry.device == self.device;
        Ok(mountinfo::mounts()?.into_iter().find(is_this))
    }

    /// Whether it is still in the tree, at its path or moved elsewhere.
    pub fn is_attached(&self) -> Result<bool, MountError> {
        Ok(self.entry()?.is_some())
    }

    /// Detaches it from the tree at once, and leaves its readers alone. Does nothing if it is detached already, and
    /// nothing to other mounts at or over its path.
    pub fn detach(&self) -> Result<(), MountError> {
        let Some(entry) = self.entry()? else {
            return Ok(());
        };
        let handle = PathHandle::open(&entry.mountpoint)?;
        if handle.mount_id() != entry.id {
            return Err(MountError::Io {
                path: entry.mountpoint,
                action: "detach",
                source: std::io::Error::other("something else is mounted over it"),
            });
        }
        detach(&handle)
    }

    /// Sets the kernel's readahead. Returns whether that is permitted: only root may.
    pub fn raise_readahead(&self, bytes: u64) -> bool {
        let setting = format!("/sys/class/bdi/{}/read_ahead_kb", self.device);
        let Err(error) = std::fs::write(&setting, (bytes / 1024).to_string()) else { return true };
        tracing::debug!("{setting}: {error}");
        // The setting disappears if the mount was unmounted meanwhile.
        error.kind() == std::io::ErrorKind::NotFound
    }
}

/// Detaches the mount with this root from the tree, busy or not.
pub(super) fn detach(handle: &PathHandle) -> Result<(), MountError> {
    // By descriptor, so that a mount which covers the path meanwhile stays.
    match rustix::mount::unmount(handle.fd_path(), UnmountFlags::DETACH) {
        Err(Errno::PERM) => unmount_by_fusermount(handle.path(), true),
        // Another process has detached it already.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(e) => Err(MountError::io(handle.path(), "detach", e)),
    }
}

/// How long an unmount waits for programs that only look at the mount, as `ckptfs status` and file managers do.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_millis(500);

/// Unmounts the topmost mount at a path. Fails if a program uses it for longer than the timeout.
pub(super) fn unmount(path: &Path, busy_timeout: Duration) -> Result<(), MountError> {
    let began = Instant::now();
    loop {
        match try_unmount(path) {
            Err(MountError::Busy { .. }) if began.elapsed() < busy_timeout => {
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

/// Unmounts by fusermount3, which lets users unmount their own mounts.
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

/// The name and number of a user; only the number if /etc/passwd lacks it.
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
        let request = AttachRequest { mountpoint: Path::new("/m"), fsname, allow_other: false };
        let options = fusermount_options(&request).into_vec();
        assert!(options.ends_with(b"fsname=/m\\,allow_other\\,\\\\x\xff"), "{options:?}");
        let request = AttachRequest { mountpoint: Path::new("/m"), fsname, allow_other: true };
        assert!(fusermount_options(&request).into_vec().ends_with(b"\xff,allow_other"));
    }
}
