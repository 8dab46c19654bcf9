//! A link that stays in the source works in the view as it does there; one that leads out is refused. No
//! link leads past the view to an original, or in an endless circle.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common;
use crate::common::safetensors::valid;
use crate::common::view::{hidden, shown, torch, view, view_following, view_of_all, write};
use ckptfs::source::FileKind;
use ckptfs::view::{View, ViewEntry};

fn link(folder: &Path, name: &str, target: impl AsRef<Path>) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    symlink(target, path).unwrap();
}

fn entry(view: &View, place: &str) -> ViewEntry {
    let place = Path::new(place);
    let parent = place.parent().unwrap();
    view.lookup(parent, place.file_name().unwrap()).unwrap().expect("shown")
}

#[test]
fn links_that_work_keep_their_target() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("sub/file", b"1234"), ("deep/er/file", b"")]);
    link(folder.path(), "to-file", "sub/file");
    link(folder.path(), "to-folder", "sub");
    link(folder.path(), "here", ".");
    link(folder.path(), "sub/up", "..");
    link(folder.path(), "sub/beside", "../deep/er/file");
    link(folder.path(), "through", "to-folder/file");
    link(folder.path(), "chain", "to-file");
    let view = view(folder.path());
    assert_eq!(
        shown(&view, ""),
        [
            "chain -> to-file",
            "deep/",
            "here -> .",
            "sub/",
            "through -> to-folder/file",
            "to-file -> sub/file",
            "to-folder -> sub",
        ]
    );
    assert_eq!(shown(&view, "sub"), ["beside -> ../deep/er/file", "file", "up -> .."]);
    let ViewEntry::Link(attributes, _) = entry(&view, "to-file") else { panic!("a link") };
    assert_eq!((attributes.size, attributes.kind), (8, FileKind::Link));
    assert_eq!(view.metadata("to-file".as_ref()).unwrap().size, 4);
}

#[test]
fn absolute_links_that_stay_inside_become_relative() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let typed = other.path().join("typed");
    symlink(folder.path(), &typed).unwrap();
    write(folder.path(), &[("sub/file", b""), ("sub/in/file", b"")]);
    for (name, root) in [("real", folder.path()), ("typed", &typed)] {
        link(folder.path(), &format!("sub/{name}-file"), root.join("sub/in/file"));
        link(folder.path(), &format!("sub/{name}-folder"), root.join("sub/in"));
        link(folder.path(), &format!("sub/{name}-root"), root);
        link(folder.path(), &format!("sub/{name}-nothing"), root.join("nothing"));
    }
    let words = |name: &str| {
        ["file -> in/file", "folder -> in", "nothing -> ../nothing", "root -> .."]
            .map(|rest| format!("{name}-{rest}"))
    };
    let shown = shown(&view(&typed), "sub");
    assert_eq!(shown[2..], [words("real"), words("typed")].concat());
    // The name that the user did not type leads elsewhere.
    let elsewhere = common::view::shown(&view(folder.path()), "sub");
    assert_eq!(elsewhere[6], "typed-file -> !");
}

#[test]
fn links_out_of_the_directory_are_refused() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(out.path(), &[("file", b"secret"), ("model.pt", &torch()), ("sub/file", b"")]);
    write(folder.path(), &[("sub/file", b"")]);
    let up = "../".repeat(20);
    link(folder.path(), "a-absolute", out.path().join("file"));
    link(folder.path(), "b-relative", format!("{up}{}/file", out.path().display()));
    link(folder.path(), "c-folder", out.path());
    link(folder.path(), "d-nothing", out.path().join("nothing"));
    link(folder.path(), "e-through", "c-folder/file");
    link(folder.path(), "f-proc", "/proc/self/root/etc/passwd");
    link(
        folder.path(),
        "g-back",
        folder.path().join("../").join(folder.path().file_name().unwrap()),
    );
    link(folder.path(), "h-model.pt", out.path().join("model.pt"));
    let refusing = view(folder.path());
    let words = shown(&refusing, "");
    assert_eq!(words.len(), 9);
    for word in words.iter().filter(|word| *word != "sub/") {
        assert!(word.ends_with(" -> !"), "{word}");
    }
    assert!(refusing.open("a-absolute".as_ref()).is_err());
    assert!(refusing.list("c-folder".as_ref()).is_err());
    let reason = &refusing.list(Path::new("")).unwrap().refused[0];
    assert!(reason.remedy.contains("--follow-symlinks"), "{}", reason.remedy);

    let following = view_following(folder.path());
    let words = shown(&following, "");
    assert_eq!(words[0], format!("a-absolute -> {}", out.path().join("file").display()));
    assert_eq!(words[1], "b-relative");
    assert_eq!(words[7], "h-model.safetensors*");
    assert!(following.open("a-absolute".as_ref()).is_ok());
    assert_eq!(shown(&following, "c-folder").len(), 3);
}

