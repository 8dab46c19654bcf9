//! A file takes its name whole, and what a dead process left is removed.

use std::io::Write;

use super::*;

const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// tests/python/save/test_killed_while_saving.py has the same names.
#[test]
fn the_name_that_goes_with_another_is_known_everywhere() {
    let of = |directory, name| hidden_path(Path::new(directory), OsStr::new(name));
    assert_eq!(of("a", "model.safetensors"), Path::new("a/.ckptfs-f92548523eb0edb1.part"));
    assert_eq!(of("", "größe.bin"), Path::new(".ckptfs-a7631d0a463cca65.part"));
}

#[test]
fn only_a_file_whose_owner_is_dead_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x");
    assert!(remove_stale_at(&path));
    let held = File::create(&path).unwrap();
    assert!(try_lock(&held));
    assert!(!remove_stale_at(&path) && path.exists());
    drop(held);
    assert!(remove_stale_at(&path) && !path.exists());
    std::os::unix::fs::symlink(folder.path(), &path).unwrap();
    assert!(!remove_stale_at(&path));
    std::fs::remove_file(&path).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RWXU).unwrap();
    assert!(!remove_stale_at(&path) && path.exists());
}

#[test]
fn a_claimed_name_is_held_and_nobody_elses() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x");
    let held = create_locked(&path, MODE).unwrap();
    assert!(held.is_some() && !remove_stale_at(&path));
    assert_eq!(create_locked(&path, MODE).unwrap_err(), Errno::EXIST);
    drop(held);
    assert!(remove_stale_at(&path));
}

/// On a filesystem that reports every file as locked by another process, or as not the one of its name.
#[test]
fn where_the_hidden_name_cannot_be_claimed_a_unique_one_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let name = OsStr::new("x");
    let refused = |_: &Path| Ok(None);
    let (_, path) = claim(folder.path(), Some(name), refused, |path| create(path, MODE)).unwrap();
    assert!(path.exists() && path != hidden_path(folder.path(), name));
    let (_, other) = claim(folder.path(), None, refused, |path| create(path, MODE)).unwrap();
    assert!(other.exists() && other != path);
}

fn names(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap();
    names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Runs a test as on filesystems with and without unnamed files.
fn both(test: impl Fn(&Path, &dyn Fn(&Path) -> TempFile)) {
    let kinds: [fn(&Path, Mode) -> Option<OwnedFd>; 2] = [open_unnamed, |_, _| None];
    for kind in kinds {
        let folder = tempfile::tempdir().unwrap();
        test(folder.path(), &|path| {
            TempFile::create_with(path.parent().unwrap(), path.file_name(), MODE, kind).unwrap()
        });
    }
}

#[test]
fn a_published_file_has_its_name_and_no_other_is_left() {
    both(|folder, create| {
        let path = folder.join("out");
        let new = create(&path);
        new.file().write_all(b"first").unwrap();
        new.take(&path, false).unwrap();
        let new = create(&path);
        new.file().write_all(b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        new.take(&path, true).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        assert_eq!(names(folder), ["out"]);
    });
}

#[test]
fn a_dropped_file_is_gone() {
    both(|folder, create| {
        drop(create(&folder.join("out")));
        assert!(names(folder).is_empty());
    });
}

#[test]
fn a_name_that_appears_meanwhile_is_kept() {
    both(|folder, create| {
        let path = folder.join("out");
        let new = create(&path);
        std::fs::write(&path, "mine").unwrap();
        let taken = new.take(&path, false).map_err(|error| error.kind());
        assert_eq!(taken, Err(io::ErrorKind::AlreadyExists));
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        assert_eq!(names(folder), ["out"]);
    });
}

#[test]
fn what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not() {
    both(|folder, create| {
        let path = folder.join("out");
        let part = hidden_path(folder, OsStr::new("out"));
        for replace in [false, true] {
            std::fs::write(&part, "left").unwrap();
            create(&path).take(&path, replace).unwrap();
            assert_eq!(names(folder), ["out"]);
        }
        // Left while it was written, as by one that is killed when it takes the name.
        let new = create(&path);
        if new.hidden.is_none() {
            std::fs::write(&part, "left").unwrap();
        }
        new.take(&path, true).unwrap();
        assert_eq!(names(folder), ["out"]);
        let held = File::create(&part).unwrap();
        assert!(flock(&held, FlockOperation::NonBlockingLockExclusive).is_ok());
        create(&path).take(&path, true).unwrap();
        drop(create(&path));
        assert_eq!(names(folder).len(), 2);
        assert!(part.exists());
    });
}

#[test]
fn a_file_that_is_written_is_nobody_elses_to_remove() {
    both(|folder, create| {
        let path = folder.join("out");
        let (one, other) = (create(&path), create(&path));
        one.file().write_all(b"one").unwrap();
        other.file().write_all(b"other").unwrap();
        other.take(&path, true).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
        one.take(&path, true).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
        assert_eq!(names(folder), ["out"]);
    });
}
#[test]
fn a_file_set_aside_is_closed_and_takes_its_name_or_is_gone() {
    both(|folder, create| {
        let path = folder.join("out");
        let aside = create(&path).set_aside().unwrap();
        assert_eq!(names(folder).len(), 1);
        aside.take(&path, true).unwrap();
        assert_eq!(names(folder), ["out"]);
        drop(create(&path).set_aside().unwrap());
        assert_eq!(names(folder), ["out"]);
    });
}
