//! fusermount3, the setuid program that mounts and unmounts for ordinary users.
//!
//! In: options and a mountpoint. Out: the descriptor of /dev/fuse that it mounted, or its refusal.

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

/// Today's name, and that of version 2, which takes the same options.
const PROGRAM_NAMES: [&str; 2] = ["fusermount3", "fusermount"];

/// Where it lies when `PATH` does not say: distributions, then NixOS, which keeps its setuid programs there.
const FALLBACK_DIRECTORIES: [&str; 5] =
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin", "/run/wrappers/bin"];

/// It answers within milliseconds; a minute without an answer means that it never will.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// A refusal is a line or two.
const MAX_STDERR_BYTES: u64 = 4096;

/// The program, if it is there.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> =
        std::env::split_paths(&path).chain(FALLBACK_DIRECTORIES.map(PathBuf::from)).collect();
    PROGRAM_NAMES.iter().find_map(|name| {
        places.iter().map(|place| place.join(name)).find(|program| {
            program.is_absolute()
                && program
                    .metadata()
                    .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        })
    })
}

fn command(mountpoint: &Path) -> Result<Command, MountError> {
    let program =
        find().ok_or_else(|| MountError::NoFusermount { path: mountpoint.to_path_buf() })?;
    let mut command = Command::new(program);
    // Its words are read: they must be the ones we know.
    command.env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}

/// Runs it to its end; what it said becomes the error.
fn run(command: &mut Command, mountpoint: &Path) -> Result<(), MountError> {
    let child = command.spawn().map_err(|e| MountError::io(mountpoint, "run fusermount3", e))?;
    finish(child, mountpoint)
}

fn finish(mut child: std::process::Child, mountpoint: &Path) -> Result<(), MountError> {
    let mut said = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        // What cannot be read of its words is missing from the message, no more.
        let _ = stderr.take(MAX_STDERR_BYTES).read_to_end(&mut said);
    }
    let status = child.wait().map_err(|e| MountError::io(mountpoint, "wait for fusermount3", e))?;
    if status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&said).trim().to_owned();
    let said = if said.is_empty() { format!("fusermount3 failed: {status}") } else { said };
    Err(MountError::Fusermount { path: mountpoint.to_path_buf(), said })
}

/// Mounts with options as `fusermount3 -o` takes them.
pub(in crate::mount) fn mount(mountpoint: &Path, options: OsString) -> Result<OwnedFd, MountError> {
    let failed = |e: rustix::io::Errno| MountError::io(mountpoint, "talk to fusermount3", e);
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
    set_socket_timeout(&ours, Timeout::Recv, Some(REPLY_TIMEOUT)).map_err(failed)?;
    let mut command = command(mountpoint)?;
    // The socket is its standard input: so nothing else of ours need be inheritable.
    command.arg("-o").arg(options).arg("--").arg(mountpoint);
    command.env("_FUSE_COMMFD", "0").stdin(theirs);
    let child = command.spawn().map_err(|e| MountError::io(mountpoint, "run fusermount3", e))?;
    // Our copy of its end goes, so that its end is the end.
    drop(command);
    let received = receive(&ours);
    drop(ours);
    finish(child, mountpoint)?;
    received.map_err(failed)?.ok_or_else(|| MountError::Fusermount {
        path: mountpoint.to_path_buf(),
        said: "fusermount3 ended without handing /dev/fuse over".to_owned(),
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

/// Unmounts what this user mounted.
pub(in crate::mount) fn unmount(mountpoint: &Path, lazy: bool) -> Result<(), MountError> {
    let mut command = command(mountpoint)?;
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    // Called from within the mount it would hold it up itself.
    command.current_dir("/").arg("--").arg(mountpoint);
    match run(&mut command, mountpoint) {
        Err(MountError::Fusermount { path, said }) if said.contains("busy") => {
            tracing::debug!("{said}");
            Err(MountError::Busy { path })
        }
        done => done,
    }
}
