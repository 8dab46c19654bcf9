//! A source that fails during a read gives an error to that reader, and one log line that names the file.
//! Everything else goes on, and what works again is read again.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use crate::common::command::{run, two_shards};
use crate::common::failing_source::{Behavior, FailingSource};
use crate::common::mounting::{MountFixture, wait_until};

const BYTES: usize = 8 << 20;

/// The bytes of each shard that cannot be read: a range far from its start.
const BAD_BYTES: std::ops::Range<u64> = 6 << 20..7 << 20;

#[test]
fn one_reader_gets_the_error_and_the_rest_goes_on() {
    let fixture = MountFixture::new();
    let far = FailingSource::new(&format!("{}/far", fixture.source), two_shards(1, BYTES));
    let log = fixture.path("log");
    fixture.mount(&["--log-file", &log]);
    let model = File::open(format!("{}/far/model.safetensors", fixture.mountpoint)).unwrap();
    let size = model.metadata().unwrap().len();
    // The first tensor ends where the second begins; a shard has a short header of its own.
    let (first, second) = (size - 2 * BYTES as u64, size - BYTES as u64);
    far.set(Behavior::Fails(BAD_BYTES));
    let mut bytes = [0; 4096];
    for _ in 0..50 {
        let error =
            model.read_exact_at(&mut bytes, second + BAD_BYTES.start + (512 << 10)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    // The good part of the same virtual file, and other files.
    model.read_exact_at(&mut bytes, first).unwrap();
    assert_eq!(bytes, [1; 4096]);
    model.read_exact_at(&mut bytes, second + 4096).unwrap();
    assert_eq!(bytes, [2; 4096]);
    fs::read(format!("{}/model.safetensors", fixture.mountpoint)).unwrap();
    fixture.wait_until_alive();
    let log = fs::read_to_string(&log).unwrap();
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.contains("far/model-00002-of-00002.safetensors"), "{log}");
    far.set(Behavior::Works);
    wait_until("it is read again", || {
        model.read_exact_at(&mut bytes, second + BAD_BYTES.start + (512 << 10)).is_ok()
    });
    assert_eq!(bytes, [2; 4096]);
    let mut whole = vec![0; 2 * BYTES];
    model.read_exact_at(&mut whole, first).unwrap();
    assert!(whole[..BYTES].iter().all(|&byte| byte == 1));
    assert!(whole[BYTES..].iter().all(|&byte| byte == 2));
    drop(model);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// A passed-through file fails as the original does.
#[test]
fn a_passed_through_file_fails_as_the_original() {
    for options in [&[][..], &["--no-passthrough"]] {
        let fixture = MountFixture::new();
        let files = vec![("notes.txt".to_owned(), vec![5; BYTES])];
        let far = FailingSource::new(&format!("{}/far", fixture.source), files);
        fixture.mount(options);
        let notes = File::open(format!("{}/far/notes.txt", fixture.mountpoint)).unwrap();
        far.set(Behavior::Fails(BAD_BYTES));
        let mut bytes = [0; 4096];
        let error = notes.read_exact_at(&mut bytes, BAD_BYTES.start + (512 << 10)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{options:?}");
        notes.read_exact_at(&mut bytes, 0).unwrap();
        far.set(Behavior::Works);
        notes.read_exact_at(&mut bytes, BAD_BYTES.start + (512 << 10)).unwrap();
        assert_eq!(bytes, [5; 4096]);
        drop(notes);
        assert_eq!(fixture.unmount(&[]).code, 0);
    }
}

/// The directory is not reported as one without a checkpoint.
#[test]
fn a_pickle_that_cannot_be_read_is_an_error_of_that_file() {
    let folder = tempfile::tempdir().unwrap();
    for (names, failing) in [(&["model.bin"][..], "model.bin"), (&["a.bin", "b.bin"], "a.bin")] {
        let at = format!("{}/{}", folder.path().display(), names.len());
        let files = names.iter().map(|name| ((*name).to_owned(), b"PK\x03\x04".repeat(100)));
        let far = FailingSource::new(&at, files.collect());
        far.set(Behavior::Fails(0..1));
        let outcome = run(&["inspect", &at]);
        assert_eq!(outcome.code, 1, "{}", outcome.stderr);
        let message = format!("{at}/{failing}: cannot read it: Input/output error");
        assert!(outcome.stderr.contains(&message), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("what to do: see whether the disk"), "{}", outcome.stderr);
    }
}
