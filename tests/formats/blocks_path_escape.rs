//! An index or a link cannot make the parser read outside the directory that the user named, unless the user
//! allows it. Links that stay inside work.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::common::safetensors::valid;
use crate::common::shards::{A, B, INDEX, error, index, names, open, open_following, set};
use ckptfs::checkpoint::{Checkpoint, CheckpointError, IndexError, ParseOptions};
use ckptfs::source;

fn is_outside(answer: Result<Checkpoint, CheckpointError>) -> bool {
    matches!(answer, Err(CheckpointError::Source(source::SourceError::OutsideRoot { .. })))
}

#[test]
fn names_that_leave_the_directory() {
    let outside = tempfile::tempdir().unwrap();
    let elsewhere = outside.path().join("shard.safetensors");
    fs::write(&elsewhere, valid(&["a"])).unwrap();
    let absolute = elsewhere.to_str().unwrap();

    let leaves = |shard: &str| {
        let set = set(&[], &[("a", shard)]);
        matches!(error(open(set.path())), IndexError::OutsideDirectory { shard: named } if named == shard)
    };
    assert!(leaves(absolute));
    for shard in ["../shard.safetensors", "sub/../../shard.safetensors", "..", ".", "/", ""] {
        assert!(leaves(shard), "{shard:?}");
    }

    let set = set(&[], &[("a", absolute)]);
    assert_eq!(names(&open_following(set.path()).unwrap()), ["a"]);

    let inner = outside.path().join("inner");
    fs::create_dir(&inner).unwrap();
    fs::write(inner.join(INDEX), index(&[("a", "../shard.safetensors")])).unwrap();
    assert!(matches!(error(open(&inner)), IndexError::OutsideDirectory { .. }));
    assert_eq!(names(&open_following(&inner).unwrap()), ["a"]);
}

#[test]
fn links_that_leave_the_directory() {
    let outside = tempfile::tempdir().unwrap();
    fs::create_dir(outside.path().join("folder")).unwrap();
    let elsewhere = outside.path().join("folder/shard.safetensors");
    fs::write(&elsewhere, valid(&["a"])).unwrap();

    let set = set(&[], &[("a", "link.safetensors")]);
    let link = set.path().join("link.safetensors");
    symlink(&elsewhere, &link).unwrap();
    assert!(is_outside(open(set.path())), "an absolute link");
    assert_eq!(names(&open_following(set.path()).unwrap()), ["a"]);

    let up = set.path().components().count() - 1;
    let relative = Path::new(&"../".repeat(up)).join(elsewhere.strip_prefix("/").unwrap());
    fs::remove_file(&link).unwrap();
    symlink(relative, &link).unwrap();
    assert!(is_outside(open(set.path())), "a relative link");
    assert_eq!(names(&open_following(set.path()).unwrap()), ["a"]);

    // A directory link that leads out is refused too.
    fs::remove_file(&link).unwrap();
    symlink(outside.path().join("folder"), set.path().join("sub")).unwrap();
    fs::write(set.path().join(INDEX), index(&[("a", "sub/shard.safetensors")])).unwrap();
    assert!(is_outside(open(set.path())), "a linked directory");
    assert_eq!(names(&open_following(set.path()).unwrap()), ["a"]);
}

#[test]
fn a_link_to_nothing_is_reported_as_one_wherever_it_leads() {
    let outside = tempfile::tempdir().unwrap();
    for target in [outside.path().join("nothing.safetensors"), "nothing.safetensors".into()] {
        let set = set(&[], &[("a", "link.safetensors")]);
        let link = set.path().join("link.safetensors");
        symlink(&target, &link).unwrap();
        fs::remove_file(set.path().join(INDEX)).unwrap();
        for follow_symlinks in [false, true] {
            let options = ParseOptions { follow_symlinks, ..ParseOptions::default() };
            for path in [set.path(), &link] {
                let error = ckptfs::view::open(path, &options).unwrap_err();
                let CheckpointError::Source(source::SourceError::Dangling { path, target: output }) =
                    &error
                else {
                    panic!("{error}");
                };
                assert_eq!((path, output), (&link, &target));
                assert!(!error.remedy().contains("follow"), "{}", error.remedy());
            }
        }
    }
}

