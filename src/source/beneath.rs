//! Paths from a directory that may be longer than a call of the system takes: they are resolved in pieces,
//! each from the directory that the one before leads to.
//!
//! Of what is resolved beneath the directory, each piece stays beneath where it begins: a longer path on which
//! a link leads further up than that is `EXDEV`, as one that leads out.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat, openat2};
use rustix::io::Errno;

/// What the kernel takes of a path at once, with the byte that ends it.
const PIECE_BYTES: usize = 4096;

/// The longest path. What a name costs in memory, and a link in time, grows with its path.
const MAX_PATH_BYTES: usize = 16 << 10;

/// Opens what is at a path.
pub fn open(
    dir: impl AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    resolved(dir, path, resolve, |dir, path| {
        again(|| openat2(dir, path, flags, Mode::empty(), resolve))
    })
}

/// What a link says.
pub fn read_link(dir: impl AsFd, path: &Path) -> Result<PathBuf, Errno> {
    resolved(dir, path, ResolveFlags::empty(), |dir, path| {
        let target = rustix::fs::readlinkat(dir, path, Vec::new())?;
        Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
    })
}

/// What the system says of it, a link at its end not followed.
pub fn stat(dir: impl AsFd, path: &Path) -> Result<Stat, Errno> {
    resolved(dir, path, ResolveFlags::empty(), |dir, path| {
        rustix::fs::statat(dir, path, AtFlags::SYMLINK_NOFOLLOW)
    })
}

/// Does it with the last piece of a path, and the directory where that begins.
fn resolved<D: AsFd, T>(
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
        held = Some(again(|| openat2(from, piece, flags, Mode::empty(), resolve))?);
        rest = after;
    }
    last(held.as_ref().map_or(dir.as_fd(), AsFd::as_fd), rest)
}

/// As many of the first names of a path as the kernel takes, and the rest; nothing where it takes all.
fn split(path: &Path) -> Result<Option<(&Path, &Path)>, Errno> {
    let bytes = path.as_os_str().as_bytes();
    let Some(most) = bytes.get(..PIECE_BYTES) else { return Ok(None) };
    let slash = most.iter().rposition(|&byte| byte == b'/').ok_or(Errno::NAMETOOLONG)?;
    let piece = if slash == 0 { b"/" } else { &bytes[..slash] };
    let after = &bytes[slash..];
    // One that ends with a slash is the directory itself.
    let after = after.iter().position(|&byte| byte != b'/').map_or(&b"."[..], |at| &after[at..]);
    let as_path = |bytes| Path::new(OsStr::from_bytes(bytes));
    Ok(Some((as_path(piece), as_path(after))))
}

/// The kernel asks for another try when a rename raced with the walk.
fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
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
        assert!(joined.iter().all(|piece| piece.len() < PIECE_BYTES));
    }
}
