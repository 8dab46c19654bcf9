//! Resolves paths that are too long for one system call, in pieces. Each piece starts at the directory where the
//! one before it ended.
//!
//! With `RESOLVE_BENEATH`, each piece must stay beneath its own start. In a longer path, a link that leads further
//! up fails with `EXDEV`, as one that leads out of the directory does.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat, openat2};
use rustix::io::Errno;

use crate::source::file_limit::open_within_limit;

/// Length of the longest path that one system call takes, with the NUL that ends it.
const MAX_CALL_PATH_BYTES: usize = 4096;

/// Length of the longest path. A name takes memory, and a link takes time, in proportion to its path.
const MAX_PATH_BYTES: usize = 16 << 10;

/// Opens a file at a path of any supported length.
pub fn open(
    dir: impl AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    with_last_piece(dir, path, resolve, |dir, path| {
        open_within_limit(|| retry(|| openat2(dir, path, flags, Mode::empty(), resolve)))
    })
}

/// The target of a symbolic link.
pub fn read_link(dir: impl AsFd, path: &Path) -> Result<PathBuf, Errno> {
    with_last_piece(dir, path, ResolveFlags::empty(), |dir, path| {
        let target = rustix::fs::readlinkat(dir, path, Vec::new())?;
        Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
    })
}

/// The status of a file; a link at the end of the path is not followed.
pub fn stat(dir: impl AsFd, path: &Path) -> Result<Stat, Errno> {
    with_last_piece(dir, path, ResolveFlags::empty(), |dir, path| {
        rustix::fs::statat(dir, path, AtFlags::SYMLINK_NOFOLLOW)
    })
}

/// Walks to the directory where the last piece of a path starts, and calls `last` with both.
fn with_last_piece<D: AsFd, T>(
    dir: D,
    path: &Path,
    resolve: ResolveFlags,
    last: impl FnOnce(BorrowedFd<'_>, &Path) -> Result<T, Errno>,
) -> Result<T, Errno> {
    if path.as_os_str().len() > MAX_PATH_BYTES {
        return Err(Errno::NAMETOOLONG);
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut held: Option<OwnedFd> = None;
    let mut rest = path;
    while let Some((piece, after)) = split(rest)? {
        let from = held.as_ref().map_or(dir.as_fd(), AsFd::as_fd);
        let open = || retry(|| openat2(from, piece, flags, Mode::empty(), resolve));
        held = Some(open_within_limit(open)?);
        rest = after;
    }
    last(held.as_ref().map_or(dir.as_fd(), AsFd::as_fd), rest)
}

/// Splits off the longest leading piece that one system call takes; `None` if it takes the whole path.
fn split(path: &Path) -> Result<Option<(&Path, &Path)>, Errno> {
    let bytes = path.as_os_str().as_bytes();
    let Some(most) = bytes.get(..MAX_CALL_PATH_BYTES) else { return Ok(None) };
    let slash = most.iter().rposition(|&byte| byte == b'/').ok_or(Errno::NAMETOOLONG)?;
    let piece = if slash == 0 { b"/" } else { &bytes[..slash] };
    let after = &bytes[slash..];
    // A path that ends with a slash is the directory itself.
    let after = after.iter().position(|&byte| byte != b'/').map_or(&b"."[..], |at| &after[at..]);
    let as_path = |bytes| Path::new(OsStr::from_bytes(bytes));
    Ok(Some((as_path(piece), as_path(after))))
}

/// Repeats a call that was interrupted, or for which the kernel saw a rename race with the walk.
fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) => {}
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(path: &str) -> Vec<String> {
        let (mut found, mut rest) = (Vec::new(), Path::new(path));
        while let Some((piece, after)) = split(rest).unwrap() {
            found.push(piece.to_str().unwrap().to_owned());
            rest = after;
        }
        found.push(rest.to_str().unwrap().to_owned());
        found
    }

    #[test]
    fn a_path_is_split_only_where_the_kernel_would_not_take_it() {
        let name = |bytes: usize| "x".repeat(bytes);
        assert_eq!(pieces(&name(4095)), [name(4095)]);
        assert_eq!(split(Path::new(&name(4096))), Err(Errno::NAMETOOLONG));
        for (path, expected) in [
            (format!("{}/{}", name(4000), name(94)), vec![format!("{}/{}", name(4000), name(94))]),
            (format!("{}/{}", name(4000), name(95)), vec![name(4000), name(95)]),
            (format!("{}/y", name(4095)), vec![name(4095), "y".to_owned()]),
            (format!("{}///y", name(4095)), vec![name(4095), "y".to_owned()]),
            (format!("{}/", name(4095)), vec![name(4095), ".".to_owned()]),
            (format!("/{}", name(4095)), vec!["/".to_owned(), name(4095)]),
        ] {
            assert_eq!(pieces(&path), expected);
        }
        let deep = vec![name(100); 100].join("/");
        let joined = pieces(&deep);
        assert_eq!((joined.len(), joined.join("/")), (3, deep));
        assert!(joined.iter().all(|piece| piece.len() < MAX_CALL_PATH_BYTES));
    }
}
