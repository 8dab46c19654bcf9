//! Each error that a mount returns for a lookup, an open or a read is explained by its statistics and by `status`. They
//! say when it happened, to which path, why, and what to do.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::common::command::{run, two_shards, write_model};
use crate::common::failing_source::{Behavior, FailingSource};
use crate::common::mounting::{MountFixture, wait_until};

const BYTES: usize = 4 << 20;

/// The bytes of each file that cannot be read.
const BAD_BYTES: std::ops::Range<u64> = 2 << 20..3 << 20;

/// The last errors of a mount, the newest first. Their counts add up to the number of errors.
fn last_errors(fixture: &MountFixture) -> Vec<Value> {
    let stats = fixture.status().unwrap()["stats"].clone();
    let errors = stats["last_errors"].as_array().unwrap().clone();
    let counts: u64 = errors.iter().map(|error| error["count"].as_u64().unwrap()).sum();
    assert_eq!(stats["errors"], counts, "{stats}");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    for error in &errors {
        assert!((now - 60..=now).contains(&error["time"].as_u64().unwrap()), "{error}");
    }
    errors
}

/// Asserts that the newest error has an errno, a path in the mount, and these words in its message and remedy.
#[track_caller]
fn explained(fixture: &MountFixture, errno: &str, name: &str, message: &str, remedy: &str) {
    let errors = last_errors(fixture);
    let error = &errors[0];
    let path = format!("{}/{name}", fixture.mountpoint);
    assert_eq!((&error["errno"], &error["path"]), (&errno.into(), &path.into()), "{errors:?}");
    assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    assert!(error["remedy"].as_str().unwrap().contains(remedy), "{error}");
}

/// Waits until the source has another time: what was written before can be told from what is written now.
fn tick() {
    std::thread::sleep(Duration::from_millis(20));
}