#[test]
fn dangling_and_circular_links_stay_links() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("file", b"")]);
    for (name, target) in [
        ("a-nothing", "missing"),
        ("b-nothing.pt", "missing"),
        ("c-one", "d-two"),
        ("d-two", "c-one"),
        ("e-self", "e-self"),
        ("f-not-a-folder", "file/beneath"),
    ] {
        link(folder.path(), name, target);
    }
    let view = view(folder.path());
    assert_eq!(
        shown(&view, ""),
        [
            "a-nothing -> missing",
            "b-nothing.pt -> missing",
            "c-one -> d-two",
            "d-two -> c-one",
            "e-self -> e-self",
            "f-not-a-folder -> file/beneath",
            "file",
        ]
    );
    for n in 0..60 {
        link(folder.path(), &format!("long/{n:02}"), format!("{:02}", n + 1));
    }
    write(folder.path(), &[("long/60", b"")]);
    let words = shown(&view, "long");
    assert_eq!(words[0], "00 -> 01");
    assert_eq!(words[59], "59 -> 60");
}

#[test]
fn links_to_hidden_originals_become_their_target() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = torch();
    write(folder.path(), &[("m/foo.pt", &bytes), ("elsewhere/bar", &bytes)]);
    link(folder.path(), "m/name", "foo.pt");
    link(folder.path(), "m/chain", "name");
    link(folder.path(), "absolute", folder.path().join("m/foo.pt"));
    // The original is a link itself: its target is shown, the way there is not.
    link(folder.path(), "m/bar.pt", "../elsewhere/bar");
    link(folder.path(), "m/latest", "bar.pt");
    let view = view(folder.path());
    assert_eq!(shown(&view, ""), ["absolute", "elsewhere/", "m/"]);
    assert_eq!(
        shown(&view, "m"),
        ["bar.safetensors*", "chain", "foo.safetensors*", "latest -> ../elsewhere/bar", "name",]
    );
    let ViewEntry::Source(found) = entry(&view, "m/name") else { panic!("the file") };
    assert_eq!((found.kind, found.size), (FileKind::File, bytes.len() as u64));
    assert!(view.open("m/name".as_ref()).is_ok());
    let all = view_of_all(folder.path());
    assert_eq!(shown(&all, "m")[5..], ["latest -> bar.pt", "name -> foo.pt"]);
}

/// A repository of the hub cache, with two revisions of one torch model.
fn repository(cache: &Path) -> PathBuf {
    let repository = cache.join("models--org--name");
    write(&repository, &[("blobs/torch", &torch()), ("blobs/config", b"{}")]);
    write(&repository, &[("refs/main", b"one"), ("blobs/real", &valid(&["w"]))]);
    for (revision, weights, blob) in
        [("one", "pytorch_model.bin", "torch"), ("two", "model.safetensors", "real")]
    {
        let snapshot = repository.join("snapshots").join(revision);
        link(&snapshot, "config.json", "../../blobs/config");
        link(&snapshot, weights, format!("../../blobs/{blob}"));
        link(&snapshot, "unet/diffusion_pytorch_model.bin", "../../../blobs/torch");
        for absent in ["model.safetensors", "unet/diffusion_pytorch_model.safetensors", "other"] {
            write(&repository, &[(&format!(".no_exist/{revision}/{absent}"), b"")]);
        }
        write(&repository, &[(&format!("trees/{revision}.json"), b"{}")]);
    }
    fs::remove_file(repository.join("snapshots/two/unet/diffusion_pytorch_model.bin")).unwrap();
    repository
}

#[test]
fn a_hub_cache_is_shown_with_its_links() {
    let cache = tempfile::tempdir().unwrap();
    let repository = repository(cache.path());
    for (source, place) in [(cache.path(), "models--org--name"), (&*repository, "")] {
        let place = Path::new(place);
        let view = view(source);
        assert_eq!(
            shown(&view, place.join("snapshots/one")),
            ["config.json -> ../../blobs/config", "model.safetensors*", "unet/",]
        );
        assert_eq!(
            shown(&view, place.join("snapshots/one/unet")),
            ["diffusion_pytorch_model.safetensors*"]
        );
        assert_eq!(
            shown(&view, place.join("snapshots/two"))[1],
            "model.safetensors -> ../../blobs/real"
        );
        assert_eq!(shown(&view, place.join("blobs")), ["config", "real", "torch"]);
        assert_eq!(shown(&view, place.join("refs")), ["main"]);
        // A name that is shown is not marked as absent, and no list has a hidden name.
        assert_eq!(shown(&view, place.join(".no_exist/one")), ["other", "unet/"]);
        assert_eq!(shown(&view, place.join(".no_exist/one/unet")), [""; 0]);
        assert_eq!(
            shown(&view, place.join(".no_exist/two")),
            ["model.safetensors", "other", "unet/"]
        );
        assert_eq!(hidden(&view, place.join("trees")), ["one.json"]);
        assert_eq!(shown(&view, place.join("trees")), ["two.json"]);
        // With the originals, a list lacks nothing; the virtual files are there as well.
        let all = view_of_all(source);
        assert_eq!(shown(&all, place.join("trees")), ["one.json", "two.json"]);
        assert_eq!(shown(&all, place.join(".no_exist/one")), ["other", "unet/"]);
    }
}