#[test]
fn links_through_proc_leave_the_directory() {
    let set = set(&[(A, &["a"])], &[("a", "link.safetensors")]);
    let held = fs::File::open(set.path().join(A)).unwrap();
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&held);
    symlink(format!("/proc/self/fd/{descriptor}"), set.path().join("link.safetensors")).unwrap();
    // An absolute link stays inside by its name, whatever is behind it.
    assert!(is_outside(open(set.path())));
    let outside = tempfile::tempdir().unwrap();
    fs::rename(set.path().join(A), outside.path().join("moved")).unwrap();
    assert!(is_outside(open(set.path())));
}

#[test]
fn an_index_that_is_itself_a_link_out() {
    let elsewhere = set(&[(A, &["a"])], &[("a", A)]);
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join(A), valid(&["a"])).unwrap();
    symlink(elsewhere.path().join(INDEX), directory.path().join(INDEX)).unwrap();
    assert!(is_outside(open(directory.path())));
    assert_eq!(names(&open_following(directory.path()).unwrap()), ["a"]);
}

#[test]
fn a_loop_of_links() {
    let set = set(&[], &[("a", "one.safetensors")]);
    symlink("two.safetensors", set.path().join("one.safetensors")).unwrap();
    symlink("one.safetensors", set.path().join("two.safetensors")).unwrap();
    assert!(open(set.path()).is_err());
    assert!(open_following(set.path()).is_err());
}

#[test]
fn links_that_stay_inside_are_followed() {
    let set = set(&[("kept", &["a"])], &[("a", "link.safetensors"), ("b", "sub/b.safetensors")]);
    let link = set.path().join("link.safetensors");
    fs::create_dir(set.path().join("sub")).unwrap();
    fs::write(set.path().join("sub/b.safetensors"), valid(&["b"])).unwrap();
    for target in ["kept".into(), "sub/../kept".into(), set.path().join("kept")] {
        symlink(&target, &link).unwrap();
        assert_eq!(names(&open(set.path()).unwrap()), ["a", "b"], "{}", target.display());
        fs::remove_file(&link).unwrap();
    }
}

#[test]
fn a_directory_that_is_typed_through_a_link() {
    let set = set(&[(A, &["a"]), (B, &["c"])], &[("a", A), ("c", B)]);
    let beside = tempfile::tempdir().unwrap();
    let link = beside.path().join("link");
    symlink(set.path(), &link).unwrap();
    assert_eq!(names(&open(&link).unwrap()), ["a", "c"]);
    assert_eq!(names(&open(&link.join(INDEX)).unwrap()), ["a", "c"]);
}

#[test]
fn a_snapshot_of_the_hub_cache() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--o--n");
    let (blobs, snapshot) = (repository.join("blobs"), repository.join("snapshots/sha"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    let blob = |name: &str, hash: &str, bytes: &[u8]| {
        fs::write(blobs.join(hash), bytes).unwrap();
        symlink(Path::new("../../blobs").join(hash), snapshot.join(name)).unwrap();
    };
    blob(A, "hash1", &valid(&["a"]));
    blob(B, "hash2", &valid(&["c"]));
    blob(INDEX, "hash3", index(&[("a", A), ("c", B)]).as_bytes());
    for path in [&snapshot, &snapshot.join(INDEX)] {
        assert_eq!(names(&open(path).unwrap()), ["a", "c"]);
    }
    assert_eq!(names(&open(&snapshot.join(A)).unwrap()), ["a"]);

    // Here, too, a path beyond the repository leads out.
    fs::write(cache.path().join("foreign"), valid(&["c"])).unwrap();
    fs::remove_file(snapshot.join(B)).unwrap();
    symlink("../../../foreign", snapshot.join(B)).unwrap();
    assert!(is_outside(open(&snapshot)));
    assert_eq!(names(&open_following(&snapshot).unwrap()), ["a", "c"]);
}
