//! A mount that fails tells its caller why, and what to do about it.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::command;
use crate::common::command::{ckptfs, run, two_shards};
use crate::common::mounting::{MountFixture, run_program, wait_until};

/// Mounts in the background and in the foreground; each must fail in the same way.
#[track_caller]
fn fails(arguments: &[&str], code: i32, what: &str, remedy: &str) {
    for way in [&["mount"][..], &["mount", "-f"]] {
        let outcome = run(&[way, arguments].concat());
        assert_eq!(
            (outcome.code, outcome.stdout.as_str()),
            (code, ""),
            "{arguments:?}: {}",
            outcome.stderr
        );
        let (messages, helps) = outcome.stderr.split_once("what to do: ").unwrap();
        assert!(messages.contains(what), "{arguments:?}: {}", outcome.stderr);
        assert!(helps.contains(remedy), "{arguments:?}: {}", outcome.stderr);
    }
}

#[test]
fn a_bad_mountpoint_is_explained() {
    let fixture = MountFixture::new();
    let source = &fixture.source[..];
    let (missing, file, looping) =
        (fixture.path("missing"), fixture.path("file"), fixture.path("loop"));
    fs::write(&file, "text").unwrap();
    symlink(&looping, &looping).unwrap();
    let inside = format!("{source}/inside");
    fs::create_dir(&inside).unwrap();
    let full = fixture.path("full");
    fs::create_dir_all(format!("{full}/something")).unwrap();
    fails(&[source, &missing], 1, "does not exist", "mkdir -p");
    fails(&[source, &format!("{file}/sub")], 1, "does not exist", "mkdir -p");
    fails(&[source, &looping], 1, "symbolic links", "check the path");
    fails(&[source, &file], 1, "not a directory", "an empty directory as MOUNTPOINT, after SOURCE");
    fails(&[source, &full], 1, "not empty", "--nonempty");
    fails(&[source, "/proc/self/fd"], 1, "not empty", "--nonempty");
    fails(&[source, &inside], 1, "lies inside", "outside of the source");
    assert_eq!((fixture.mounts(), fixture.state().as_str()), (0, "none"));
    assert_eq!(run(&["mount", source, &full, "--nonempty"]).code, 0);
    fails(&[source, &full], 1, "already shows", &format!("ckptfs unmount {full}"));
    assert_eq!(run(&["unmount", &full]).code, 0);
}

