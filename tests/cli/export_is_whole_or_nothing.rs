//! An export writes the whole file or nothing, however it ends. The old file stays until the new one is
//! complete.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::command::{
    ckptfs, names_in, path, run, run_in_shell, two_shards, write_model, write_transposed,
};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn an_export_is_what_the_safetensors_crate_reads() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = write_model(&folder.path().join("model.safetensors"), 5, 1000);
    let (source, out) =
        (path(folder.path(), "model.safetensors"), path(folder.path(), "out.safetensors"));
    let outcome = run(&["export", &source, &out]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let bytes = fs::read(&out).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.len(), tensors.len());
    for (name, data) in tensors {
        assert_eq!(read.tensor(&name).unwrap().data(), data);
    }
}

#[test]
fn an_existing_file_is_kept_unless_forced() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("model.safetensors"), 1, 10);
    let out = folder.path().join("out.safetensors");
    fs::write(&out, "mine").unwrap();
    let source = path(folder.path(), "model.safetensors");
    let target = out.to_str().unwrap();
    let refused = run(&["export", &source, target]);
    assert_eq!(refused.code, 1);
    assert!(
        refused.stderr.contains("already exists") && refused.stderr.contains("--force"),
        "{}",
        refused.stderr
    );
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    assert_eq!(run(&["export", "--force", &source, target]).code, 0);
    assert_ne!(fs::read(&out).unwrap(), b"mine");
    assert_eq!(names_in(folder.path()), ["model.safetensors", "out.safetensors"]);
}

#[test]
fn a_file_can_be_exported_over_its_own_source() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(folder.path(), "model.safetensors");
    write_model(Path::new(&source), 3, 100);
    let before = run(&["inspect", "--json", &source]);
    assert_eq!(run(&["export", "--force", &source, &source]).code, 0);
    let layout = |json: &str| {
        serde_json::from_str::<serde_json::Value>(json).unwrap()["virtual_file"]["layout"].clone()
    };
    assert_eq!(layout(&before.stdout), layout(&run(&["inspect", "--json", &source]).stdout));
}

#[test]
fn in_a_directory_the_file_has_the_name_that_a_mount_would_show() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(folder.path(), name);
    let out = at("out");
    fs::create_dir(&out).unwrap();
    for model in ["set", "torch", "torch/named"] {
        fs::create_dir(at(model)).unwrap();
    }
    for (name, bytes) in two_shards(1, 8) {
        fs::write(at(&format!("set/{name}")), bytes).unwrap();
    }
    write_model(Path::new(&at("x.safetensors")), 1, 10);
    write_transposed(Path::new(&at("torch/pytorch_model.bin")), 2);
    write_transposed(Path::new(&at("torch/named/last.v2.ckpt")), 2);
    for (source, name) in [
        (at("x.safetensors"), "x.safetensors"),
        (at("set"), "model.safetensors"),
        (at("set/model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors"),
        (at("torch"), "model.safetensors"),
        (at("torch/named/last.v2.ckpt"), "last.v2.safetensors"),
        (at("torch/named/last.v2.safetensors"), "last.v2.safetensors"),
    ] {
        let outcome = run(&["export", &source, &out]);
        assert_eq!(outcome.code, 0, "{source}: {}", outcome.stderr);
        let written = path(Path::new(&out), name);
        assert!(outcome.stdout.starts_with(&format!("{written}: ")), "{}", outcome.stdout);
        assert_eq!(names_in(Path::new(&out)), [name]);
        // It is there now, and replaced only with --force.
        assert_eq!(run(&["export", &source, &format!("{out}/")]).code, 1);
        assert_eq!(run(&["export", "--force", &source, &out]).code, 0);
        fs::remove_file(written).unwrap();
    }
}

#[test]
fn names_of_other_formats_are_refused_with_the_right_one() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(folder.path(), "model.safetensors");
    write_model(Path::new(&source), 1, 10);
    for (name, right) in [("x.bin", "x.safetensors"), ("a.b.PT", "a.b.safetensors")] {
        let out = path(folder.path(), name);
        for force in [&["export"][..], &["export", "--force"]] {
            let outcome = run(&[force, &[&source, &out]].concat());
            assert_eq!(outcome.code, 2, "{}", outcome.stderr);
            let remedy = format!("call it {}, or", path(folder.path(), right));
            assert!(outcome.stderr.contains(&remedy), "{}", outcome.stderr);
            assert!(outcome.stderr.contains("--any-suffix"), "{}", outcome.stderr);
            assert_eq!(names_in(folder.path()), ["model.safetensors"]);
        }
        assert_eq!(run(&["export", "--any-suffix", &source, &out]).code, 0);
        // The suffix is allowed, and an existing file stays.
        assert_eq!(run(&["export", "--any-suffix", &source, &out]).code, 1);
        fs::remove_file(out).unwrap();
    }
}

