//! `ckptfs ls` names everything that is there. For each file that looks like a checkpoint it says what
//! becomes of it, or why nothing does.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::common;
use crate::common::command;
use crate::common::command::{Outcome, path, run};
use crate::common::safetensors::valid;
use crate::common::shards::{A, B, INDEX, index, set};
use crate::common::view::{torch, torch_with, write};
use serde_json::Value;

/// Lists directories as JSON; the listing must succeed.
fn json(args: &[&str]) -> Value {
    let outcome = run(&[&["ls", "--json"], args].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    serde_json::from_str(&outcome.stdout).unwrap()
}

fn listed(folder: &Path, more: &[&str]) -> Value {
    json(&[&[folder.to_str().unwrap()], more].concat())[0].clone()
}

/// The list's entry of that name.
fn named<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    list.as_array().unwrap().iter().find(|entry| entry["name"] == name)
}

/// The reason why a name stays as it is.
fn why(listed: &Value, name: &str) -> String {
    let left = named(&listed["left"], name).unwrap_or_else(|| panic!("no reason for {name}"));
    left["reason"].as_str().unwrap().to_owned()
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap()).collect()
}

#[test]
fn kept_files_are_listed_with_their_pattern() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = torch();
    for name in ["optimizer.pt", "mp_rank_00_model_states.pt", "mine.bin", "rng_state_0.pth"] {
        write(folder.path(), &[(name, &bytes)]);
    }
    write(folder.path(), &[("optimizer.txt", b""), ("mine.json", b"")]);
    let keep = listed(folder.path(), &["--keep", "mine*"]);
    assert!(why(&keep, "optimizer.pt").contains("kept as it is: matches optimizer*"));
    assert!(why(&keep, "mp_rank_00_model_states.pt").contains("*_model_states*"));
    assert!(why(&keep, "rng_state_0.pth").contains("rng_state*"));
    assert!(why(&keep, "mine.bin").contains("matches mine* (--keep)"));
    assert_eq!(keep["left"].as_array().unwrap().len(), 4, "{}", keep["left"]);
    let text = run(&["ls", folder.path().to_str().unwrap()]).stdout;
    assert!(text.contains("as is  optimizer.pt: kept as it is: matches optimizer*"), "{text}");
}

#[test]
fn a_set_with_a_kept_shard_stays() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["x-00001-of-00002.bin", "x-00002-of-00002.bin"];
    let index = index(&[("a", names[0]), ("b", names[1])]);
    write(folder.path(), &[(names[0], &torch_with("a")), (names[1], &torch_with("b"))]);
    write(folder.path(), &[("x.bin.index.json", index.as_bytes())]);
    let listed = listed(folder.path(), &["--keep", "x-00002*"]);
    let why = why(&listed, "x.bin.index.json");
    assert!(why.contains(names[1]) && why.contains("x-00002*"), "{why}");
}

#[test]
fn names_that_are_no_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = torch();
    for name in ["a.pkl", "b.PT", "c.pth.tar", "d.pt"] {
        write(folder.path(), &[(name, &bytes)]);
    }
    // Nobody takes these for checkpoints.
    for name in ["config.json", "tokenizer.model", "README.md", "vocab.txt", "merges.tar"] {
        write(folder.path(), &[(name, b"")]);
    }
    fs::remove_file(folder.path().join("config.json")).unwrap();
    fs::create_dir(folder.path().join("directory.PT")).unwrap();
    let listed = listed(folder.path(), &[]);
    assert_eq!(names(&listed["left"]), ["a.pkl", "b.PT", "c.pth.tar"]);
    assert!(why(&listed, "a.pkl").contains(".pkl can be anything"));
    assert!(why(&listed, "b.PT").contains(".PT and not .pt"));
    assert!(named(&listed["entries"], "d.safetensors").is_some());
    // As the reason says, `ls` of its own path shows it.
    let alone = json(&[&path(folder.path(), "a.pkl")]);
    assert_eq!(names(&alone[0]["entries"]), ["a.safetensors"]);
}

