//! Errors of a mount, with a message and a remedy for each.

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::shell_word::shell_word;
use crate::source::{describe_missing, missing_remedy, shown_missing_path};

use super::fuse_device::{DEVICE_MODE_REMEDY, no_device_remedy};

/// A mount that cannot be made, found or unmounted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages name the fields of their variants.
pub enum MountError {
    /// The view cannot show the source.
    #[error(transparent)]
    View(#[from] crate::view::ViewError),
    /// The source is a single file, and no checkpoint.
    #[error(transparent)]
    NoCheckpoint(#[from] crate::checkpoint::CheckpointError),
    /// A path does not exist.
    #[error("{}: {}", shown_missing_path(.path), describe_missing(.path))]
    Missing { path: PathBuf },
    /// The mountpoint does not exist.
    #[error("{path}: does not exist, so nothing can be mounted there")]
    NoMountpoint { path: PathBuf },
    /// The mountpoint is not a directory.
    #[error("{path}: is not a directory, and a mountpoint must be one")]
    NotADirectory { path: PathBuf },
    /// The mountpoint is not empty.
    #[error("{path}: is not empty, and a mount would hide what is in it")]
    NotEmpty { path: PathBuf },
    /// The mountpoint lies inside the source, so that reads of the source would lead through the mount.
    #[error("{mountpoint}: lies inside {path}, which it would show")]
    MountpointInSource { path: PathBuf, mountpoint: PathBuf },
    /// The mountpoint shows a ckptfs mount already.
    #[error("{path}: already shows {shown}")]
    AlreadyMounted { path: PathBuf, shown: String },
    /// An option needs root.
    #[error("{path}: {option} needs root")]
    NeedsRoot { path: PathBuf, option: &'static str },
    /// The limit on open files is too low.
    #[error("{path}: a mount needs {needed} free file descriptors, and this process has fewer")]
    TooFewFiles { path: PathBuf, needed: usize },
    /// The system has no /dev/fuse.
    #[error("/dev/fuse: not there, so nothing can be mounted at {path}")]
    NoDevice { path: PathBuf },
    /// This user needs fusermount3 to mount, and it is missing.
    #[error("{path}: mounting without root needs the program fusermount3, which is not there")]
    NoFusermount { path: PathBuf },
    /// fusermount3 failed to mount or unmount.
    #[error("{path}: {message}")]
    Fusermount { path: PathBuf, message: String },
    /// The daemon of the mount does not answer.
    #[error("{path}: mounted, and does not answer")]
    Silent { path: PathBuf },
    /// The path is no mountpoint of ckptfs. `within` is the ckptfs mount that it lies in.
    #[error("{path}: is not a ckptfs mount: {what}")]
    NotCkptfs { path: PathBuf, what: String, within: Option<PathBuf> },
    /// Another user made the mount.
    #[error("{path}: was mounted by {owner}: only that user or root may unmount it")]
    OtherOwner { path: PathBuf, owner: String },
    /// A program uses the mount.
    #[error("{path}: in use: a program has a file or its working directory there")]
    Busy { path: PathBuf },
    /// A system call failed.
    #[error("{path}: cannot {action}: {source}")]
    Io { path: PathBuf, action: &'static str, source: io::Error },
}

impl From<crate::source::SourceError> for MountError {
    fn from(error: crate::source::SourceError) -> Self {
        match error {
            crate::source::SourceError::Io { path, action, source } => {
                MountError::io(&path, action, source)
            }
            crate::source::SourceError::Missing { path } => MountError::Missing { path },
            error => MountError::View(error.into()),
        }
    }
}

impl MountError {
    pub(crate) fn io(path: &Path, action: &'static str, source: impl Into<io::Error>) -> Self {
        let path = path.to_path_buf();
        let source = source.into();
        match source.kind() {
            // NotADirectory: a file stands where the path has a directory.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => MountError::Missing { path },
            _ => MountError::Io { path, action, source },
        }
    }

    /// The mountpoint or the source that failed.
    pub fn path(&self) -> &Path {
        match self {
            MountError::View(error) => error.path(),
            MountError::NoCheckpoint(error) => error.path(),
            MountError::Missing { path }
            | MountError::NoMountpoint { path }
            | MountError::NotADirectory { path }
            | MountError::NotEmpty { path }
            | MountError::MountpointInSource { path, .. }
            | MountError::AlreadyMounted { path, .. }
            | MountError::NeedsRoot { path, .. }
            | MountError::TooFewFiles { path, .. }
            | MountError::NoDevice { path }
            | MountError::NoFusermount { path }
            | MountError::Fusermount { path, .. }
            | MountError::Silent { path }
            | MountError::NotCkptfs { path, .. }
            | MountError::OtherOwner { path, .. }
            | MountError::Busy { path }
            | MountError::Io { path, .. } => path,
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            MountError::View(error) => return error.remedy(),
            MountError::NoCheckpoint(error) => return error.remedy(),
            MountError::Missing { path } => return missing_remedy(path).into(),
            MountError::NoMountpoint { path } => {
                let path = shell_word(path);
                return format!("create it first: mkdir -p {path}; or check the path").into();
            }
            MountError::NotADirectory { .. } => {
                "give an empty directory as MOUNTPOINT, after SOURCE"
            }
            MountError::NotEmpty { .. } => {
                "mount at an empty directory, or hide what is there with --nonempty"
            }
            MountError::MountpointInSource { .. } => {
                "mount outside of the source, or at the source itself"
            }
            MountError::AlreadyMounted { path, .. } => {
                return format!("unmount it first: ckptfs unmount {}", shell_word(path)).into();
            }
            MountError::NeedsRoot { .. } => "run as root, or leave the option out",
            MountError::TooFewFiles { .. } => {
                "raise the hard limit on open files: ulimit -Hn 1024 as root, LimitNOFILE=1024 in a service"
            }
            MountError::NoDevice { .. } => no_device_remedy(),
            MountError::NoFusermount { .. } => NO_FUSERMOUNT_REMEDY,
            MountError::Fusermount { message, .. } => remedy_for_fusermount(message),
            MountError::Silent { path } => {
                let path = shell_word(path);
                return format!(
                    "remove it: ckptfs unmount --lazy {path}; its daemon's log tells what it waits for"
                )
                .into();
            }
            MountError::NotCkptfs { within: Some(mountpoint), .. } => {
                return format!("give its mountpoint: {}", shell_word(mountpoint)).into();
            }
            MountError::NotCkptfs { .. } => "list the mounts: ckptfs status",
            MountError::OtherOwner { path, .. } => {
                let path = shell_word(path);
                return format!("ask that user, or as root: ckptfs unmount {path}").into();
            }
            MountError::Busy { path } => {
                let path = shell_word(path);
                return format!(
                    "close what uses it (fuser -vm {path} lists it), or detach it at once: ckptfs unmount --lazy {path}"
                )
                .into();
            }
            MountError::Io { source, .. } => remedy_for_system(source),
        })
    }
}

/// The remedy for a failed system call.
fn remedy_for_system(source: &io::Error) -> &'static str {
    match Errno::from_io_error(source) {
        Some(Errno::ACCESS | Errno::PERM) => {
            "use a directory of your own, or run as the user who may do that"
        }
        Some(Errno::NODEV) => no_device_remedy(),
        Some(Errno::LOOP | Errno::NAMETOOLONG) => "check the path",
        Some(Errno::MFILE | Errno::NFILE) => "raise the limit on open files (ulimit -n)",
        Some(Errno::AGAIN) => "raise the limit on processes and threads (ulimit -u)",
        Some(Errno::NOMEM) => "free some memory, or mount with less of it (--memory)",
        // mount(2) fails so when there are too many mounts.
        Some(Errno::NOSPC) => "unmount some, or have root raise fs.mount-max (sysctl)",
        Some(Errno::IO | Errno::STALE | Errno::NOTCONN | Errno::TIMEDOUT) => {
            "check the disk or the network filesystem that it lies on (dmesg)"
        }
        _ => "check this machine: ckptfs doctor; the kernel's log may say more (dmesg)",
    }
}

const NO_FUSERMOUNT_REMEDY: &str = "install the package fuse3, or run as root; ckptfs doctor says whether a user namespace \
     (unshare -Urm) would do";

/// The table in which fusermount3 finds the user that made a mount, before it unmounts for an ordinary user.
pub(crate) const MOUNT_TABLE: &str = "/etc/mtab";

pub(crate) const MOUNT_TABLE_REMEDY: &str =
    "have root link it to the kernel's table of mounts: ln -sf /proc/self/mounts /etc/mtab";

/// The remedy for an error of fusermount3, by its message: it has no error codes.
fn remedy_for_fusermount(message: &str) -> &'static str {
    let remedies = [
        (
            "user_allow_other",
            "have root put the line user_allow_other in /etc/fuse.conf, or leave --allow-other out",
        ),
        ("device not found", no_device_remedy()),
        ("open /dev/fuse: Permission denied", DEVICE_MODE_REMEDY),
        ("/dev/fuse", no_device_remedy()),
        (MOUNT_TABLE, MOUNT_TABLE_REMEDY),
        ("no write access to mountpoint", "mount at a directory that you may write to"),
        ("not owned by user", "mount at a directory of your own"),
        ("mounting over filesystem type", "mount at a directory on a disk, or on tmpfs"),
        ("mount_max", "unmount some, or have root raise mount_max in /etc/fuse.conf"),
        ("bad mount point", "check that the mountpoint is a directory that you can enter"),
        (
            "Operation not permitted",
            "see that fusermount3 is setuid root (reinstall fuse3); in a container, start it with --device /dev/fuse --cap-add SYS_ADMIN",
        ),
    ];
    let known = remedies.iter().find(|(text, _)| message.contains(text));
    known.map_or("mount as root, or check this machine: ckptfs doctor", |(_, remedy)| remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_helper_says_has_its_remedy() {
        let option = "fusermount3: option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf";
        assert!(remedy_for_fusermount(option).contains("user_allow_other"));
        assert!(
            remedy_for_fusermount("fuse device not found, try 'modprobe fuse' first")
                .contains("--device /dev/fuse")
        );
        for message in [
            "fusermount3: failed to open /etc/mtab: No such file or directory",
            "fusermount3: entry for /mnt/a not found in /etc/mtab",
        ] {
            assert!(remedy_for_fusermount(message).contains("ln -sf /proc/self/mounts /etc/mtab"));
        }
        assert!(
            remedy_for_fusermount("user has no write access to mountpoint /").contains("write to")
        );
        assert!(remedy_for_fusermount("something new").contains("ckptfs doctor"));
    }

    #[test]
    fn a_remedy_has_the_path_as_a_shell_takes_it() {
        let remedy = |path: &str| {
            MountError::AlreadyMounted { path: path.into(), shown: "x".into() }
                .remedy()
                .into_owned()
        };
        assert!(remedy("/mnt/a").ends_with("ckptfs unmount /mnt/a"));
        assert!(remedy("/mnt/it's here").ends_with(r"ckptfs unmount '/mnt/it'\''s here'"));
    }

    #[test]
    fn what_the_system_says_has_its_remedy() {
        let remedy =
            |errno: Errno| MountError::io(Path::new("/m"), "mount", errno).remedy().into_owned();
        for (errno, words) in [
            (Errno::NOENT, "check the path"),
            (Errno::NOTDIR, "check the path"),
            (Errno::LOOP, "check the path"),
            (Errno::ACCESS, "directory of your own"),
            (Errno::NODEV, "--device /dev/fuse"),
            (Errno::NOSPC, "fs.mount-max"),
            (Errno::MFILE, "ulimit -n"),
            (Errno::XDEV, "ckptfs doctor"),
        ] {
            assert!(remedy(errno).contains(words), "{errno}: {}", remedy(errno));
        }
    }
}