#[test]
fn standard_output_gets_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (source, out) = (path(folder.path(), "model.pt"), path(folder.path(), "out.safetensors"));
    // More than a buffer of the export.
    write_transposed(Path::new(&source), 1 << 11);
    assert_eq!(run(&["export", &source, &out]).code, 0);
    let script = r#""$CKPTFS" export "$1" - | cmp - "$2" && "$CKPTFS" export "$1" - > "$2.2" && cmp "$2" "$2.2""#;
    let outcome = run_in_shell(Command::new("bash"), script, &[&source, &out]);
    assert_eq!((outcome.code, &*outcome.stdout), (0, ""), "{}", outcome.stderr);
    // A stream that breaks off is a failure.
    for (to, code, words) in [
        (
            r#"| head -c 9 > /dev/null; exit ${PIPESTATUS[0]}"#,
            1,
            "cannot write the checkpoint to standard output",
        ),
        ("> /dev/full", 1, "cannot write the checkpoint to standard output"),
        ("--json > /dev/null", 2, "standard output is taken"),
    ] {
        let script = format!(r#""$CKPTFS" export "$1" - {to}"#);
        let outcome = run_in_shell(Command::new("bash"), &script, &[&source]);
        assert_eq!(outcome.code, code, "{to}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(words), "{to}: {}", outcome.stderr);
    }
}

#[test]
fn a_terminal_is_no_place_for_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(folder.path(), "model.safetensors");
    write_model(Path::new(&source), 1, 10);
    // `script` runs it on a terminal.
    let script = r#"script -qec "'$CKPTFS' export '$1' -" /dev/null"#;
    let outcome = run_in_shell(Command::new("bash"), script, &[&source]);
    assert_eq!(outcome.code, 2, "{}", outcome.stdout);
    assert!(outcome.stdout.contains("standard output is a terminal"), "{}", outcome.stdout);
    assert!(outcome.stdout.contains(&format!("ckptfs export {source} - >")), "{}", outcome.stdout);
}

#[test]
fn the_json_says_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let (source, out) = (path(folder.path(), "model.safetensors"), path(folder.path(), "out"));
    write_model(Path::new(&source), 2, 8);
    let outcome = run(&["export", "--json", &source, &out]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let report: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let expected = serde_json::json!({
        "path": source, "out": out, "tensors": 2, "bytes": fs::metadata(&out).unwrap().len(), "notes": []
    });
    assert_eq!(report, expected);
}

#[test]
fn a_place_that_is_not_there_is_no_place_to_write_to() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(folder.path(), "model.safetensors");
    write_model(Path::new(&source), 1, 10);
    let outcome = run(&["export", &source, &path(folder.path(), "no/such/out")]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("make the directory first"), "{}", outcome.stderr);
    assert_eq!(names_in(folder.path()), ["model.safetensors"]);
}

#[test]
fn only_regular_files_are_replaced_and_links_are_followed() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(folder.path(), "model.safetensors");
    write_model(Path::new(&source), 1, 10);
    let [pipe, link, real] = ["pipe", "link", "real"].map(|name| path(folder.path(), name));
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    let outcome = run(&["export", "--force", &source, &pipe]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("is not a regular file"), "{}", outcome.stderr);
    fs::write(&real, "old").unwrap();
    std::os::unix::fs::symlink("real", &link).unwrap();
    assert_eq!(run(&["export", &source, &link]).code, 1);
    assert_eq!(run(&["export", "--force", &source, &link]).code, 0);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::metadata(&real).unwrap().len() > 4096);
    fs::remove_file(&real).unwrap();
    let outcome = run(&["export", "--force", &source, &link]);
    let expected = format!(
        "ckptfs: {link}: is a link to real, which does not exist\n  what to do: remove it first: rm {link}\n"
    );
    assert_eq!((outcome.code, outcome.stderr), (1, expected));
    fs::remove_file(&link).unwrap();
    assert_eq!(run(&["export", "--force", &source, &link]).code, 0);
    let long = path(folder.path(), &"n".repeat(250));
    assert_eq!(run(&["export", "--force", &source, &long]).code, 0);
    let outcome = run(&["export", &source, &path(folder.path(), "out/")]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("out/: no such directory"), "{}", outcome.stderr);
}

/// A limit on file sizes fails a write in the middle.
#[test]
fn a_write_that_fails_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(folder.path(), "model.safetensors");
    write_model(Path::new(&source), 4, 1 << 20);
    let out = folder.path().join("out.safetensors");
    for (force, kept) in [("", None), ("--force", Some("mine"))] {
        if let Some(text) = kept {
            fs::write(&out, text).unwrap();
        }
        let script = r#"ulimit -f 2048; exec "$CKPTFS" export $3 "$1" "$2""#;
        let outcome =
            run_in_shell(Command::new("bash"), script, &[&source, out.to_str().unwrap(), force]);
        assert_eq!(outcome.code, 1, "{}", outcome.stderr);
        assert!(outcome.stderr.contains("raise the limit"), "{}", outcome.stderr);
        assert_eq!(fs::read_to_string(&out).ok().as_deref(), kept);
        assert_eq!(names_in(folder.path()).len(), 1 + usize::from(kept.is_some()));
    }
}

/// A shell in a mount namespace of its own, in which an ordinary user may mount too.
fn with_own_mounts() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "bash"]);
    command
}

