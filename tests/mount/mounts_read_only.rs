//! Every write is refused with EROFS: on files, virtual files, directories and missing names, and also on a
//! mount that was made writable.

#![allow(unsafe_code)] // Raw system calls; each gets text that outlives it.

use std::ffi::{CStr, CString};
use std::fs;
use std::io::Error;
use std::path::Path;
use std::ptr::null;

use crate::common::command;
use crate::common::mounting::MountFixture;
use libc::*;
use rustix::mount::{MountFlags, mount_remount};

/// An operation on an existing path.
type OnPath = fn(&CStr) -> i32;
/// An operation on an existing path and a missing name in the same mount.
type OnTwo = fn(&CStr, &CStr) -> i32;

const VALUE: *const c_void = c"value".as_ptr().cast();

/// Opens with these flags, and closes a descriptor that should not exist.
fn opened(path: &CStr, flags: c_int) -> i32 {
    let fd = unsafe { open(path.as_ptr(), flags, 0o644) };
    if fd >= 0 {
        unsafe { close(fd) };
    }
    fd
}

/// Opens for reading, and acts on the descriptor.
fn with_open(path: &CStr, act: impl FnOnce(c_int) -> i32) -> i32 {
    let fd = unsafe { open(path.as_ptr(), O_RDONLY) };
    assert!(fd >= 0, "{path:?} can be read");
    let outcome = act(fd);
    let error = Error::last_os_error();
    unsafe {
        close(fd);
        *__errno_location() = error.raw_os_error().unwrap();
    }
    outcome
}

const ON_FILES: &[(&str, OnPath)] = &[
    ("open for writing", |p| opened(p, O_WRONLY)),
    ("open for both", |p| opened(p, O_RDWR)),
    ("open for appending", |p| opened(p, O_WRONLY | O_APPEND)),
    ("open past the cache", |p| opened(p, O_RDWR | O_DIRECT)),
    ("open and truncate", |p| opened(p, O_RDWR | O_TRUNC)),
    ("read and truncate", |p| opened(p, O_RDONLY | O_TRUNC)),
    ("create what is there", |p| opened(p, O_WRONLY | O_CREAT)),
    ("truncate", |p| unsafe { truncate(p.as_ptr(), 0) }),
    ("unlink", |p| unsafe { unlink(p.as_ptr()) }),
];

const ON_DIRECTORIES: &[(&str, OnPath)] = &[("rmdir", |p| unsafe { rmdir(p.as_ptr()) })];

const ON_ALL: &[(&str, OnPath)] = &[
    ("chmod", |p| unsafe { chmod(p.as_ptr(), 0o600) }),
    ("chown", |p| unsafe { chown(p.as_ptr(), 1, 1) }),
    ("lchown", |p| unsafe { lchown(p.as_ptr(), 1, 1) }),
    ("utimensat", |p| unsafe { utimensat(AT_FDCWD, p.as_ptr(), null(), 0) }),
    ("setxattr", |p| unsafe { setxattr(p.as_ptr(), c"user.x".as_ptr(), VALUE, 5, 0) }),
    ("setxattr of ours", |p| unsafe {
        setxattr(p.as_ptr(), c"user.ckptfs.layout".as_ptr(), VALUE, 5, 0)
    }),
    ("removexattr", |p| unsafe { removexattr(p.as_ptr(), c"user.ckptfs.layout".as_ptr()) }),
    ("fchmod", |p| with_open(p, |fd| unsafe { fchmod(fd, 0o600) })),
    ("fchown", |p| with_open(p, |fd| unsafe { fchown(fd, 1, 1) })),
    ("futimens", |p| with_open(p, |fd| unsafe { futimens(fd, null()) })),
    ("fsetxattr", |p| with_open(p, |fd| unsafe { fsetxattr(fd, c"user.x".as_ptr(), VALUE, 5, 0) })),
];

const ON_NEW: &[(&str, OnPath)] = &[
    ("create", |p| opened(p, O_WRONLY | O_CREAT)),
    ("create to read", |p| opened(p, O_RDONLY | O_CREAT)),
    ("create anew", |p| opened(p, O_RDWR | O_CREAT | O_EXCL)),
    ("mkdir", |p| unsafe { mkdir(p.as_ptr(), 0o755) }),
    ("mknod of a file", |p| unsafe { mknod(p.as_ptr(), S_IFREG | 0o644, 0) }),
    ("mknod of a pipe", |p| unsafe { mkfifo(p.as_ptr(), 0o644) }),
    ("mknod of a device", |p| unsafe { mknod(p.as_ptr(), S_IFCHR | 0o644, makedev(1, 3)) }),
    ("symlink", |p| unsafe { symlink(c"target".as_ptr(), p.as_ptr()) }),
];