#[test]
fn names_that_are_not_utf8_are_given_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let odd = |bytes: &[u8]| folder.path().join(OsStr::from_bytes(bytes));
    fs::write(odd(b"\xff.pt"), torch()).unwrap();
    fs::write(odd(b"\xfe.pt"), torch()).unwrap();
    fs::create_dir(odd(b"dir\xff")).unwrap();
    write(folder.path(), &[("plain", b"")]);
    symlink(OsStr::from_bytes(b"\xfe.pt"), folder.path().join("link")).unwrap();
    let all = json(&["-r", folder.path().to_str().unwrap()]);
    let entries = &all[0]["entries"];
    let bytes: Vec<&Value> = entries
        .as_array()
        .unwrap()
        .iter()
        .filter(|entry| entry["name"].as_str().unwrap().ends_with("\u{fffd}.pt"))
        .map(|entry| &entry["name_bytes"])
        .collect();
    assert_eq!(bytes, ["fe2e7074", "ff2e7074"]);
    assert_eq!(named(entries, "plain").unwrap().get("name_bytes"), None);
    let link = named(entries, "link").unwrap();
    assert_eq!(
        (&link["target"], &link["target_bytes"]),
        (&"\u{fffd}.pt".into(), &"fe2e7074".into())
    );
    assert_eq!(all[1]["path_bytes"], "646972ff");
    assert_eq!(all[0].get("path_bytes"), None);
    let left = all[0]["left"].as_array().unwrap();
    assert_eq!(left.len(), 2);
    for left in left {
        assert!(left["reason"].as_str().unwrap().contains("UTF-8"), "{left}");
        assert!(left["name_bytes"].as_str().unwrap().ends_with("2e7074"), "{left}");
    }
}

#[test]
fn files_called_safetensors_that_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let good = valid(&["a", "b"]);
    let pickle = common::pickle::pickle(&common::pickle::text("no tensor in it, and long enough"));
    write(
        folder.path(),
        &[
            ("good.safetensors", &good),
            ("cut.safetensors", &good[..good.len() - 1]),
            ("empty.safetensors", b""),
            ("pickle.safetensors", &pickle),
            ("zip.safetensors", &torch()),
        ],
    );
    symlink("missing", folder.path().join("link.safetensors")).unwrap();
    let listed = listed(folder.path(), &[]);
    assert_eq!(named(&listed["entries"], "good.safetensors").unwrap()["tensors"], 2);
    assert_eq!(named(&listed["left"], "good.safetensors"), None);
    for (name, says) in [
        ("cut.safetensors", "not a valid safetensors file"),
        ("empty.safetensors", "an empty file"),
        ("pickle.safetensors", "a pickle"),
        ("zip.safetensors", "a torch zip file with the extension .safetensors"),
        ("link.safetensors", "no such file"),
    ] {
        let why = why(&listed, name);
        assert!(why.contains(says), "{name}: {why}");
        let entry = named(&listed["entries"], name).unwrap();
        assert_eq!((entry["kind"] == "virtual_file", entry.get("tensors")), (false, None));
    }
    assert_eq!(listed["refused"], Value::Array(vec![]));
    let text = run(&["ls", folder.path().to_str().unwrap()]).stdout;
    assert!(text.contains("good.safetensors  (2 tensors)"), "{text}");
}

