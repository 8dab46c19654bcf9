//! Commands that read a path read a mount of ours like any directory. They report a mount whose daemon has
//! gone.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::common::command;
use crate::common::command::{Outcome, run};
use crate::common::mounting::{MountFixture, run_program, wait_until};
use rustix::fs::{Dir, Mode, OFlags, mkdirat, openat, symlinkat};
use rustix::io::Errno;
use serde_json::Value;

/// Every command that reads, on that path.
fn all_that_read(path: &str, other: &str, out: &str) -> Vec<Outcome> {
    [
        &["ls", path][..],
        &["ls", "-r", "--json", path],
        &["inspect", path],
        &["inspect", "--json", path],
        &["verify", path],
        &["verify", other, "--against", path],
        &["export", path, out],
    ]
    .map(run)
    .into()
}

#[test]
fn links_that_lead_out_are_listed() {
    let fixture = MountFixture::new();
    symlink("/etc", Path::new(&fixture.source).join("out")).unwrap();
    symlink("model.safetensors", Path::new(&fixture.source).join("in")).unwrap();
    fixture.mount(&[]);
    let listed = |path: &str| -> Value {
        let outcome = run(&["ls", "--json", path]);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        serde_json::from_str(&outcome.stdout).unwrap()
    };
    let (mount, source) = (listed(&fixture.mountpoint), listed(&fixture.source));
    assert_eq!(mount[0]["entries"], source[0]["entries"]);
    assert!(mount[0]["entries"][2]["refused"].is_string(), "{}", mount[0]["entries"]);
    let out = format!("{}/out.safetensors", fixture.mountpoint);
    let outcome = run(&["export", &format!("{}/model.safetensors", fixture.source), &out]);
    let remedy = "choose another directory: this one is read-only";
    assert!(outcome.code == 1 && outcome.stderr.contains(remedy), "{}", outcome.stderr);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_mount_shows_what_ls_says() {
    let fixture = MountFixture::new();
    let source = Path::new(&fixture.source);
    fs::remove_file(source.join("model.safetensors")).unwrap();
    let shards = command::two_shards(1, 8);
    let entries = shards.iter().enumerate();
    let entries = entries.map(|(n, (name, _))| format!("\"layer.{n}.weight\":{name:?}"));
    let index = entries.collect::<Vec<_>>().join(",");
    for (name, bytes) in &shards {
        fs::write(source.join(name), bytes).unwrap();
    }
    let index_name = "model.safetensors.index.json";
    fs::write(source.join(index_name), format!("{{\"weight_map\":{{{index}}}}}")).unwrap();
    fs::write(source.join("config.json"), "{}").unwrap();
    command::write_transposed(&source.join("optimizer.pt"), 2);
    command::write_transposed(&source.join("sub.PT"), 2);
    command::write_transposed(&source.join("pytorch_lora_weights.bin"), 2);
    let shows: [(&str, &[&str]); 7] = [
        ("", &["config.json", "model.safetensors", "optimizer.pt", LORA, "sub.PT"]),
        ("model.safetensors", &["model.safetensors"]),
        (index_name, &["model.safetensors"]),
        (&shards[0].0, &[&shards[0].0]),
        (LORA, &["pytorch_lora_weights.safetensors"]),
        ("optimizer.pt", &["optimizer.pt"]),
        ("sub.PT", &["sub.safetensors"]),
    ];
    for (name, expected) in shows {
        let path = source.join(name);
        let path = path.to_str().unwrap();
        let listed: Value = serde_json::from_str(&run(&["ls", "--json", path]).stdout).unwrap();
        let listed = listed[0]["entries"].as_array().unwrap();
        let names: Vec<_> = listed.iter().map(|entry| entry["name"].as_str().unwrap()).collect();
        assert_eq!(names, expected, "{name}");
        let outcome = run(&["mount", path, &fixture.mountpoint]);
        assert_eq!(outcome.code, 0, "{name}: {}", outcome.stderr);
        assert_eq!(command::names_in(Path::new(&fixture.mountpoint)), expected, "{name}");
        for entry in listed {
            let shown = Path::new(&fixture.mountpoint).join(entry["name"].as_str().unwrap());
            assert_eq!(fs::metadata(shown).unwrap().len(), entry["size"].as_u64().unwrap());
        }
        assert_eq!(fixture.unmount(&[]).code, 0);
    }
    // A missing path is not mounted.
    let missing = format!("{}/missing.safetensors", fixture.source);
    let outcome = run(&["mount", &missing, &fixture.mountpoint]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("missing.safetensors: no such file"), "{}", outcome.stderr);
    assert_eq!(fixture.mounts(), 0);
}

/// Stays as it is beside a safetensors model.
const LORA: &str = "pytorch_lora_weights.bin";

#[test]
fn a_dead_mount_is_reported_as_dead() {
    let fixture = MountFixture::dead();
    let (real, out) = (format!("{}/model.safetensors", fixture.source), fixture.path("out"));
    for path in [fixture.mountpoint.clone(), format!("{}/model.safetensors", fixture.mountpoint)] {
        for outcome in all_that_read(&path, &real, &out) {
            assert_eq!(outcome.code, 1, "{}", outcome.stderr);
            assert!(outcome.stderr.contains("mount whose daemon has gone"), "{}", outcome.stderr);
            assert!(outcome.stderr.contains("ckptfs unmount"), "{}", outcome.stderr);
            assert!(!outcome.stderr.contains("os error"), "{}", outcome.stderr);
        }
    }
}

#[test]
fn a_dead_mount_hides_nothing_beside_it() {
    let fixture = MountFixture::dead();
    let outcome = run(&["ls", "-r", "--json", fixture.parent()]);
    assert_eq!(outcome.code, 1, "{}", outcome.stderr);
    let all: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(all[0]["unreadable"][0]["name"], "mnt");
    assert!(all[0]["unreadable"][0]["reason"].as_str().unwrap().contains("daemon has gone"));
    assert_eq!(all[1]["path"], "source");
    assert_eq!(all[1]["entries"][0]["tensors"], 2);
}

#[test]
fn a_directory_with_a_dead_mount_in_it_is_mounted_and_listed() {
    let fixture = MountFixture::dead();
    let outer = MountFixture::new();
    let log = outer.path("log");
    let outcome = run(&["mount", fixture.parent(), &outer.mountpoint, "--log-file", &log]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let shown = outer.daemon().unwrap();
    for _ in 0..2 {
        let names: BTreeSet<_> = fs::read_dir(&outer.mountpoint)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert!(
            names.contains(OsStr::new("mnt")) && names.contains(OsStr::new("source")),
            "{names:?}"
        );
        let error = fs::metadata(format!("{}/mnt", outer.mountpoint)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));
        fs::read(format!("{}/source/model.safetensors", outer.mountpoint)).unwrap();
    }
    // However often the name is looked up.
    let log = fs::read_to_string(&log).unwrap();
    assert_eq!(log.matches("daemon has gone").count(), 1, "{log}");
    assert_eq!(outer.unmount(&[]).code, 0);
    wait_until("its daemon is gone", || !shown.runs());
}

#[test]
fn a_link_back_to_the_mount_ends() {
    let fixture = MountFixture::new();
    // Two links to the directory that has both the source and the mountpoint.
    symlink("..", format!("{}/up", fixture.source)).unwrap();
    symlink("../source/up", format!("{}/further", fixture.source)).unwrap();
    fixture.mount(&["--follow-symlinks"]);
    fs::read(format!("{}/up/source/model.safetensors", fixture.mountpoint)).unwrap();
    let mut found = Command::new("find");
    let outcome = found.arg(&fixture.mountpoint).output().unwrap();
    let found = String::from_utf8_lossy(&outcome.stdout).lines().count();
    assert!((5..100).contains(&found), "{found}: {}", String::from_utf8_lossy(&outcome.stdout));
    fixture.wait_until_alive();
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// Makes nested folders step by step, because no system call takes the whole path.
fn make_deep(top: OwnedFd, names: &[String]) -> OwnedFd {
    names.iter().fold(top, |above, name| {
        mkdirat(&above, name, Mode::RWXU | Mode::ROTH | Mode::XOTH).unwrap();
        step(above, name)
    })
}

fn open_folder(path: &str) -> OwnedFd {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap()
}

fn step(above: OwnedFd, name: &str) -> OwnedFd {
    openat(above, name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap()
}

/// Reads a file from its open directory, as a program does that walks step by step; follows links.
fn read(folder: &OwnedFd, name: &str) -> Result<Vec<u8>, Errno> {
    let mut bytes = Vec::new();
    let file = openat(folder, name, OFlags::RDONLY, Mode::empty())?;
    fs::File::from(file).read_to_end(&mut bytes).unwrap();
    Ok(bytes)
}

#[test]
fn directories_deeper_than_the_longest_path_are_walked() {
    let fixture = MountFixture::new();
    let names: Vec<String> = (0..40).map(|n| format!("{n:0250}")).collect();
    let bottom = make_deep(open_folder(&fixture.source), &names);
    let write = |name: &str, bytes: &[u8]| {
        let flags = OFlags::WRONLY | OFlags::CREATE;
        let file = openat(&bottom, name, flags, Mode::RUSR | Mode::ROTH).unwrap();
        fs::File::from(file).write_all(bytes).unwrap();
    };
    let shards = command::two_shards(1, 8);
    shards.iter().for_each(|(name, bytes)| write(name, bytes));
    write("plain", b"words");
    mkdirat(&bottom, "sub", Mode::RWXU).unwrap();
    let link = |to: &str, name: &str| symlinkat(to, &bottom, name).unwrap();
    link("plain", "beside");
    link(&format!("sub/../../{}/plain", names[39]), "up");
    // These lead up past the start of the last piece of the path.
    link(&format!("{}model.safetensors", "../".repeat(40)), "top");
    link(&format!("{}model.safetensors", "../".repeat(41)), "out");
    link(&format!("{}/model.safetensors", fixture.source), "absolute");
    fixture.mount(&[]);

    let shown =
        names.iter().fold(open_folder(&fixture.mountpoint), |above, name| step(above, name));
    let mut listed: Vec<_> = Dir::read_from(&shown).unwrap().map(|entry| entry.unwrap()).collect();
    listed.retain(|entry| !entry.file_name().to_bytes().starts_with(b"."));
    let mut listed: Vec<_> =
        listed.iter().map(|entry| entry.file_name().to_str().unwrap()).collect();
    listed.sort_unstable();
    let all = ["absolute", "beside", "model.safetensors", "out", "plain", "sub", "top", "up"];
    assert_eq!(listed, all);
    let model = read(&shown, "model.safetensors").unwrap();
    assert_eq!(&model[model.len() - 16..], [[1; 8], [2; 8]].concat());
    for name in ["plain", "beside", "up"] {
        assert_eq!(read(&shown, name).unwrap(), b"words", "{name}");
    }
    let top = fs::read(format!("{}/model.safetensors", fixture.source)).unwrap();
    for name in ["top", "absolute"] {
        assert_eq!(read(&shown, name).as_ref(), Ok(&top), "{name}");
    }
    assert_eq!(read(&shown, "out"), Err(Errno::ACCESS));

    drop(shown);
    let found = run_program(&["find", &fixture.mountpoint, "-type", "f", "-size", "+0"]);
    assert_eq!((found.code, found.stderr.as_str()), (0, ""));
    assert_eq!(found.stdout.lines().count(), 3);
    let listed = run(&["ls", "-r", "--json", &fixture.source]);
    assert_eq!((listed.code, listed.stderr.as_str()), (0, ""));
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn directories_that_are_too_deep_do_not_stop_a_walk() {
    let fixture = MountFixture::new();
    let names: Vec<String> = (0..70).map(|n| format!("{n:0250}")).collect();
    let mut above = open_folder(&fixture.source);
    for name in &names {
        above = make_deep(above, std::slice::from_ref(name));
        mkdirat(&above, "z", Mode::RWXU).unwrap();
    }
    fixture.mount(&[]);
    let found = run_program(&["find", &fixture.mountpoint, "-name", "z"]);
    let (messages, shown) = (found.stderr.lines().count(), found.stdout.lines().count());
    assert_eq!((found.code, messages), (1, 1), "{}", found.stderr);
    assert!(found.stderr.contains("File name too long"), "{}", found.stderr);
    // 251 bytes a level.
    assert_eq!(shown, (16 << 10) / 251);
    fixture.wait_until_alive();
    assert_eq!(fixture.unmount(&[]).code, 0);
}
