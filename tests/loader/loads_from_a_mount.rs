//! A path on a mount is loaded from its source, if the source can be seen and is the same. Otherwise it is
//! read through the mount, and the report says why.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use crate::common::command;
use crate::common::command::two_shards;
use crate::common::mounting::{MountFixture, wait_until};
use crate::common::samples::all_samples;
use ckptfs::loader::{LoadError, LoadOptions, OpenCheckpoint, Route};
use ckptfs::{checkpoint, source};

fn loaded(opened: &OpenCheckpoint) -> Vec<(String, Vec<u8>)> {
    let loaded = opened.load_all(opened.tensors()).unwrap();
    let named = opened.tensors().iter().zip(loaded);
    named.map(|(tensor, memory)| (tensor.name.to_string(), memory.to_vec())).collect()
}

fn open(path: impl AsRef<Path>) -> OpenCheckpoint {
    ckptfs::open(path.as_ref()).unwrap()
}

fn source_of(opened: &OpenCheckpoint) -> &Path {
    match opened.route() {
        Route::Direct { source } => source,
        other => panic!("{other:?}"),
    }
}

/// Copies a sample to the fixture's source.
fn put(path: &Path, fixture: &MountFixture) {
    let to = Path::new(&fixture.source);
    fs::remove_file(to.join("model.safetensors")).unwrap();
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap().map(|entry| entry.unwrap()) {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    } else {
        fs::copy(path, to.join(path.file_name().unwrap())).unwrap();
    }
}

fn virtual_file_in(folder: &str) -> PathBuf {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut virtual_files =
        names.filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
    virtual_files.next().unwrap()
}

#[test]
fn every_format_is_loaded_from_its_source() {
    for (name, (_folder, path)) in all_samples() {
        let expected = loaded(&open(&path));
        let fixture = MountFixture::new();
        put(&path, &fixture);
        fixture.mount(&[]);
        let virtual_file = virtual_file_in(&fixture.mountpoint);
        for path in [virtual_file.as_path(), Path::new(&fixture.mountpoint)] {
            let opened = open(path);
            assert!(source_of(&opened).starts_with(&fixture.source), "{name}: {opened:?}");
            assert!(loaded(&opened) == expected, "{name}");
            let tensor = &opened.tensors()[0];
            let mut memory = vec![0; tensor.bytes.len() as usize];
            assert_eq!(opened.load_into([(tensor, &mut memory[..])]).unwrap().fallbacks.len(), 0);
        }
        // No read went through the mount.
        assert_eq!(reads(&fixture), 0);
        assert_eq!(fixture.unmount(&[]).code, 0);
    }
}

fn reads(fixture: &MountFixture) -> u64 {
    fixture.status().unwrap()["stats"]["reads"].as_u64().unwrap()
}