#[test]
fn a_full_disk_is_reported_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let (source, disk) = (path(folder.path(), "model.safetensors"), path(folder.path(), "disk"));
    write_model(Path::new(&source), 4, 4 << 20);
    fs::create_dir(&disk).unwrap();
    let script = r#"mount -t tmpfs -o size=8m none "$2" && "$CKPTFS" export "$1" "$2/out"; code=$?; ls -A "$2"; exit $code"#;
    let outcome = run_in_shell(with_own_mounts(), script, &[&source, &disk]);
    assert_eq!(outcome.code, 1, "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("are free there") && outcome.stderr.contains("make room"),
        "{}",
        outcome.stderr
    );
    assert_eq!(outcome.stdout, "");
}

/// There is room when the export begins; another program takes it.
#[test]
fn a_disk_that_fills_up_during_an_export_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (source, disk) = (path(folder.path(), "model.pt"), path(folder.path(), "disk"));
    write_transposed(Path::new(&source), BUSY_SIDE_COUNT);
    fs::create_dir(&disk).unwrap();
    let script = r#"
        mount -t tmpfs -o size=1500m none "$2" || exit 99
        "$CKPTFS" export "$1" "$2/out" & pid=$!
        until ls -l /proc/$pid/fd 2>&1 | grep -q "$2"; do kill -0 $pid || exit 98; done
        kill -STOP $pid
        dd if=/dev/zero of="$2/filler" bs=1M 2>/dev/null
        kill -CONT $pid
        wait $pid; code=$?; ls -A "$2"; exit $code"#;
    let outcome = run_in_shell(with_own_mounts(), script, &[&source, &disk]);
    assert_eq!(outcome.code, 1, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("make room"), "{}", outcome.stderr);
    assert_eq!(outcome.stdout, "filler\n");
}

/// Rows and columns of a transposed matrix, which keeps an export busy for at least a second.
const BUSY_SIDE_COUNT: u64 = 1 << 14;

#[test]
fn an_export_ended_by_a_signal_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // A transposed gigabyte keeps the export busy until the signal arrives.
    let (source, out) = (path(folder.path(), "model.pt"), path(folder.path(), "out.safetensors"));
    write_transposed(Path::new(&source), BUSY_SIDE_COUNT);
    for (signal, code) in [(Signal::INT, Some(1)), (Signal::TERM, Some(1)), (Signal::KILL, None)] {
        let export = Command::new(ckptfs())
            .args(["export", &source, &out])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The export is writing once it has a nameless file open there. It exits with 0 if it finishes
        // before the signal.
        let writes = || {
            let open = fs::read_dir(format!("/proc/{}/fd", export.id())).unwrap();
            let mut leads = open.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
            leads.any(|to| to.parent() == Some(folder.path()) && !to.ends_with("model.pt"))
        };
        while !writes() {
            std::thread::sleep(Duration::from_millis(5));
        }
        kill_process(Pid::from_child(&export), signal).unwrap();
        let ended = export.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), code);
        if code.is_some() {
            assert!(String::from_utf8_lossy(&ended.stderr).contains("nothing was written"));
        }
        assert_eq!(names_in(folder.path()), ["model.pt"]);
    }
}

/// The hidden name of an unfinished `out.safetensors`.
const PART: &str = ".ckptfs-87ca48165b77441c.part";

#[test]
fn leftovers_of_a_killed_export_are_removed_by_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(folder.path(), "model.safetensors");
    write_model(Path::new(&source), 2, 100);
    let (out, part) = (path(folder.path(), "out.safetensors"), folder.path().join(PART));
    fs::write(folder.path().join(".ckptfs-0.part"), "another's").unwrap();
    let kept = [".ckptfs-0.part", "model.safetensors", "out.safetensors"];
    for force in [&["export"][..], &["export", "--force"]] {
        fs::write(&part, "left").unwrap();
        assert_eq!(run(&[force, &[&source, &out]].concat()).code, 0);
        assert_eq!(names_in(folder.path()), kept);
    }
    // A living process holds a lock on its file.
    let held = fs::File::create(&part).unwrap();
    held.lock().unwrap();
    assert_eq!(run(&["export", "--force", &source, &out]).code, 0);
    assert!(part.exists());
    assert_eq!(names_in(folder.path()).len(), 4);
}

#[test]
fn a_source_deleted_while_it_is_open_is_read_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.safetensors");
    write_model(&source, 3, 1000);
    let checkpoint = ckptfs::checkpoint::open(&source, &Default::default()).unwrap();
    let virtual_file =
        std::sync::Arc::new(ckptfs::virtual_file::VirtualFile::new(checkpoint).unwrap());
    let reader = ckptfs::virtual_file::VirtualFileReader::open(&virtual_file).unwrap();
    let mut before = vec![0; virtual_file.size() as usize];
    reader.read_at(&mut before, 0).unwrap();
    fs::rename(&source, folder.path().join("elsewhere")).unwrap();
    fs::write(&source, "something new").unwrap();
    let mut after = vec![0; virtual_file.size() as usize];
    assert_eq!(reader.read_at(&mut after, 0).unwrap(), after.len());
    assert_eq!(before, after);
}
