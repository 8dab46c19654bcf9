//! What can go wrong with a mount, in words, with the remedy.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// A mount that cannot be made, found or taken away.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The source cannot be shown.
    #[error(transparent)]
    View(#[from] crate::view::ViewError),
    /// The one file that was to be shown is no checkpoint.
    #[error(transparent)]
    NoCheckpoint(#[from] crate::checkpoint::CheckpointError),
    /// Nothing has that name.
    #[error("{path}: no such file or directory")]
    Missing {
        /// The path as it was asked for.
        path: PathBuf,
    },
    /// The place to mount at is not there.
    #[error("{path}: does not exist, so nothing can be mounted there")]
    NoMountpoint {
        /// The mountpoint.
        path: PathBuf,
    },
    /// The place to mount at is not a directory.
    #[error("{path}: is not a directory, and a mountpoint must be one")]
    NotADirectory {
        /// The mountpoint.
        path: PathBuf,
    },
    /// The place to mount at has something in it.
    #[error("{path}: is not empty, and a mount would hide what is in it")]
    NotEmpty {
        /// The mountpoint.
        path: PathBuf,
    },
    /// Reading the source would lead through the mount itself.
    #[error("{mountpoint}: lies inside {path}, which it would show")]
    MountpointInSource {
        /// The source.
        path: PathBuf,
        /// The mountpoint.
        mountpoint: PathBuf,
    },
    /// There is one of ours already.
    #[error("{path}: already shows {shown}")]
    AlreadyMounted {
        /// The mountpoint.
        path: PathBuf,
        /// The source of the mount that is there.
        shown: String,
    },
    /// Only root may do that.
    #[error("{path}: {option} needs root")]
    NeedsRoot {
        /// The mountpoint.
        path: PathBuf,
        /// The option.
        option: &'static str,
    },
    /// The limit on open files is too low.
    #[error("{path}: a mount needs {needed} free file descriptors, and this process has fewer")]
    TooFewFiles {
        /// The mountpoint.
        path: PathBuf,
        /// How many must be free.
        needed: usize,
    },
    /// The system has no FUSE.
    #[error("/dev/fuse: not there, so nothing can be mounted at {path}")]
    NoDevice {
        /// The mountpoint.
        path: PathBuf,
    },
    /// Only root may mount by itself, and the program that helps others is missing.
    #[error("{path}: mounting without root needs the program fusermount3, which is not there")]
    NoFusermount {
        /// The mountpoint.
        path: PathBuf,
    },
    /// The program that mounts for ordinary users refused.
    #[error("{path}: {said}")]
    Fusermount {
        /// The mountpoint.
        path: PathBuf,
        /// What it said.
        said: String,
    },
    /// The mount is there, and its daemon does not answer.
    #[error("{path}: mounted, and does not answer")]
    Silent {
        /// The mountpoint.
        path: PathBuf,
    },
    /// Not a mount of ours.
    #[error("{path}: is no ckptfs mount: {what}")]
    NotCkptfs {
        /// The path as it was asked for.
        path: PathBuf,
        /// What it is instead.
        what: String,
        /// The mount of ours that it lies in.
        within: Option<PathBuf>,
    },
    /// A mount that somebody else made.
    #[error("{path}: was mounted by {owner}: only that user or root may unmount it")]
    OtherOwner {
        /// The mountpoint.
        path: PathBuf,
        /// Who mounted it.
        owner: String,
    },
    /// Something uses the mount.
    #[error("{path}: in use: a program has a file or its working directory there")]
    Busy {
        /// The mountpoint.
        path: PathBuf,
    },
    /// The system's own answer.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// What it was about.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
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
            // Nothing lies in what is a file.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => MountError::Missing { path },
            _ => MountError::Io { path, action, source },
        }
    }

    /// What it was about: the mountpoint or the source.
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
    pub fn remedy(&self) -> &str {
        match self {
            MountError::View(error) => error.remedy(),
            MountError::NoCheckpoint(error) => error.remedy(),
            MountError::Missing { .. } => "check the path",
            MountError::NoMountpoint { .. } => "make it first (mkdir -p PATH), or check the path",
            MountError::NotADirectory { .. } => {
                "give an empty directory as MOUNTPOINT, after SOURCE"
            }
            MountError::NotEmpty { .. } => {
                "mount at an empty directory, or hide what is there with --nonempty"
            }
            MountError::MountpointInSource { .. } => {
                "mount outside of the source, or at the source itself"
            }
            MountError::AlreadyMounted { .. } => "take that away first: ckptfs unmount PATH",
            MountError::NeedsRoot { .. } => "run as root, or leave the option out",
            MountError::TooFewFiles { .. } => {
                "raise the hard limit on open files: ulimit -Hn 1024 as root, LimitNOFILE=1024 in a service"
            }
            MountError::NoDevice { .. } => NO_DEVICE_REMEDY,
            MountError::NoFusermount { .. } => NO_FUSERMOUNT_REMEDY,
            MountError::Fusermount { said, .. } => remedy_for_fusermount(said),
            MountError::Silent { .. } => {
                "take it away with: ckptfs unmount --lazy PATH; what its daemon waits for stands in its log (--log-file)"
            }
            MountError::NotCkptfs { within: Some(_), .. } => "give the path that it is mounted at",
            MountError::NotCkptfs { .. } => "ckptfs status lists the mounts that are there",
            MountError::OtherOwner { .. } => "ask that user, or as root: ckptfs unmount PATH",
            MountError::Busy { .. } => {
                "close what uses it (fuser -vm PATH tells), or detach it at once with --lazy"
            }
            MountError::Io { source, .. } => remedy_for_system(source),
        }
    }
}