#[test]
fn a_hub_snapshot_is_shown_by_itself() {
    let cache = tempfile::tempdir().unwrap();
    let repository = repository(cache.path());
    let snapshot = repository.join("snapshots/one");
    write(cache.path(), &[("foreign", b"")]);
    link(&snapshot, "out", "../../../foreign");
    link(&snapshot, "own", "../one/config.json");
    link(&snapshot, "again", snapshot.join("unet"));
    link(&snapshot, "blobs", "../../blobs");
    link(&snapshot, "round", "../../snapshots");
    link(&snapshot, "unet/up", "../../../snapshots/one/unet");
    let view = view(&snapshot);
    assert_eq!(
        shown(&view, ""),
        [
            "again -> unet",
            "blobs/",
            "config.json",
            "model.safetensors*",
            "out -> !",
            "own",
            "round/",
            "unet/",
        ]
    );
    assert_eq!(shown(&view, "unet"), ["diffusion_pytorch_model.safetensors*", "up -> ."]);
    assert_eq!(shown(&view, "blobs"), ["config", "real", "torch"]);
    assert!(view.open("config.json".as_ref()).is_ok());
    // A directory inside itself is a link to where it is, so that a walk ends.
    assert_eq!(shown(&view, "round"), ["one/", "two/"]);
    assert!(shown(&view, "round/one").contains(&"round -> ..".to_owned()));
    let everything = walk(&view);
    assert!(everything < 100, "{everything}");
}

/// The number of directories, without following links.
fn walk(view: &View) -> usize {
    let mut todo = vec![PathBuf::new()];
    let mut seen = 0;
    while let Some(place) = todo.pop() {
        seen += 1;
        assert!(seen < 10_000, "without an end");
        for word in shown(view, &place) {
            todo.extend(word.strip_suffix('/').map(|name| place.join(name)));
        }
    }
    seen
}

#[test]
fn a_walk_through_links_to_parents_ends() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("a/b/file", b""), ("c/d/file", b"")]);
    link(folder.path(), "a/b/up", "../..");
    link(folder.path(), "a/b/self", "../b");
    link(folder.path(), "c/d/other", "../../a");
    let source = folder.path().join("a");
    assert!(walk(&view_following(&source)) < 100);
    assert!(walk(&view_following(folder.path())) < 100);
}

#[test]
fn circles_of_notes_and_links_end() {
    let cache = tempfile::tempdir().unwrap();
    let repository = repository(cache.path());
    // Each is shown if the other is.
    link(&repository, "snapshots/one/x", "../../.no_exist/one/x");
    link(&repository, ".no_exist/one/x", "../../snapshots/one/x");
    link(&repository, ".no_exist/one/y", "../../snapshots/one/y");
    write(&repository, &[("snapshots/one/y", b"")]);
    link(&repository, "snapshots/one/z", "../../.no_exist/one/z");
    write(&repository, &[(".no_exist/one/z", b"")]);
    link(&repository, "snapshots/one/tree", "../../trees/one.json");
    link(&repository, "snapshots/two/tree", "../../trees/two.json");
    let view = view(&repository);
    assert_eq!(
        shown(&view, ".no_exist/one")[2..],
        ["x -> ../../snapshots/one/x", "y -> ../../snapshots/one/y", "z"]
    );
    let snapshot = shown(&view, "snapshots/one");
    // A name that is hidden in its own directory is shown where it is linked.
    assert_eq!(snapshot[2..4], ["tree", "unet/"]);
    assert_eq!(shown(&view, "snapshots/two")[2], "tree -> ../../trees/two.json");
    assert_eq!(shown(&view, "trees"), ["two.json"]);
}

#[test]
fn links_that_change_during_lookups_are_shown_as_one_or_the_other() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("sub/a", b"1"), ("sub/b", b"22"), ("file", b"333")]);
    link(folder.path(), "current", "sub/a");
    let path = folder.path().to_owned();
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            while !stop.load(Ordering::Relaxed) {
                link(&path, "next", path.join("sub/a"));
                fs::rename(path.join("next"), path.join("current")).unwrap();
                fs::write(path.join("next"), "4444").unwrap();
                fs::rename(path.join("next"), path.join("current")).unwrap();
                link(&path, "next", "sub/b");
                fs::rename(path.join("next"), path.join("current")).unwrap();
                fs::rename(path.join("sub"), path.join("gone")).unwrap();
                fs::rename(path.join("gone"), path.join("sub")).unwrap();
            }
        }
    });
    let view = view(folder.path());
    for _ in 0..2_000 {
        let listing = view.list(Path::new("")).unwrap();
        let words = listing.entries.iter();
        let words: Vec<String> =
            words.map(|n| common::view::word(&n.name.to_string_lossy(), &n.entry)).collect();
        let current: Vec<&String> = words.iter().filter(|w| w.starts_with("current")).collect();
        assert_eq!(current.len(), 1, "{words:?}");
        assert!(!current[0].ends_with('!') && !current[0].contains("-> /"), "{words:?}");
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}