#[test]
fn overmounted_bound_and_plain_files_are_loaded_from_their_source() {
    let fixture = MountFixture::new();
    let expected = loaded(&open(&fixture.source));
    let outcome = command::run(&["mount", &fixture.source, &fixture.source]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let opened = open(&fixture.source);
    // By the same name, but from beneath the mount.
    assert!(source_of(&opened).starts_with(&fixture.source), "{opened:?}");
    assert!(loaded(&opened) == expected);
    let bound = fixture.path("bound");
    fs::create_dir(&bound).unwrap();
    let bind = ["--bind", &fixture.source, &bound];
    assert!(Command::new("mount").args(bind).status().unwrap().success());
    let opened = open(format!("{bound}/model.safetensors"));
    assert!(source_of(&opened).starts_with(&fixture.source), "{opened:?}");
    assert!(loaded(&opened) == expected);
    assert!(Command::new("umount").arg(&bound).status().unwrap().success());
    // No process has it open.
    let outcome = command::run(&["unmount", &fixture.source]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}

#[test]
fn a_file_beside_leftover_shards_is_loaded_from_its_source() {
    let fixture = MountFixture::new();
    let expected = loaded(&open(&fixture.source));
    let shard = "model-00001-of-00002.safetensors";
    fs::write(Path::new(&fixture.source).join(shard), "left").unwrap();
    let outcome = command::run(&["mount", &fixture.source, &fixture.mountpoint]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let opened = open(&fixture.mountpoint);
    assert!(source_of(&opened).starts_with(&fixture.source), "{opened:?}");
    assert!(opened.notes().iter().any(|note| note.contains(shard)), "{:?}", opened.notes());
    assert!(loaded(&opened) == expected);
    let outcome = command::run(&["unmount", &fixture.mountpoint]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}

#[test]
fn a_load_uses_the_options_of_the_mount() {
    let fixture = MountFixture::new();
    let (_folder, path) = all_samples().swap_remove(1).1;
    put(&path, &fixture);
    fixture.mount(&["--allow-partial"]);
    source_of(&open(virtual_file_in(&fixture.mountpoint)));
    // A load of another dictionary is answered from what the mount shows.
    let options = checkpoint::ParseOptions { root_key: Some("ema".into()), ..Default::default() };
    let options = LoadOptions { parse: options, ..LoadOptions::default() };
    let opened = options.open(&virtual_file_in(&fixture.mountpoint));
    assert!(!matches!(opened.map(|o| o.route().clone()), Ok(Route::Direct { .. })));
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_replaced_source_is_not_believed() {
    let fixture = MountFixture::new();
    fixture.mount(&[]);
    for (name, bytes) in two_shards(1, 4096) {
        fs::write(Path::new(&fixture.source).join(name), bytes).unwrap();
    }
    fs::remove_file(Path::new(&fixture.source).join("model.safetensors")).unwrap();
    let virtual_file = Path::new(&fixture.mountpoint).join("model.safetensors");
    wait_until("the set is shown", || {
        fs::metadata(&virtual_file).is_ok_and(|about| about.len() > 8192)
    });
    let held = open(&virtual_file);
    source_of(&held);
    let before = loaded(&held);
    // An open handle keeps the old files; the next open reads the new ones, wherever from.
    for (name, bytes) in two_shards(7, 4096) {
        let new = Path::new(&fixture.source).join("new");
        fs::write(&new, bytes).unwrap();
        fs::rename(new, Path::new(&fixture.source).join(name)).unwrap();
    }
    assert!(loaded(&held) == before);
    wait_until("the new is loaded", || {
        ckptfs::open(&virtual_file).is_ok_and(|opened| loaded(&opened) != before)
    });
    // Written over: an error on either route.
    let shard = Path::new(&fixture.source).join(&two_shards(7, 4096)[0].0);
    let held = open(&virtual_file);
    fs::write(&shard, b"short").unwrap();
    let error = held.load_all(held.tensors()).unwrap_err();
    assert!(matches!(error, LoadError::Source(source::SourceError::Changed { .. })), "{error}");
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn copied_attributes_are_not_believed() {
    let fixture = MountFixture::new();
    fixture.mount(&[]);
    let virtual_file = Path::new(&fixture.mountpoint).join("model.safetensors");
    let other = PathBuf::from(fixture.path("other.safetensors"));
    command::write_model(&other, 3, 64);
    let mut value = Vec::with_capacity(1 << 16);
    rustix::fs::getxattr(
        &virtual_file,
        "user.ckptfs.source",
        rustix::buffer::spare_capacity(&mut value),
    )
    .unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&other, "user.ckptfs.source", &value, flags).unwrap();
    let opened = open(&other);
    assert_eq!((opened.route(), opened.tensors().len()), (&Route::Plain, 3));
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_renamed_source_is_found_through_the_daemon() {
    let fixture = MountFixture::new();
    let expected = loaded(&open(&fixture.source));
    fixture.mount(&[]);
    let virtual_file = Path::new(&fixture.mountpoint).join("model.safetensors");
    let elsewhere = fixture.path("elsewhere");
    fs::rename(&fixture.source, &elsewhere).unwrap();
    let opened = open(&virtual_file);
    source_of(&opened);
    assert!(loaded(&opened) == expected);
    fs::rename(&elsewhere, &fixture.source).unwrap();
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// Ends the daemon, which runs in a PID namespace of its own.
struct Apart(Child);

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_source_that_cannot_be_seen_is_read_through_the_mount() {
    let fixture = MountFixture::new();
    // A set, which only a virtual file shows as one file.
    fs::remove_file(Path::new(&fixture.source).join("model.safetensors")).unwrap();
    for (name, bytes) in two_shards(3, 4096) {
        fs::write(Path::new(&fixture.source).join(name), bytes).unwrap();
    }
    let expected = loaded(&open(&fixture.source));
    // The PID that the daemon reports is another process here.
    let apart = ["--pid", "--fork", "--kill-child", command::ckptfs(), "mount", "--foreground"];
    let mut command = Command::new("unshare");
    command.args(apart).args([&fixture.source, &fixture.mountpoint]);
    let apart = Apart(command.spawn().unwrap());
    fixture.wait_until_alive();
    let elsewhere = fixture.path("elsewhere");
    fs::rename(&fixture.source, &elsewhere).unwrap();
    let virtual_file = Path::new(&fixture.mountpoint).join("model.safetensors");
    for path in [virtual_file.as_path(), Path::new(&fixture.mountpoint)] {
        let opened = open(path);
        let Route::ThroughMount { reason: why } = opened.route() else { panic!("{opened:?}") };
        assert!(why.contains("its source cannot be"), "{why}");
        assert!(loaded(&opened) == expected);
        let tensor = &opened.tensors()[0];
        let mut memory = vec![0; tensor.bytes.len() as usize];
        let report = opened.load_into([(tensor, &mut memory[..])]).unwrap();
        assert_eq!(report.fallbacks.keys().collect::<Vec<_>>(), [why]);
    }
    assert!(reads(&fixture) > 0);
    // Back in its old place, the source is found again.
    fs::rename(&elsewhere, &fixture.source).unwrap();
    source_of(&open(&virtual_file));
    assert_eq!(fixture.unmount(&[]).code, 0);
    drop(apart);
}
