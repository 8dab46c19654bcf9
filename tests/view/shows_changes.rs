//! A file that appears, changes or vanishes in the source shows soon. Nothing shows as changed that is not:
//! sizes, times and identities are those of what is there.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use crate::common;
use crate::common::safetensors::valid;
use crate::common::shards::{A, B, INDEX, index, set};
use crate::common::view::{shown, torch, torch_with, view, write};
use ckptfs::view::{ShownFile, View, ViewEntry};

/// Time that a change may take to show, in a debug build on a busy machine.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < CHANGE_TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn eventually_shows(view: &View, names: &[&str]) {
    eventually(&format!("{names:?}"), || listed(view) == names);
}

/// Without looking each name up as well, because a change may come in between.
fn listed(view: &View) -> Vec<String> {
    let listing = view.list(Path::new("")).unwrap();
    let words = listing.entries.iter();
    words.map(|n| common::view::word(&n.name.to_string_lossy(), &n.entry)).collect()
}

/// Waits so long that a later change has a later timestamp.
fn a_tick() {
    std::thread::sleep(Duration::from_millis(30));
}

fn virtual_file(view: &View, name: &str) -> Option<Arc<ShownFile>> {
    match view.lookup(Path::new(""), OsStr::new(name)).unwrap() {
        Some(ViewEntry::VirtualFile(shown)) => Some(shown),
        _ => None,
    }
}

fn time(view: &View) -> SystemTime {
    view.metadata(Path::new("")).unwrap().mtime
}

/// A directory with these files and its view, listed once and settled.
fn folder(files: &[(&str, &[u8])]) -> (tempfile::TempDir, View) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), files);
    let view = view(folder.path());
    shown(&view, "");
    std::thread::sleep(Duration::from_millis(150));
    shown(&view, "");
    (folder, view)
}

/// Writes a file in place.
fn rewrite(path: &Path, bytes: &[u8]) {
    let mut file = OpenOptions::new().write(true).truncate(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
}

#[test]
fn files_that_appear_and_vanish_show() {
    let (folder, view) = folder(&[]);
    let path = folder.path();
    write(path, &[("foo.pt", &torch()), ("notes", b"")]);
    eventually_shows(&view, &["foo.safetensors*", "notes"]);
    write(path, &[("foo.bin", &torch())]);
    eventually_shows(&view, &["foo.bin", "foo.pt", "notes"]);
    fs::remove_file(path.join("foo.pt")).unwrap();
    eventually_shows(&view, &["foo.safetensors*", "notes"]);
    fs::rename(path.join("foo.bin"), path.join("bar.bin")).unwrap();
    eventually_shows(&view, &["bar.safetensors*", "notes"]);
    assert!(virtual_file(&view, "foo.safetensors").is_none());
    write(path, &[("config.json", b"{}")]);
    eventually_shows(&view, &["bar.bin", "config.json", "notes"]);
    write(path, &[("sub/deep.pt", &torch())]);
    eventually_shows(&view, &["bar.bin", "config.json", "notes", "sub/"]);
    assert_eq!(shown(&view, "sub"), ["deep.safetensors*"]);
    fs::remove_dir_all(path.join("sub")).unwrap();
    eventually_shows(&view, &["bar.bin", "config.json", "notes"]);
    assert!(view.list(Path::new("sub")).is_err());
}

#[test]
fn a_replaced_file_shows() {
    let (folder, view) = folder(&[("foo.pt", &torch())]);
    let before = virtual_file(&view, "foo.safetensors").unwrap();
    write(folder.path(), &[("next", &torch_with("a_longer_name"))]);
    fs::rename(folder.path().join("next"), folder.path().join("foo.pt")).unwrap();
    eventually("another identity", || {
        virtual_file(&view, "foo.safetensors")
            .is_some_and(|now| now.identity() != before.identity())
    });
    let now = virtual_file(&view, "foo.safetensors").unwrap();
    assert_eq!(&view.virtual_file(&now).unwrap().tensors()[0].name[..], "a_longer_name");
    assert!(view.virtual_file(&before).is_err(), "what was shown before is gone");
}

#[test]
fn a_file_written_in_place_shows() {
    let (folder, view) = folder(&[("foo.pt", &torch()), ("bar.pt", &torch())]);
    let (foo, bar) = (
        virtual_file(&view, "foo.safetensors").unwrap(),
        virtual_file(&view, "bar.safetensors").unwrap(),
    );
    let before = time(&view);
    rewrite(&folder.path().join("foo.pt"), &torch_with("other"));
    eventually("another identity", || {
        virtual_file(&view, "foo.safetensors").is_some_and(|now| now.identity() != foo.identity())
    });
    assert_eq!(virtual_file(&view, "bar.safetensors").unwrap().identity(), bar.identity());
    assert!(time(&view) > before);
}

#[test]
fn a_truncated_file_that_is_rewritten_shows() {
    let (folder, view) = folder(&[("foo.pt", &torch())]);
    let path = folder.path().join("foo.pt");
    let before = time(&view);
    File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    eventually_shows(&view, &["foo.pt"]);
    let cut = time(&view);
    assert!(cut > before);
    a_tick();
    rewrite(&path, &torch());
    eventually_shows(&view, &["foo.safetensors*"]);
    assert!(time(&view) > cut);
}

#[test]
fn a_directorys_time_shows_changes_by_itself() {
    // A program may list a directory again only when its modification time changes.
    let (folder, view) = folder(&[("foo.pt", &torch()[..100])]);
    let path = folder.path().join("foo.pt");
    let before = time(&view);
    a_tick();
    // As download programs do: written in place, then given the time of the original.
    rewrite(&path, &torch());
    let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_500_000_000);
    File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
    eventually("another time", || time(&view) > before);
    assert_eq!(shown(&view, ""), ["foo.safetensors*"]);
    assert_eq!(virtual_file(&view, "foo.safetensors").unwrap().metadata().mtime, old);

    // The same for a directory that is looked up in another.
    let (outer, view) = self::folder(&[("inner/foo.pt", &torch()[..100])]);
    shown(&view, "inner");
    let time = || match view.lookup(Path::new(""), OsStr::new("inner")).unwrap() {
        Some(ViewEntry::Source(found)) => found.mtime,
        other => panic!("{other:?}"),
    };
    let before = time();
    a_tick();
    rewrite(&outer.path().join("inner/foo.pt"), &torch());
    eventually("another time", || time() > before);
}

