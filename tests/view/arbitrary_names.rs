//! Every file, whatever its name and however many there are, is shown by its name or is in a virtual file.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::common;
use crate::common::command;
use crate::common::view::{shown, torch, torch_with, view, write};
use ckptfs::view::{View, ViewEntry};
use serde_json::Value;
use tempfile::TempDir;

fn name(bytes: &[u8]) -> OsString {
    OsStr::from_bytes(bytes).to_owned()
}

fn find(view: &View, place: &[u8], name: &[u8]) -> Option<ViewEntry> {
    view.lookup(Path::new(OsStr::from_bytes(place)), OsStr::from_bytes(name)).unwrap()
}

#[test]
fn names_that_are_not_utf8_are_shown_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(name(b"\xff\xfe.pt")), torch()).unwrap();
    let inner = folder.path().join(name(b"dir\xff"));
    fs::create_dir(&inner).unwrap();
    fs::write(inner.join("foo.pt"), torch()).unwrap();
    symlink(name(b"dir\xff/foo.pt"), folder.path().join(name(b"link\xff"))).unwrap();
    symlink(inner.join("missing"), folder.path().join("nothing")).unwrap();
    let view = view(folder.path());
    assert_eq!(view.list(Path::new("")).unwrap().entries.len(), 4);
    // No checkpoint's name: it stays.
    assert!(matches!(find(&view, b"", b"\xff\xfe.pt"), Some(ViewEntry::Source(_))));
    assert!(find(&view, b"", b"\xff\xfe.safetensors").is_none());
    assert!(matches!(find(&view, b"dir\xff", b"foo.safetensors"), Some(ViewEntry::VirtualFile(_))));
    assert!(matches!(find(&view, b"", b"link\xff"), Some(ViewEntry::Source(_))));
    for args in [["ls", "-r"], ["ls", "--json"]] {
        let mut command = Command::new(command::ckptfs());
        let output = command.args(args).arg(folder.path()).output().unwrap();
        assert!(output.status.success());
        assert!(String::from_utf8(output.stdout).is_ok());
    }
}

#[test]
fn control_characters_in_names_reach_no_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let odd = "\u{1b}[31m\n\tx.pt";
    write(folder.path(), &[(odd, &torch()), ("\u{7}", b""), ("a\\b\"c'd.bin", &torch())]);
    assert_eq!(
        shown(&view(folder.path()), ""),
        ["\u{7}", "\u{1b}[31m\n\tx.safetensors*", "a\\b\"c'd.safetensors*"]
    );
    let path = folder.path().to_str().unwrap();
    let text = command::run(&["ls", path]).stdout;
    assert!(!text.contains('\u{1b}') && !text.contains('\u{7}'), "{text:?}");
    let json: Value = serde_json::from_str(&command::run(&["ls", "--json", path]).stdout).unwrap();
    assert_eq!(json[0]["entries"][1]["virtual_file"]["from"][0], odd);
}

#[test]
fn pattern_like_names_and_bare_extensions_are_planned() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = torch();
    for name in [".bin", ".safetensors", "*.pt", "?.ckpt", "-00001-of-00002.bin", "[a].pth"] {
        write(folder.path(), &[(name, &bytes)]);
    }
    assert_eq!(
        shown(&view(folder.path()), ""),
        [
            "*.safetensors*",
            "-00001-of-00002.safetensors*",
            ".bin",
            ".safetensors",
            "?.safetensors*",
            "[a].safetensors*",
        ]
    );
}

#[test]
fn a_set_and_a_file_of_one_name_stay_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["x-00001-of-00002.bin", "x-00002-of-00002.bin", "x.bin", "x-*-of-00002.bin"] {
        write(folder.path(), &[(name, &torch_with(name))]);
    }
    assert_eq!(
        shown(&view(folder.path()), ""),
        ["x-*-of-00002.safetensors*", "x-00001-of-00002.bin", "x-00002-of-00002.bin", "x.bin",]
    );
}

