//! Traces on disk: a stored one is followed by the next load, and a wrong one harms no load.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::time::SystemTime;

use super::*;
use crate::cache::prefetch::trace::ChunkMap;

const NAME: &str = "00112233445566778899aabbccddeeff";

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn read_back(folder: &Path) -> io::Result<Vec<u8>> {
    read_trace(open_private(folder)?, NAME)
}

#[test]
fn a_stored_trace_is_read_back_and_private() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("cache/ckptfs/orders");
    assert!(read_back(&folder).is_err());
    write_trace(&folder, NAME, b"one").unwrap();
    write_trace(&folder, NAME, b"another").unwrap();
    assert_eq!(read_back(&folder).unwrap(), b"another");
    assert_eq!(names(&folder), [NAME]);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!((mode(&folder), mode(&folder.join(NAME))), (0o700, 0o600));
    // The same again is not written.
    let number = |path: &Path| fs::metadata(path).unwrap().ino();
    let before = number(&folder.join(NAME));
    write_trace(&folder, NAME, b"another").unwrap();
    assert_eq!(number(&folder.join(NAME)), before);
}

#[test]
fn files_that_others_may_have_written_are_not_believed() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("orders");
    let file = folder.join(NAME);
    write_trace(&folder, NAME, b"one").unwrap();
    for (path, usual) in [(&folder, 0o700), (&file, 0o600)] {
        for others in [0o020, 0o002] {
            mode(path, usual | others);
            assert!(read_back(&folder).is_err(), "{path:?}");
        }
        mode(path, usual);
    }
    if rustix::process::geteuid().is_root() {
        for path in [&folder, &file] {
            std::os::unix::fs::chown(path, Some(1), None).unwrap();
            assert!(read_back(&folder).is_err(), "{path:?}");
            std::os::unix::fs::chown(path, Some(0), None).unwrap();
        }
        // Nor is anything created in another user's directory.
        let home = place.path().join("home");
        fs::create_dir(&home).unwrap();
        std::os::unix::fs::chown(&home, Some(1), None).unwrap();
        assert!(write_trace(&home.join("ckptfs/orders"), NAME, b"one").is_err());
        assert!(names(&home).is_empty());
    }
    assert_eq!(read_back(&folder).unwrap(), b"one");
    let link = place.path().join("link");
    symlink(&folder, &link).unwrap();
    assert!(read_back(&link).is_err() && write_trace(&link, NAME, b"two").is_err());
    fs::rename(&file, place.path().join("elsewhere")).unwrap();
    symlink(place.path().join("elsewhere"), &file).unwrap();
    assert!(read_back(&folder).is_err());
    // It is the link that is replaced.
    write_trace(&folder, NAME, b"two").unwrap();
    assert_eq!(fs::read(place.path().join("elsewhere")).unwrap(), b"one");
    fs::remove_file(&file).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &file, Mode::RWXU).unwrap();
    assert!(read_back(&folder).is_err());
}

#[test]
fn a_large_file_is_not_read_to_its_end() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("orders");
    write_trace(&folder, NAME, b"one").unwrap();
    File::options().write(true).open(folder.join(NAME)).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(read_back(&folder).unwrap().len(), MAX_TRACE_BYTES);
}

#[test]
fn the_oldest_traces_above_the_limits_are_removed_and_other_files_stay() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("orders");
    let name = |n: usize| format!("{n:032x}");
    write_trace(&folder, "notes.txt", b"kept").unwrap();
    for n in 0..MAX_FILES + 3 {
        write_trace(&folder, &name(n), b"one").unwrap();
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(n as u64);
        File::open(folder.join(name(n))).unwrap().set_modified(at).unwrap();
    }
    // What a killed writer left.
    fs::rename(folder.join(name(3)), folder.join(".ckptfs-77-1.part")).unwrap();
    write_trace(&folder, &name(999), b"one").unwrap();
    let left = names(&folder);
    assert_eq!((left.len(), &left[0]), (MAX_FILES + 1, &name(4)));
    assert!(left.contains(&"notes.txt".to_owned()));
    write_trace(&folder, &name(1000), &vec![0; MAX_TOTAL_BYTES as usize - 10]).unwrap();
    let left = names(&folder);
    assert_eq!(
        left,
        [name(MAX_FILES + 1), name(MAX_FILES + 2), name(999), name(1000), "notes.txt".into()]
    );
}

#[test]
fn a_trace_stored_again_is_new_again() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("orders");
    write_trace(&folder, NAME, b"one").unwrap();
    File::open(folder.join(NAME)).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    write_trace(&folder, NAME, b"one").unwrap();
    let since = fs::metadata(folder.join(NAME)).unwrap().modified().unwrap().elapsed().unwrap();
    assert!(since < Duration::from_secs(60));
}

#[test]
fn no_folder_is_created_behind_another_users_link() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let (mine, link) = (place.path().join("mine"), place.path().join("link"));
    fs::create_dir(&mine).unwrap();
    symlink(&mine, &link).unwrap();
    std::os::unix::fs::lchown(&link, Some(1), None).unwrap();
    assert!(write_trace(&link.join("ckptfs/orders"), NAME, b"one").is_err());
    assert!(names(&mine).is_empty());
    std::os::unix::fs::lchown(&link, Some(0), None).unwrap();
    write_trace(&link.join("ckptfs/orders"), NAME, b"one").unwrap();
}

fn hash() -> Digest {
    let made = crate::virtual_file::VirtualFile::from_bytes(vec![0; 4096]);
    made.layout_hash()
}

/// The trace of a file of 100 MiB, read from its end to its start.
fn backwards() -> AccessTrace {
    let mut trace = AccessTrace::new(100 << 20).unwrap();
    for at in (0..100).rev() {
        trace.record(&(at << 20..(at + 1) << 20));
    }
    trace
}

fn until(mut holds: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_load_is_followed_by_the_next_whether_its_file_was_closed_or_is_still_open() {
    for is_closed in [true, false] {
        let place = tempfile::tempdir().unwrap();
        let store = TraceStore::new(place.path().join("orders"));
        let handle = store.open(hash(), backwards());
        if is_closed {
            drop(handle);
            store.flush();
        } else {
            store.flush();
            assert!(place.path().join("orders").exists());
            drop(handle);
        }
        let handle = store.open(hash(), AccessTrace::new(100 << 20).unwrap());
        lock(&handle.trace).record(&(99 << 20..100 << 20));
        let mut ahead = Vec::new();
        until(|| {
            ahead = lock(&handle.trace).next_ranges(32 << 20);
            !ahead.is_empty()
        });
        assert_eq!(ahead[0], 98 << 20..99 << 20);
    }
}

#[test]
fn no_load_and_a_failed_write_leave_nothing() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("orders");
    let store = TraceStore::new(folder.clone());
    drop(store.open(hash(), AccessTrace::new(100 << 20).unwrap()));
    store.flush();
    assert!(!folder.exists());
    fs::write(&folder, b"in the way").unwrap();
    drop(store.open(hash(), backwards()));
    store.flush();
    assert_eq!(names(place.path()), ["orders"]);
}

#[test]
fn a_damaged_trace_is_not_followed_and_the_next_load_replaces_it() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("orders");
    write_trace(&folder, &hash().to_string(), b"no order").unwrap();
    let store = TraceStore::new(folder.clone());
    drop(store.open(hash(), backwards()));
    store.flush();
    let written = fs::read(folder.join(hash().to_string())).unwrap();
    assert!(decode_trace(&written, ChunkMap::new(100 << 20)).is_some_and(|trace| trace[0] == 99));
}