#[test]
fn a_bad_log_file_or_metrics_address_is_explained() {
    let fixture = MountFixture::new();
    let (source, mountpoint) = (&fixture.source[..], &fixture.mountpoint[..]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    fails(&[source, mountpoint, "--log-file", source], 1, "cannot log", "can be written to");
    fails(&[source, mountpoint, "--metrics", &taken], 1, "cannot serve metrics", "another port");
    let beside = fixture.path("link");
    symlink(mountpoint, &beside).unwrap();
    for log in [format!("{mountpoint}/log"), format!("{beside}/log")] {
        let fails = |mountpoint: &str| {
            fails(
                &[source, mountpoint, "--log-file", &log],
                2,
                "lies inside",
                "outside of the mount",
            );
        };
        fails(mountpoint);
        fails(&beside);
    }
    assert_eq!(fs::read_dir(mountpoint).unwrap().count(), 0);
    assert_eq!((fixture.mounts(), fixture.state().as_str()), (0, "none"));
}

/// Under any limit on open files, a mount works or is refused in one sentence.
#[test]
fn a_mount_with_too_few_descriptors_is_refused() {
    let fixture = MountFixture::new();
    let inside = format!("{}/model.safetensors", fixture.mountpoint);
    let mut answers = Vec::new();
    for limit in 4..64 {
        let limit = format!("--nofile={limit}");
        let mount = [ckptfs(), "mount", "--quiet", &fixture.source, &fixture.mountpoint];
        let outcome = run_program(&[&["prlimit", &limit][..], &mount].concat());
        if outcome.code == 0 {
            assert_eq!((outcome.stderr.as_str(), fixture.mounts()), ("", 1), "{limit}");
            assert!(fs::read(&inside).is_ok());
            assert_eq!(fixture.unmount(&[]).code, 0);
        } else {
            let messages: Vec<_> = outcome.stderr.lines().collect();
            assert_eq!(
                (outcome.code, messages.len(), fixture.mounts()),
                (1, 2, 0),
                "{limit}: {messages:?}"
            );
            assert!(
                messages[0].contains("needs 32 free file descriptors"),
                "{limit}: {messages:?}"
            );
            assert!(
                messages[1].contains("what to do: raise the hard limit"),
                "{limit}: {messages:?}"
            );
        }
        answers.push(outcome.code);
    }
    assert!(answers.is_sorted_by(|before, after| before >= after), "{answers:?}");
    assert_eq!((answers[0], answers[59]), (1, 0), "{answers:?}");
}

/// In the foreground, the mount is the process itself.
#[test]
fn a_mount_in_the_foreground_with_too_few_descriptors_is_refused() {
    let fixture = MountFixture::new();
    for limit in 4..32 {
        let limit = format!("--nofile={limit}");
        let mount = [ckptfs(), "mount", "-f", &fixture.source, &fixture.mountpoint];
        let outcome = run_program(&[&["prlimit", &limit][..], &mount].concat());
        assert_eq!((outcome.code, fixture.mounts()), (1, 0), "{limit}: {}", outcome.stderr);
        assert!(
            outcome.stderr.contains("needs 32 free file descriptors"),
            "{limit}: {}",
            outcome.stderr
        );
    }
}

#[test]
fn a_log_pipe_without_a_reader_is_refused() {
    let fixture = MountFixture::new();
    let pipe = fixture.path("pipe");
    assert_eq!(run_program(&["mkfifo", &pipe]).code, 0);
    for way in [&["mount"][..], &["mount", "-f"]] {
        let mut command = Command::new(ckptfs());
        command.args(way).args([&fixture.source, &fixture.mountpoint, "--log-file", &pipe]);
        let mut mounting = command.stderr(Stdio::piped()).spawn().unwrap();
        wait_until("it waits for no reader", || mounting.try_wait().unwrap().is_some());
        let outcome = mounting.wait_with_output().unwrap();
        let messages = String::from_utf8(outcome.stderr).unwrap();
        assert_eq!((outcome.status.code(), fixture.mounts()), (Some(1), 0), "{messages}");
        assert!(
            messages.contains(&format!("{pipe}: cannot log to it: no program reads")),
            "{messages}"
        );
        assert!(messages.contains("what to do: start its reader first"), "{messages}");
    }
    assert_eq!(fixture.daemon(), None);
}

#[test]
fn a_bad_source_is_explained() {
    let fixture = MountFixture::new();
    let at = &fixture.mountpoint[..];
    let written = |name: &str, bytes: &[u8]| {
        let path = fixture.path(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let missing = fixture.path("missing");
    fails(&[&missing, at], 1, "no such file", "check the path");
    fails(
        &[&format!("{}/x", written("file", b"text")), at],
        1,
        "Not a directory",
        "check the path",
    );

    let looks = "give a .safetensors file, a torch checkpoint";
    fails(&[&written("config.json", b"{}"), at], 3, "not a checkpoint", looks);
    fails(&[&written("notes.txt", b"words"), at], 3, "not a checkpoint", looks);
    fails(&[&written("empty", b""), at], 3, "an empty file", "fetch or save it again");
    fails(&[&written("empty.safetensors", b""), at], 3, "an empty file", "fetch or save it again");
    fails(&[&written("cut.safetensors", b"\xff\0\0\0\0\0\0\0{"), at], 3, "cut.safetensors", "");
    fails(
        &[&written("model.gguf", b"GGUF\x03\0\0\0 and so on"), at],
        3,
        "a GGUF file",
        "load it with llama.cpp",
    );
    fails(&["/proc/self/status", at], 3, "an empty file", "fetch or save it again");
    fails(&["/dev/null", at], 3, "is a device", "a checkpoint file or a directory");
    let pipe = fixture.path("pipe");
    assert_eq!(run_program(&["mkfifo", &pipe]).code, 0);
    fails(&[&pipe, at], 3, "is a named pipe", "a checkpoint file or a directory");
    assert_eq!((fixture.mounts(), fixture.state().as_str()), (0, "none"));
}

#[test]
fn a_directory_without_a_checkpoint_and_a_set_by_its_name_are_sources() {
    let fixture = MountFixture::new();
    let folder = fixture.path("words");
    fs::create_dir(&folder).unwrap();
    fs::write(Path::new(&folder).join("notes.txt"), "words").unwrap();
    let set = fixture.path("set");
    fs::create_dir(&set).unwrap();
    for (name, bytes) in two_shards(1, 8) {
        fs::write(Path::new(&set).join(name), bytes).unwrap();
    }
    for (source, shows) in
        [(folder, "notes.txt"), (format!("{set}/model.safetensors"), "model.safetensors")]
    {
        let outcome = run(&["mount", &source, &fixture.mountpoint]);
        assert_eq!(outcome.code, 0, "{source}");
        assert_eq!(command::names_in(Path::new(&fixture.mountpoint)), [shows]);
        assert_eq!(fixture.unmount(&[]).code, 0);
    }
}

/// The note that a mount of a source prints. It is left out if the machine was too slow to know, so this tries again.
fn note_of_mount(fixture: &MountFixture, source: &str, options: &[&str]) -> String {
    for _ in 0..10 {
        let outcome = run(&[&["mount", source, &fixture.mountpoint], options].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert_eq!(fixture.unmount(&[]).code, 0);
        if !outcome.stderr.is_empty() {
            return outcome.stderr;
        }
    }
    String::new()
}

#[test]
fn a_mount_in_which_nothing_becomes_a_virtual_file_says_so() {
    let fixture = MountFixture::new();
    let folder = fixture.path("a folder");
    let file = |name: &str, bytes: &[u8]| {
        let path = Path::new(&folder).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let list = format!("ckptfs ls -r '{folder}'");
    let says = |reason: &str| {
        let note = format!("ckptfs: note: nothing in {folder} becomes a virtual file: {reason}\n");
        assert_eq!(note_of_mount(&fixture, &folder, &[]), note);
    };
    file("notes.txt", b"words");
    says(&format!("no checkpoint is in it; {list} lists what is there"));
    fs::copy(format!("{}/model.safetensors", fixture.source), format!("{folder}/m.safetensors"))
        .unwrap();
    says(&format!("1 safetensors file is shown unchanged; {list} lists what is there"));
    file("sub/broken.ckpt", b"PK\x03\x04 and no archive");
    says(&format!("1 checkpoint is refused; {list} says why"));
    assert_eq!(run(&["mount", &folder, &fixture.mountpoint, "--quiet"]).stderr, "");
    assert_eq!(fixture.unmount(&[]).code, 0);
    // One virtual file anywhere is enough.
    for (name, bytes) in two_shards(1, 8) {
        file(&format!("sub/deeper/{name}"), &bytes);
    }
    for _ in 0..3 {
        assert_eq!(run(&["mount", &folder, &fixture.mountpoint]).stderr, "");
        assert_eq!(fixture.unmount(&[]).code, 0);
    }
}