/// What helps where a system call on the way to a mount fails.
fn remedy_for_system(source: &io::Error) -> &'static str {
    match Errno::from_io_error(source) {
        Some(Errno::ACCESS | Errno::PERM) => {
            "use a directory of your own, or run as the user who may do that"
        }
        Some(Errno::NODEV) => NO_DEVICE_REMEDY,
        Some(Errno::LOOP | Errno::NAMETOOLONG) => "check the path",
        Some(Errno::MFILE | Errno::NFILE) => "raise the limit on open files (ulimit -n)",
        Some(Errno::AGAIN) => "raise the limit on processes and threads (ulimit -u)",
        Some(Errno::NOMEM) => "free some memory, or mount with less of it (--memory)",
        // What mount(2) says where there are too many.
        Some(Errno::NOSPC) => "unmount some, or have root raise fs.mount-max (sysctl)",
        Some(Errno::IO | Errno::STALE | Errno::NOTCONN | Errno::TIMEDOUT) => {
            "see whether the disk or the network filesystem that it lies on works (dmesg tells)"
        }
        _ => "ckptfs doctor looks at what a mount needs; the kernel's log may say more (dmesg)",
    }
}

pub(crate) const NO_DEVICE_REMEDY: &str = "load the module (modprobe fuse); in a container, start it with --device /dev/fuse --cap-add SYS_ADMIN";

/// fusermount3 opens the device as the user who calls it.
pub(crate) const DEVICE_MODE_REMEDY: &str = "have root let everybody open the device, as distributions do: chmod 666 /dev/fuse; \
     to last, a file in /etc/udev/rules.d with the line KERNEL==\"fuse\", MODE=\"0666\"";

const NO_FUSERMOUNT_REMEDY: &str = "install the package fuse3, or run as root; ckptfs doctor says whether a user namespace \
     (unshare -Urm) would do";

/// What helps where fusermount3 refuses; its words are the only way to tell why.
fn remedy_for_fusermount(said: &str) -> &'static str {
    let remedies = [
        (
            "user_allow_other",
            "have root put the line user_allow_other in /etc/fuse.conf, or leave --allow-other out",
        ),
        ("device not found", NO_DEVICE_REMEDY),
        ("open /dev/fuse: Permission denied", DEVICE_MODE_REMEDY),
        ("/dev/fuse", NO_DEVICE_REMEDY),
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
    let found = remedies.iter().find(|(words, _)| said.contains(words));
    found.map_or("mount as root, or see what ckptfs doctor says of this machine", |(_, remedy)| {
        remedy
    })
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
                .contains("modprobe")
        );
        assert!(
            remedy_for_fusermount("user has no write access to mountpoint /").contains("write to")
        );
        assert!(remedy_for_fusermount("something new").contains("ckptfs doctor"));
    }

    #[test]
    fn what_the_system_says_has_its_remedy() {
        let remedy =
            |errno: Errno| MountError::io(Path::new("/m"), "mount", errno).remedy().to_owned();
        for (errno, words) in [
            (Errno::NOENT, "check the path"),
            (Errno::NOTDIR, "check the path"),
            (Errno::LOOP, "check the path"),
            (Errno::ACCESS, "directory of your own"),
            (Errno::NODEV, "modprobe fuse"),
            (Errno::NOSPC, "fs.mount-max"),
            (Errno::MFILE, "ulimit -n"),
            (Errno::XDEV, "ckptfs doctor"),
        ] {
            assert!(remedy(errno).contains(words), "{errno}: {}", remedy(errno));
        }
    }
}
