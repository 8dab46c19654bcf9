//! A named checkpoint is shown alone, by its virtual file, or refused.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::common;
use crate::common::command;
use crate::common::safetensors::valid;
use crate::common::shards::{A, B, INDEX, set};
use crate::common::view::{hidden, shown, torch, view, write};
use ckptfs::view::{View, ViewError, ViewOptions};

fn refused(path: &Path) -> String {
    match View::new(path, ViewOptions::default()) {
        Err(error @ ViewError::Refused(_)) => {
            let outcome = command::run(&["ls", path.to_str().unwrap()]);
            assert_eq!(outcome.code, 3, "{}", outcome.stderr);
            error.to_string()
        }
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_file_is_shown_alone() {
    let folder = tempfile::tempdir().unwrap();
    // Files beside it do not matter, and are not shown.
    write(folder.path(), &[("foo.pt", &torch()), ("config.json", b"{}"), ("foo.bin", &torch())]);
    write(folder.path(), &[("pytorch_model.bin", &torch()), ("model.safetensors", &valid(&["w"]))]);
    let alone = |name: &str| shown(&view(&folder.path().join(name)), "");
    assert_eq!(alone("foo.pt"), ["foo.safetensors*"]);
    assert_eq!(alone("pytorch_model.bin"), ["model.safetensors*"]);
    assert_eq!(alone("model.safetensors"), ["model.safetensors"]);
    assert_eq!(hidden(&view(&folder.path().join("foo.pt")), ""), ["foo.pt"]);
}

#[test]
fn a_file_of_any_name_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    for (name, shows) in [
        ("weights.pth.tar", "weights.pth.safetensors*"),
        ("model.pkl", "model.safetensors*"),
        ("weights", "weights.safetensors*"),
        (".pt", ".pt.safetensors*"),
        // A named shard is that file alone.
        ("x-00001-of-00002.bin", "x-00001-of-00002.safetensors*"),
    ] {
        write(folder.path(), &[(name, &torch())]);
        assert_eq!(shown(&view(&folder.path().join(name)), ""), [shows]);
    }
}

#[test]
fn a_set_is_shown_alone() {
    let set = set(&[(A, &["a"]), (B, &["c"])], &[("a", A), ("c", B)]);
    write(set.path(), &[("other.pt", &torch())]);
    assert_eq!(shown(&view(&set.path().join(INDEX)), ""), ["model.safetensors*"]);
    assert_eq!(hidden(&view(&set.path().join(INDEX)), ""), [A, B, INDEX]);
    fs::remove_file(set.path().join(INDEX)).unwrap();
    // Without an index, it has a name that no file has.
    assert_eq!(shown(&view(&set.path().join("model.safetensors")), ""), ["model.safetensors*"]);
    let outcome = command::run(&["ls", &command::path(set.path(), "model.safetensors")]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}

#[test]
fn a_single_checkpoint_that_cannot_be_shown_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let whole = torch();
    write(folder.path(), &[("cut.pt", &whole[..whole.len() / 2]), ("model.gguf", b"GGUF")]);
    write(folder.path(), &[("notes.txt", b"words"), ("empty.bin", b"")]);
    write(folder.path(), &[("s-00001-of-00002.pt", &whole), ("x.bin.index.json", b"{}")]);
    for name in ["cut.pt", "notes.txt", "model.gguf", "empty.bin", "s.pt", "x.bin.index.json"] {
        let why = refused(&folder.path().join(name));
        assert!(!why.is_empty());
    }
}

#[test]
fn missing_paths_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["missing", "missing/further", "missing.safetensors"] {
        let path = folder.path().join(name);
        assert!(View::new(&path, ViewOptions::default()).is_err());
        let outcome = command::run(&["ls", path.to_str().unwrap()]);
        assert_eq!(outcome.code, 1);
        assert!(outcome.stderr.contains("no such file"), "{}", outcome.stderr);
    }
    assert!(View::new(Path::new(""), ViewOptions::default()).is_err());
}

#[test]
fn typed_links_are_followed_anywhere() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(elsewhere.path(), &[("a", &torch()), ("b", &valid(&["w"]))]);
    for (name, target) in [("link.pt", "a"), ("link.safetensors", "b")] {
        symlink(elsewhere.path().join(target), folder.path().join(name)).unwrap();
    }
    let view = |name: &str| view(&folder.path().join(name));
    assert_eq!(shown(&view("link.pt"), ""), ["link.safetensors*"]);
    assert_eq!(shown(&view("link.safetensors"), ""), ["link.safetensors"]);
    assert!(view("link.safetensors").open("link.safetensors".as_ref()).is_ok());
    // A link that the user did not type is refused.
    assert_eq!(
        shown(&common::view::view(folder.path()), ""),
        ["link.pt -> !", "link.safetensors -> !"]
    );
}

#[test]
fn a_file_of_a_hub_snapshot_is_shown() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--o--n");
    let snapshot = repository.join("snapshots/sha");
    write(&repository, &[("blobs/hash", &torch()), ("snapshots/sha/config.json", b"{}")]);
    symlink("../../blobs/hash", snapshot.join("pytorch_model.bin")).unwrap();
    assert_eq!(shown(&view(&snapshot.join("pytorch_model.bin")), ""), ["model.safetensors*"]);
    assert_eq!(shown(&view(&repository.join("blobs/hash")), ""), ["hash.safetensors*"]);
}