#[test]
fn names_that_would_be_too_long_stay() {
    let folder = tempfile::tempdir().unwrap();
    let names = [243, 244, 251].map(|n| format!("{}.bin", "x".repeat(n)));
    for name in &names {
        write(folder.path(), &[(name, &torch())]);
    }
    let virtual_file = format!("{}.safetensors*", "x".repeat(243));
    assert_eq!(shown(&view(folder.path()), ""), [virtual_file.as_str(), &names[1], &names[2]]);
    assert_eq!(view(folder.path()).list(Path::new("")).unwrap().skipped.len(), 2);
}

#[test]
fn pipes_and_sockets_are_shown_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket.pt")).unwrap();
    let pipe = folder.path().join("pipe.bin");
    assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
    assert_eq!(shown(&view(folder.path()), ""), ["pipe.bin", "socket.pt"]);
    let outcome = command::run(&["ls", folder.path().to_str().unwrap()]);
    assert!(!outcome.stdout.contains("refused"), "{}", outcome.stdout);
}

#[test]
fn an_index_that_leads_outside_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("outside");
    write(folder.path(), &[("outside", b""), ("in/sub/b.bin", &torch_with("b"))]);
    write(folder.path(), &[("in/a.bin", &torch_with("a"))]);
    let index = |names: [&str; 2]| common::shards::index(&[("a", names[0]), ("b", names[1])]);
    let source = folder.path().join("in");
    let absolute = out.to_str().unwrap();
    for (n, names) in [
        ["a.bin", "../outside"],
        ["a.bin", absolute],
        ["a.bin", "/"],
        ["a.bin", ""],
        ["a.bin", "\0"],
        ["a.bin", "sub"],
        ["a.bin", "x.bin.index.json"],
    ]
    .into_iter()
    .enumerate()
    {
        let json = index(names).replace("\\0", "\\u0000");
        write(&source, &[("x.bin.index.json", json.as_bytes())]);
        let view = view(&source);
        assert_eq!(shown(&view, ""), ["a.bin", "sub/", "x.bin.index.json"], "{n}");
        assert_eq!(view.list(Path::new("")).unwrap().refused.len(), 1);
    }
    write(&source, &[("x.bin.index.json", index(["a.bin", "sub/b.bin"]).as_bytes())]);
    assert_eq!(shown(&view(&source), ""), ["sub/", "x.safetensors*"]);
}

/// Files and directories in one directory.
const MANY: usize = 10_000;

/// A directory for that many, in memory if possible: a disk takes a minute for them.
fn roomy() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.expect("made")
}

#[test]
fn ten_thousand_checkpoints_in_a_directory_are_shown() {
    let folder = roomy();
    let bytes = torch();
    for n in 0..MANY {
        fs::write(folder.path().join(format!("{n:05}.pt")), &bytes).unwrap();
    }
    let start = std::time::Instant::now();
    let view = view(folder.path());
    let one = view.lookup(Path::new(""), OsStr::new("05000.safetensors")).unwrap();
    assert!(matches!(one, Some(ViewEntry::VirtualFile(_))));
    println!("one of {MANY} checkpoints: {:?}", start.elapsed());
    assert_eq!(view.counts().virtual_files, 1, "no other was read for it");
    let start = std::time::Instant::now();
    let listing = view.list(Path::new("")).unwrap();
    println!("{MANY} checkpoints: {:?}", start.elapsed());
    assert_eq!((listing.entries.len(), listing.hidden.len()), (MANY, MANY));
    assert_eq!(view.counts().virtual_files, MANY as u64);
    let start = std::time::Instant::now();
    view.list(Path::new("")).unwrap();
    println!("again: {:?}", start.elapsed());
}

#[test]
fn ten_thousand_directories_are_shown() {
    let folder = roomy();
    for n in 0..MANY {
        fs::create_dir(folder.path().join(format!("{n:05}"))).unwrap();
    }
    write(folder.path(), &[("05000/pytorch_model.bin", &torch())]);
    let start = std::time::Instant::now();
    let view = view(folder.path());
    assert_eq!(view.list(Path::new("")).unwrap().entries.len(), MANY);
    println!("the parent of {MANY} directories: {:?}", start.elapsed());
    assert_eq!(view.counts(), Default::default(), "none of them was looked into");
    assert_eq!(shown(&view, "05000"), ["model.safetensors*"]);
}
