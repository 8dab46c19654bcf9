//! fusermount3, the setuid program that mounts and unmounts for ordinary users.

use std::ffi::OsString;
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};

use crate::mount::error::MountError;

/// The names of versions 3 and 2, which take the same options.
const PROGRAM_NAMES: [&str; 2] = ["fusermount3", "fusermount"];

/// Where it is searched after `PATH`: the directories of distributions, then that of setuid programs on NixOS.
const FALLBACK_DIRECTORIES: [&str; 5] =
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin", "/run/wrappers/bin"];

/// It replies within milliseconds; after a minute it never will.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Its error messages are a line or two.
const MAX_STDERR_BYTES: u64 = 4096;

/// The path of the program, if it is installed.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories: Vec<PathBuf> =
        std::env::split_paths(&path).chain(FALLBACK_DIRECTORIES.map(PathBuf::from)).collect();
    PROGRAM_NAMES.iter().find_map(|name| {
        directories.iter().map(|directory| directory.join(name)).find(|program| {
            program.is_absolute()
                && program.metadata().is_ok_and(|metadata| {
                    metadata.is_file() && metadata.permissions().mode() & 0o111 != 0
                })
        })
    })
}

fn command(mountpoint: &Path) -> Result<Command, MountError> {
    let program =
        find().ok_or_else(|| MountError::NoFusermount { path: mountpoint.to_path_buf() })?;
    let mut command = Command::new(program);
    // Its messages are matched, so they must be in English.
    command.env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}

/// Runs it to its end. Its messages become the error.
fn run(command: &mut Command, mountpoint: &Path) -> Result<(), MountError> {
    let child = command.spawn().map_err(|e| MountError::io(mountpoint, "run fusermount3", e))?;
    finish(child, mountpoint)
}

fn finish(mut child: std::process::Child, mountpoint: &Path) -> Result<(), MountError> {
    let mut message = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        // If this fails, only the message suffers.
        let _ = stderr.take(MAX_STDERR_BYTES).read_to_end(&mut message);
    }
    let status = child.wait().map_err(|e| MountError::io(mountpoint, "wait for fusermount3", e))?;
    if status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&message).trim().to_owned();
    let message =
        if message.is_empty() { format!("fusermount3 failed: {status}") } else { message };
    Err(MountError::Fusermount { path: mountpoint.to_path_buf(), message })
}

/// Mounts with the options of `fusermount3 -o`, and returns the descriptor of /dev/fuse.
pub(super) fn mount(mountpoint: &Path, options: OsString) -> Result<OwnedFd, MountError> {
    let failed = |e: rustix::io::Errno| MountError::io(mountpoint, "talk to fusermount3", e);
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
    set_socket_timeout(&ours, Timeout::Recv, Some(REPLY_TIMEOUT)).map_err(failed)?;
    let mut command = command(mountpoint)?;
    // The socket is its standard input, so no other descriptor has to be inheritable.
    command.arg("-o").arg(options).arg("--").arg(mountpoint);
    command.env("_FUSE_COMMFD", "0").stdin(theirs);
    let child = command.spawn().map_err(|e| MountError::io(mountpoint, "run fusermount3", e))?;
    // Closes our copy of its end of the socket, so that its own copy is the last.
    drop(command);
    let received = receive(&ours);
    drop(ours);
    finish(child, mountpoint)?;
    received.map_err(failed)?.ok_or_else(|| MountError::Fusermount {
        path: mountpoint.to_path_buf(),
        message: "fusermount3 ended without handing /dev/fuse over".to_owned(),
    })
}

fn receive(socket: &OwnedFd) -> rustix::io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let read = || {
        let mut parts = [IoSliceMut::new(&mut byte)];
        recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    };
    rustix::io::retry_on_intr(read)?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

/// Unmounts a mount of this user.
pub(super) fn unmount(mountpoint: &Path, lazy: bool) -> Result<(), MountError> {
    let mut command = command(mountpoint)?;
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    // With a working directory inside the mount, it would keep the mount busy itself.
    command.current_dir("/").arg("--").arg(mountpoint);
    match run(&mut command, mountpoint) {
        Err(MountError::Fusermount { path, message }) if message.contains("busy") => {
            tracing::debug!("{message}");
            Err(MountError::Busy { path })
        }
        done => done,
    }
}