const ON_BOTH: &[(&str, OnTwo)] = &[
    ("rename", |p, new| unsafe { rename(p.as_ptr(), new.as_ptr()) }),
    ("rename to nothing else", |p, new| unsafe {
        renameat2(AT_FDCWD, p.as_ptr(), AT_FDCWD, new.as_ptr(), RENAME_NOREPLACE)
    }),
];

const LINK: OnTwo = |p, new| unsafe { link(p.as_ptr(), new.as_ptr()) };

fn refused(what: &str, path: &Path, act: impl FnOnce(&CStr) -> i32) {
    let text = CString::new(path.to_str().unwrap()).unwrap();
    let outcome = act(&text);
    let error = Error::last_os_error();
    assert_eq!((outcome, error.raw_os_error()), (-1, Some(EROFS)), "{what} of {path:?}: {error}");
}

/// Tries every operation, and asserts that the mount shows what it did before.
fn nothing_is_written(fixture: &MountFixture) {
    let root = Path::new(&fixture.mountpoint);
    let folder = root.join("folder");
    let files = [root.join("model.safetensors"), folder.join("virtual_file.safetensors")];
    let before = shown(root);
    for file in &files {
        for (what, act) in ON_FILES {
            refused(what, file, act);
        }
    }
    for (what, act) in ON_DIRECTORIES {
        refused(what, &folder, act);
    }
    for path in files.iter().chain([&folder]) {
        for (what, act) in ON_ALL {
            refused(what, path, act);
        }
        let new = path.with_file_name("new");
        let name = CString::new(new.to_str().unwrap()).unwrap();
        for (what, act) in ON_BOTH {
            refused(what, path, |text| act(text, &name));
        }
        if path.is_file() {
            refused("link", path, |text| LINK(text, &name));
        }
    }
    for within in [root, &folder] {
        for (what, act) in ON_NEW {
            refused(what, &within.join("new"), act);
        }
    }
    // A file that is open for reading cannot be written, nor mapped for writing.
    for file in &files {
        let text = CString::new(file.to_str().unwrap()).unwrap();
        let write = |fd| unsafe { write(fd, VALUE, 5) as i32 };
        assert_eq!(with_open(&text, write), -1);
        assert_eq!(with_open(&text, |fd| unsafe { fallocate(fd, 0, 0, 1) }), -1);
        let map = |fd| {
            let at = unsafe { mmap(null::<c_void>().cast_mut(), 1, PROT_WRITE, MAP_SHARED, fd, 0) };
            if at == MAP_FAILED { -1 } else { 0 }
        };
        assert_eq!(with_open(&text, map), -1);
    }
    assert_eq!(shown(root), before);
}

fn shown(root: &Path) -> Vec<(String, Vec<u8>)> {
    let names = ["model.safetensors", "folder/virtual_file.safetensors"];
    names.map(|name| (name.to_owned(), fs::read(root.join(name)).unwrap())).to_vec()
}

fn fixture() -> MountFixture {
    let fixture = MountFixture::new();
    let folder = Path::new(&fixture.source).join("folder");
    fs::create_dir(&folder).unwrap();
    command::write_transposed(&folder.join("virtual_file.pt"), 64);
    fixture
}

#[test]
fn every_write_is_refused_on_a_plain_mount() {
    let fixture = fixture();
    fixture.mount(&[]);
    nothing_is_written(&fixture);
    // A file without a name: the kernel itself refuses.
    refused("a file without a name", Path::new(&fixture.mountpoint), |p| {
        opened(p, O_TMPFILE | O_RDWR)
    });
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn every_write_is_refused_on_a_mount_made_writable() {
    for options in [&[][..], &["--no-passthrough"]] {
        let fixture = fixture();
        fixture.mount(options);
        mount_remount(fixture.mountpoint.as_str(), MountFlags::empty(), "").unwrap();
        let table = fs::read_to_string("/proc/self/mounts").unwrap();
        let line = table.lines().find(|line| line.contains(&fixture.mountpoint)).unwrap();
        assert!(line.contains("fuse.ckptfs rw"), "{line}");
        nothing_is_written(&fixture);
        let root = CString::new(fixture.mountpoint.as_str()).unwrap();
        assert_eq!(opened(&root, O_TMPFILE | O_RDWR), -1);
        assert_eq!(fs::read_dir(&fixture.source).unwrap().count(), 2);
        assert_eq!(fixture.unmount(&[]).code, 0);
    }
}