#[test]
fn a_link_to_a_virtual_files_name_means_that_file() {
    let folder = tempfile::tempdir().unwrap();
    let source = &folder.path().join("source");
    write(source, &[("model.pt", &torch()), ("sub/other.ckpt", b"no pickle")]);
    for (link, target) in [
        ("a.safetensors", "model.safetensors"),
        ("b.safetensors", "a.safetensors"),
        ("sub/c.safetensors", "../model.safetensors"),
        ("d.safetensors", "sub/other.safetensors"),
    ] {
        symlink(target, source.join(link)).unwrap();
    }
    let all = json(&["-r", source.to_str().unwrap()]);
    assert_eq!(names(&all[0]["entries"])[..2], ["a.safetensors", "b.safetensors"]);
    // A file that is no checkpoint has no virtual file.
    assert_eq!(names(&all[0]["left"]), ["d.safetensors"]);
    assert!(why(&all[0], "d.safetensors").contains("no such file"));
    assert_eq!(named(&all[1]["left"], "c.safetensors"), None);
}

#[test]
fn a_link_that_is_refused_has_no_target_and_a_reason() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(folder.path(), &[("file", b"")]);
    symlink(out.path(), folder.path().join("out")).unwrap();
    symlink("file", folder.path().join("in")).unwrap();
    let listed = listed(folder.path(), &[]);
    let entry = |name: &str| named(&listed["entries"], name).unwrap();
    assert_eq!(entry("out").get("target"), None);
    assert!(entry("out")["refused"].as_str().unwrap().contains("--follow-symlinks"));
    assert_eq!((entry("in").get("refused"), &entry("in")["target"]), (None, &"file".into()));
    let text = run(&["ls", folder.path().to_str().unwrap()]).stdout;
    assert!(text.contains("out -> refused: leads out"), "{text}");
}