#[test]
fn a_directorys_time_stays_while_nothing_shown_changes() {
    let (folder, view) = folder(&[("foo.pt", &torch()), ("cut.pt", &torch()[..100])]);
    let path = folder.path();
    let (before, foo) = (time(&view), virtual_file(&view, "foo.safetensors").unwrap());
    let real = fs::metadata(path).unwrap().modified().unwrap();
    assert_eq!(before, real);
    for len in [120, 150, 200] {
        a_tick();
        // Refused before and after.
        rewrite(&path.join("cut.pt"), &torch()[..len]);
        std::thread::sleep(Duration::from_millis(110));
        eventually("the size that it has", || {
            match view.lookup(Path::new(""), OsStr::new("cut.pt")).unwrap() {
                Some(ViewEntry::Source(found)) => found.size == len as u64,
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(shown(&view, ""), ["cut.pt", "foo.safetensors*"]);
        assert_eq!(time(&view), before);
    }
    let file = File::open(path.join("foo.pt")).unwrap();
    let mut permissions = file.metadata().unwrap().permissions();
    permissions.set_readonly(true);
    file.set_permissions(permissions).unwrap();
    eventually("another mode", || {
        virtual_file(&view, "foo.safetensors").unwrap().metadata().mode & 0o222 == 0
    });
    let now = virtual_file(&view, "foo.safetensors").unwrap();
    // The next open is of another file: what else changed is not known.
    assert_ne!(now.identity(), foo.identity());
    assert_eq!(now.layout_hash(), foo.layout_hash());
    assert_eq!(now.metadata().mtime, foo.metadata().mtime);
    assert_eq!(time(&view), before);
}

#[test]
fn a_rewrite_of_equal_inode_size_and_time_shows() {
    let (folder, view) = folder(&[("foo.pt", &torch_with("first"))]);
    let path = folder.path().join("foo.pt");
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    File::open(&path).unwrap().set_modified(time).unwrap();
    let now = || virtual_file(&view, "foo.safetensors").unwrap();
    let before = now();
    a_tick();
    // Written over, and its time set back: as tar and cp -p leave a file that took another's place.
    rewrite(&path, &torch_with("other"));
    File::open(&path).unwrap().set_modified(time).unwrap();
    eventually("the other tensor", || now().identity() != before.identity());
    let virtual_file = view.virtual_file(&now()).unwrap();
    assert_eq!(&*virtual_file.tensors()[0].name, "other");
}

#[test]
fn a_directory_with_a_future_time_shows_changes() {
    let (folder, view) = folder(&[("foo.pt", &torch())]);
    let future = SystemTime::now() + Duration::from_secs(1_000_000);
    File::open(folder.path()).unwrap().set_modified(future).unwrap();
    eventually("its time", || time(&view) == future);
    write(folder.path(), &[("bar.pt", &torch())]);
    eventually_shows(&view, &["bar.safetensors*", "foo.safetensors*"]);
    assert!(time(&view) < future);
}

#[test]
fn an_index_written_in_place_shows() {
    let set = set(&[(A, &["a"]), (B, &["c"])], &[("a", A)]);
    let view = view(set.path());
    assert_eq!(shown(&view, ""), ["model.safetensors*"]);
    let tensors =
        || virtual_file(&view, "model.safetensors").map(|virtual_file| virtual_file.tensors());
    assert_eq!(tensors(), Some(1));
    let before = time(&view);
    a_tick();
    rewrite(&set.path().join(INDEX), index(&[("a", A), ("c", B)]).as_bytes());
    eventually("both shards", || tensors() == Some(2));
    assert!(time(&view) > before);
    rewrite(&set.path().join(INDEX), index(&[("a", A), ("c", "elsewhere")]).as_bytes());
    eventually_shows(&view, &[A, B, INDEX]);
    rewrite(&set.path().join(INDEX), b"{");
    eventually("what is wrong now", || {
        view.list(Path::new("")).unwrap().refused[0].reason.contains("EOF")
    });
    assert_eq!(shown(&view, ""), [A, B, INDEX]);
}

#[test]
fn a_shard_that_comes_later_completes_the_set() {
    let set = set(&[(A, &["a"])], &[("a", A), ("c", B)]);
    let view = view(set.path());
    assert_eq!(shown(&view, ""), [A, INDEX]);
    let whole = valid(&["c"]);
    write(set.path(), &[(B, &whole[..20])]);
    eventually_shows(&view, &[A, B, INDEX]);
    let mut shard = OpenOptions::new().append(true).open(set.path().join(B)).unwrap();
    shard.write_all(&whole[20..]).unwrap();
    eventually_shows(&view, &["model.safetensors*"]);
    fs::remove_file(set.path().join(A)).unwrap();
    eventually_shows(&view, &[B, INDEX]);
}

#[test]
fn a_replaced_directory_shows() {
    let (folder, view) = folder(&[("one/foo.pt", &torch()), ("two/foo.pt", &torch_with("b"))]);
    assert_eq!(shown(&view, "one"), ["foo.safetensors*"]);
    let identity = |view: &View| match view.lookup("one".as_ref(), "foo.safetensors".as_ref()) {
        Ok(Some(ViewEntry::VirtualFile(virtual_file))) => Some(virtual_file.identity()),
        _ => None,
    };
    let before = identity(&view).unwrap();
    fs::rename(folder.path().join("one"), folder.path().join("gone")).unwrap();
    fs::rename(folder.path().join("two"), folder.path().join("one")).unwrap();
    eventually("the other's", || identity(&view).is_some_and(|now| now != before));
    fs::remove_dir_all(folder.path().join("one")).unwrap();
    write(folder.path(), &[("one", b"a file")]);
    eventually("a file", || shown(&view, "").contains(&"one".to_owned()));
    assert!(view.list("one".as_ref()).is_err());
}

#[test]
fn a_file_that_keeps_changing_does_not_hide_the_rest() {
    // Reading the first shard takes longer than the second stays unchanged.
    let names: Vec<String> = (0..20_000).map(|n| format!("tensor{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (long, busy) = ("busy-00001-of-00002.safetensors", "busy-00002-of-00002.safetensors");
    let files: &[(&str, &[u8])] =
        &[("good.pt", &torch()), (long, &valid(&names)), (busy, &valid(&["last"])[..30])];
    let (folder, view) = folder(files);
    let path = folder.path().join(busy);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let mut file = OpenOptions::new().append(true).open(&path).unwrap();
            while !stop.load(Ordering::Relaxed) {
                file.write_all(b"x").unwrap();
            }
        }
    });
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(110));
        assert_eq!(listed(&view), [long, busy, "good.safetensors*"]);
        assert!(virtual_file(&view, "good.safetensors").is_some());
        assert!(virtual_file(&view, "busy.safetensors").is_none());
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}

#[test]
fn a_name_or_its_virtual_file_always_exists() {
    let (folder, view) = folder(&[("foo.pt", &torch())]);
    let path = folder.path().to_owned();
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            for n in 0u64.. {
                let whole = torch_with(&format!("t{n}"));
                let part = if n % 3 == 0 { &whole[..60] } else { &whole };
                write(&path, &[("next", part)]);
                fs::rename(path.join("next"), path.join("foo.pt")).unwrap();
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        }
    });
    for _ in 0..300 {
        let names = listed(&view);
        let foo: Vec<&String> = names.iter().filter(|name| name.starts_with("foo")).collect();
        assert_eq!(foo.len(), 1, "{names:?}");
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}
