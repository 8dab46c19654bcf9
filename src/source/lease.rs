//! Read leases (fcntl(2), `F_SETLEASE`): while one is held, a program that opens the file for writing, or truncates it,
//! waits; with `O_NONBLOCK` it gets EAGAIN.
//!
//! The kernel grants one only while no program has the file open for writing, and only for files of this user. A lease
//! belongs to an open file, not to a thread: threads that share a descriptor share the lease.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// The command that chooses the signal to send when a program waits for a lease. The crate libc lacks it.
const F_SETSIG: libc::c_int = 10;

/// Takes a lease. `EAGAIN` if a program has the file open for writing.
pub fn take(descriptor: BorrowedFd<'_>) -> Result<(), Errno> {
    // When a program waits for the lease, the kernel would send SIGIO, which ends this process. SIGURG is ignored by
    // default. The kernel forgets the choice when the lease is given back.
    call(descriptor, F_SETSIG, libc::SIGURG)?;
    call(descriptor, libc::F_SETLEASE, libc::F_RDLCK)
}

/// Gives a lease back.
pub fn give_back(descriptor: BorrowedFd<'_>) -> Result<(), Errno> {
    call(descriptor, libc::F_SETLEASE, libc::F_UNLCK)
}

#[allow(unsafe_code)] // rustix has no leases.
fn call(descriptor: BorrowedFd<'_>, command: libc::c_int, value: libc::c_int) -> Result<(), Errno> {
    // SAFETY: these commands take a number and touch no memory of ours.
    if unsafe { libc::fcntl(descriptor.as_raw_fd(), command, value) } == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Err(Errno::from_raw_os_error(error))
}