/// The number of tensors that `ls` shows for a path, which `inspect` and `verify` must read too.
fn alone(path: &str) -> (Value, usize) {
    let listed = json(&[path])[0].clone();
    let outcome = run(&["inspect", "--json", path]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(run(&["verify", path]).code, 0);
    (listed, report["tensors"].as_array().unwrap().len())
}

#[test]
fn a_virtual_files_name_means_that_file_alone() {
    let indexed = set(&[(A, &["a"]), (B, &["c"])], &[("a", A), ("c", B)]);
    write(indexed.path(), &[("config.json", b"{}"), ("other.bin", &torch())]);
    let (shows, tensors) = alone(&path(indexed.path(), "model.safetensors"));
    assert_eq!(names(&shows["entries"]), ["model.safetensors"]);
    assert_eq!(names(&shows["hidden"]), [A, B, INDEX]);
    assert_eq!((&shows["entries"][0]["virtual_file"]["tensors"], tensors), (&2.into(), 2));

    let single = tempfile::tempdir().unwrap();
    write(single.path(), &[("pytorch_model.bin", &torch()), ("config.json", b"{}")]);
    let virtual_name = path(single.path(), "model.safetensors");
    let (shows, tensors) = alone(&virtual_name);
    assert_eq!(names(&shows["entries"]), ["model.safetensors"]);
    assert_eq!(shows["entries"][0]["virtual_file"]["from"][0], "pytorch_model.bin");
    assert_eq!(tensors, 1);
    // Each path means the virtual file that the directory shows, and the one that its own source file gives.
    let identity = |listed: &Value, name: &str| {
        named(&listed["entries"], name).unwrap()["virtual_file"]["identity"].clone()
    };
    let whole = listed(single.path(), &[]);
    assert_eq!(identity(&whole, "model.safetensors"), identity(&shows, "model.safetensors"));
    let file = json(&[&path(single.path(), "pytorch_model.bin")])[0].clone();
    assert_eq!(identity(&file, "model.safetensors"), identity(&shows, "model.safetensors"));

    // A name that the directory does not show means nothing; a real file means itself.
    for name in ["pytorch_model.safetensors", "other.safetensors"] {
        assert_eq!(run(&["ls", &path(single.path(), name)]).code, 1);
        assert_eq!(run(&["inspect", &path(single.path(), name)]).code, 1);
    }
    write(single.path(), &[("model.safetensors", &valid(&["x", "y"]))]);
    let (shows, tensors) = alone(&virtual_name);
    assert_eq!((&shows["entries"][0]["tensors"], tensors), (&2.into(), 2));
}

#[test]
fn a_refused_virtual_file_is_refused_by_its_name_too() {
    let folder = tempfile::tempdir().unwrap();
    let whole = torch();
    write(folder.path(), &[("pytorch_model.bin", &whole[..whole.len() / 2])]);
    for command in ["ls", "inspect", "verify"] {
        let outcome = run(&[command, &path(folder.path(), "model.safetensors")]);
        assert_eq!(outcome.code, 3, "{}", outcome.stderr);
    }
    // A link that leads out under a virtual file's name is refused, as in the directory: the user did not
    // type the link.
    let out = tempfile::tempdir().unwrap();
    write(out.path(), &[("elsewhere", &whole)]);
    fs::remove_file(folder.path().join("pytorch_model.bin")).unwrap();
    symlink(out.path().join("elsewhere"), folder.path().join("pytorch_model.bin")).unwrap();
    for command in ["ls", "inspect", "verify"] {
        let virtual_file = path(folder.path(), "model.safetensors");
        let outcome = run(&[command, &virtual_file]);
        assert_eq!(outcome.code, 3, "{}", outcome.stderr);
        assert_eq!(run(&[command, "--follow-symlinks", &virtual_file]).code, 0);
    }
}

#[test]
fn a_shard_alone_has_a_note() {
    let shards = set(&[(A, &["a"]), (B, &["c"])], &[("a", A), ("c", B)]);
    let (shows, tensors) = alone(&path(shards.path(), A));
    assert_eq!((names(&shows["entries"]), tensors), (vec![A], 1));
    assert!(why(&shows, A).contains("only shard 1 of 2"));
    let torches = tempfile::tempdir().unwrap();
    write(torches.path(), &[("x-00002-of-00002.bin", &torch())]);
    let (shows, tensors) = alone(&path(torches.path(), "x-00002-of-00002.bin"));
    assert_eq!((names(&shows["entries"]), tensors), (vec!["x-00002-of-00002.safetensors"], 1));
    let notes = shows["entries"][0]["virtual_file"]["notes"].to_string();
    assert!(notes.contains("only shard 2 of 2"), "{notes}");
}

#[test]
fn a_stale_index_is_refused_and_reported() {
    let shards = set(&[(A, &["a"])], &[("a", A), ("c", B)]);
    let listed = listed(shards.path(), &[]);
    assert_eq!(names(&listed["entries"]), [A, INDEX]);
    assert_eq!(listed["hidden"], Value::Array(vec![]));
    let refused = &listed["refused"][0];
    assert!(refused["reason"].as_str().unwrap().contains(B), "{refused}");
    assert!(!refused["remedy"].as_str().unwrap().is_empty());
}

#[test]
fn the_cache_of_a_hub() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--o--n");
    write(&repository, &[("blobs/hash", &torch()), (".no_exist/sha/model.safetensors", b"")]);
    write(&repository, &[("snapshots/sha/config.json", b"{}"), ("trees/sha.json", b"{}")]);
    symlink("../../blobs/hash", repository.join("snapshots/sha/pytorch_model.bin")).unwrap();
    symlink("/etc", repository.join("snapshots/sha/out")).unwrap();
    let all = json(&["-r", cache.path().to_str().unwrap()]);
    let at = |end: &str| {
        let mut found = all.as_array().unwrap().iter();
        found.find(|listed| listed["path"].as_str().unwrap().ends_with(end)).unwrap()
    };
    assert_eq!(names(&at("snapshots/sha")["hidden"]), ["pytorch_model.bin"]);
    assert_eq!(names(&at(".no_exist/sha")["hidden"]), ["model.safetensors"]);
    assert_eq!(names(&at("trees")["hidden"]), ["sha.json"]);
    assert!(named(&at("snapshots/sha")["entries"], "out").unwrap()["refused"].is_string());
    assert_eq!(names(&at("blobs")["entries"]), ["hash"]);
}