#[test]
fn a_healthy_mount_has_no_errors() {
    let fixture = MountFixture::new();
    fixture.mount(&[]);
    let model = format!("{}/model.safetensors", fixture.mountpoint);
    fs::read(&model).unwrap();
    // Programs look for many files that are not there, and files are replaced.
    for name in ["config.json", "model.safetensors/x", "sub/tokenizer.json"] {
        assert!(fs::read(format!("{}/{name}", fixture.mountpoint)).is_err());
    }
    for bytes in [16, 32, 64] {
        tick();
        let new = fixture.path("new");
        write_model(Path::new(&new), 1, bytes);
        fs::rename(&new, format!("{}/model.safetensors", fixture.source)).unwrap();
        fs::read(&model).unwrap();
    }
    assert_eq!(last_errors(&fixture), [Value::Null; 0]);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_request_to_read_ahead_is_no_error() {
    let fixture = MountFixture::new();
    let notes = vec![7; 1 << 20];
    fs::write(format!("{}/notes.txt", fixture.source), &notes).unwrap();
    fixture.mount(&[]);
    for name in ["notes.txt", "model.safetensors"] {
        let file = File::open(format!("{}/{name}", fixture.mountpoint)).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed).unwrap();
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(fs::read(format!("{}/notes.txt", fixture.mountpoint)).unwrap(), notes);
    assert_eq!(last_errors(&fixture), [Value::Null; 0]);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_read_of_a_changed_checkpoint_is_explained() {
    let fixture = MountFixture::new();
    for (name, bytes) in two_shards(1, BYTES) {
        fs::write(format!("{}/{name}", fixture.source), bytes).unwrap();
    }
    fs::remove_file(format!("{}/model.safetensors", fixture.source)).unwrap();
    fixture.mount(&[]);
    let model = File::open(format!("{}/model.safetensors", fixture.mountpoint)).unwrap();
    let size = model.metadata().unwrap().len();
    tick();
    let shard = format!("{}/model-00002-of-00002.safetensors", fixture.source);
    let file = File::options().write(true).open(&shard).unwrap();
    file.write_all_at(&[9], file.metadata().unwrap().len() - 1).unwrap();
    for at in [1, 2, 3] {
        let error = model.read_exact_at(&mut [0; 16], size - at * (1 << 20)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    let message = format!("{shard}: changed on disk since it was read");
    explained(&fixture, "EIO", "model.safetensors", &message, "wait until the program that writes");
    let text = run(&["status"]).stdout;
    let place = text.find(&format!("{}\n", fixture.mountpoint)).unwrap();
    let words: String = text[place..].split_whitespace().collect();
    for expected in [&message, "ago, EIO, ", "what to do: wait until the program"] {
        let expected: String = expected.split_whitespace().collect();
        assert!(words.contains(&expected), "{expected}: {text}");
    }
    drop(model);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_source_that_fails_is_explained() {
    let fixture = MountFixture::new();
    let files = [two_shards(1, BYTES), vec![("notes.txt".to_owned(), vec![5; BYTES])]].concat();
    let far = FailingSource::new(&format!("{}/far", fixture.source), files);
    // Passed through, a file is read by the kernel itself.
    fixture.mount(&["--no-passthrough"]);
    let at = BAD_BYTES.start + (512 << 10);
    for (name, source) in
        [("far/model.safetensors", "far/model-00001"), ("far/notes.txt", "far/notes.txt")]
    {
        let file = File::open(format!("{}/{name}", fixture.mountpoint)).unwrap();
        far.set(Behavior::Fails(BAD_BYTES));
        for _ in 0..3 {
            let error = file.read_exact_at(&mut [0; 4096], at).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{name}");
        }
        far.set(Behavior::Works);
        let source = format!("{}/{source}", fixture.source);
        explained(&fixture, "EIO", name, &source, "dmesg");
        assert!(last_errors(&fixture)[0]["count"].as_u64().unwrap() >= 3);
        wait_until("it is read again", || file.read_exact_at(&mut [0; 4096], at).is_ok());
    }
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_link_that_is_not_followed_is_explained() {
    let fixture = MountFixture::new();
    let outside = fixture.path("outside.txt");
    fs::write(&outside, "text").unwrap();
    let link = format!("{}/link.txt", fixture.source);
    symlink(&outside, &link).unwrap();
    fixture.mount(&[]);
    let error = fs::read(format!("{}/link.txt", fixture.mountpoint)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    explained(
        &fixture,
        "EACCES",
        "link.txt",
        &format!("{link}: leads out of"),
        "--follow-symlinks",
    );
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn the_last_errors_are_bounded_and_the_newest_stay() {
    let fixture = MountFixture::new();
    for n in 0..40 {
        symlink(fixture.path("outside"), format!("{}/link{n}", fixture.source)).unwrap();
    }
    fixture.mount(&[]);
    for n in 0..40 {
        fs::read(format!("{}/link{n}", fixture.mountpoint)).unwrap_err();
    }
    let stats = fixture.status().unwrap()["stats"].clone();
    let errors = stats["last_errors"].as_array().unwrap();
    assert_eq!((errors.len(), &stats["errors"]), (16, &40.into()), "{stats}");
    let newest = format!("{}/link39", fixture.mountpoint);
    assert_eq!(errors[0]["path"], newest.as_str());
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn names_cannot_forge_lines_of_the_log() {
    let fixture = MountFixture::new();
    let forged = "m\n1970-01-01T00:00:00Z ERROR forged\x1b[31m";
    let source = format!("{}/{forged}.pt", fixture.source);
    fs::remove_file(format!("{}/model.safetensors", fixture.source)).unwrap();
    fs::write(&source, fs::read("fuzz/seeds/zip/plain").unwrap()).unwrap();
    let log = fixture.path("log");
    fixture.mount(&["--log-file", &log]);
    let model = File::open(format!("{}/{forged}.safetensors", fixture.mountpoint)).unwrap();
    tick();
    File::options().write(true).open(&source).unwrap().set_len(64).unwrap();
    assert!(model.read_at(&mut [0; 16], 0).is_err() || model.read_at(&mut [0; 64], 512).is_err());
    drop(model);
    assert_eq!(fixture.unmount(&[]).code, 0);
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("forged"), "{log}");
    assert!(!log.contains('\x1b') && !log.lines().any(|line| line.starts_with("1970")), "{log}");
}