#[test]
fn many_plain_files() {
    let folder = tempfile::tempdir().unwrap();
    for n in 0..10_000 {
        fs::write(folder.path().join(format!("{n:05}.txt")), "").unwrap();
    }
    let listed = listed(folder.path(), &[]);
    assert_eq!(listed["entries"].as_array().unwrap().len(), 10_000);
    for other in ["hidden", "left", "refused", "unreadable"] {
        assert_eq!(listed[other], Value::Array(vec![]));
    }
}

/// An unprivileged user of every system.
const NOBODY: &str = "65534";

/// Lists as that user, with a copy of the command that every user may run.
fn as_nobody(folder: &Path, args: &[&str]) -> Outcome {
    let binary = folder.join("ckptfs");
    command::install(command::ckptfs(), &binary);
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
    command::run_command(command.arg(binary).args(args).current_dir("/"))
}

#[test]
fn a_directory_that_cannot_be_read_keeps_no_other_from_being_listed() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("m/a/x.pt", &torch()), ("m/b/x.pt", b""), ("m/c/x.pt", &torch())]);
    fs::set_permissions(folder.path().join("m/b"), fs::Permissions::from_mode(0o000)).unwrap();
    let source = path(folder.path(), "m");
    let outcome = as_nobody(folder.path(), &["ls", "-r", "--json", &source]);
    assert_eq!(outcome.code, 1, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("1 name could not be read"), "{}", outcome.stderr);
    let all: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let paths: Vec<_> = all.as_array().unwrap().iter().map(|listed| &listed["path"]).collect();
    assert_eq!(paths, ["", "a", "b", "c"]);
    assert!(all[2]["error"].as_str().unwrap().contains("ermission"), "{}", all[2]);
    assert_eq!(all[1].get("error"), None);
    for whole in [&all[1], &all[3]] {
        assert_eq!(names(&whole["entries"]), ["x.safetensors"]);
    }
    let outcome = as_nobody(folder.path(), &["ls", "-r", &source]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stdout.contains("unreadable  "), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("m/c:"), "{}", outcome.stdout);
    // A directory that is asked for and cannot be read is a failure.
    let outcome = as_nobody(folder.path(), &["ls", "-r", &path(folder.path(), "m/b")]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""), "{}", outcome.stderr);
    fs::set_permissions(folder.path().join("m/b"), fs::Permissions::from_mode(0o755)).unwrap();
}

/// In a directory it is listed with its reason. A path that was typed is an error, as for `inspect`.
#[test]
fn a_refused_file_that_was_named_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 3\n";
    for (name, bytes) in [
        ("damaged.safetensors", &b"\x10\0\0\0\0\0\0\0{\"a\":"[..]),
        ("pointer.safetensors", pointer),
        ("optimizer.pt", pointer),
    ] {
        let path = path(folder.path(), name);
        fs::write(&path, bytes).unwrap();
        let (listed, inspected) = (run(&["ls", &path]), run(&["inspect", &path]));
        assert_eq!((listed.code, listed.stdout.as_str()), (3, ""), "{name}");
        assert_eq!(listed.stderr, inspected.stderr, "{name}");
        let as_json = run(&["ls", "--json", &path]);
        assert_eq!((as_json.code, as_json.stdout.as_str()), (3, ""), "{name}");
    }
    let listed = run(&["ls", folder.path().to_str().unwrap()]);
    assert_eq!(listed.code, 0, "{}", listed.stderr);
    assert_eq!(listed.stdout.matches("a Git LFS pointer").count(), 2, "{}", listed.stdout);
    // Kept by a rule, and nothing is wrong with it.
    let kept = path(folder.path(), "optimizer.bin");
    fs::write(&kept, "state of another program").unwrap();
    let listed = run(&["ls", &kept]);
    assert_eq!(listed.code, 0, "{}", listed.stderr);
    assert!(listed.stdout.contains("matches optimizer*"), "{}", listed.stdout);
}
