//! Anything but a regular, readable file is refused at once and untouched. A file that changes after it was
//! parsed gives an error, never other bytes.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::common;
use crate::common::command::install;
use crate::common::safetensors::valid;
use crate::common::test_path;
use crate::common::zip::{archive, one_tensor};
use ckptfs::checkpoint::{self, Checkpoint, CheckpointError, ParseOptions};
use ckptfs::source;
use ckptfs::virtual_file::{self, VirtualFile, VirtualFileReader};
use rustix::fs::{CWD, Mode, mkfifoat};
use tempfile::TempDir;

const A: &str = "model-00001-of-00002.safetensors";
const B: &str = "model-00002-of-00002.safetensors";

fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let path = path.to_path_buf();
    common::in_bounded_time(move || checkpoint::open(&path, &ParseOptions::default()))
}

/// The kind of thing that a path is instead of a file.
fn kind(path: &Path) -> &'static str {
    match open(path).expect_err("refused") {
        CheckpointError::Source(source::SourceError::NotAFile { kind, .. }) => kind,
        other => panic!("refused for another reason: {other}"),
    }
}

/// A set of two shards, of which the test makes the second.
fn set() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let index = format!(r#"{{"metadata":{{}},"weight_map":{{"a":"{A}","b":"{B}"}}}}"#);
    fs::write(directory.path().join("model.safetensors.index.json"), index).expect("written");
    fs::write(directory.path().join(A), valid(&["a"])).expect("written");
    let second = directory.path().join(B);
    (directory, second)
}

#[test]
fn a_directory() {
    let (set, shard) = set();
    fs::create_dir(&shard).unwrap();
    assert_eq!(kind(set.path()), "a directory");
    assert!(matches!(open(&shard), Err(CheckpointError::NoCheckpoint { .. })));
}

#[test]
fn a_socket() {
    let (set, shard) = set();
    let _held = UnixListener::bind(&shard).unwrap();
    assert_eq!(kind(set.path()), "a socket");
    assert_eq!(kind(&shard), "a socket");
}

#[test]
fn a_pipe_that_nobody_writes_to() {
    let (set, shard) = set();
    mkfifoat(CWD, &shard, Mode::RUSR | Mode::WUSR).unwrap();
    assert_eq!(kind(set.path()), "a named pipe");
    assert_eq!(kind(&shard), "a named pipe");
}

#[test]
fn devices() {
    for device in ["/dev/null", "/dev/zero"] {
        assert_eq!(kind(Path::new(device)), "a device");
        let (set, shard) = set();
        symlink(device, &shard).unwrap();
        assert!(matches!(
            open(set.path()),
            Err(CheckpointError::Source(source::SourceError::OutsideRoot { .. }))
        ));
        let following = ParseOptions { follow_symlinks: true, ..ParseOptions::default() };
        let refused = checkpoint::open(set.path(), &following).unwrap_err();
        assert!(
            matches!(refused, CheckpointError::Source(source::SourceError::NotAFile { .. })),
            "{refused}"
        );
    }
}

#[test]
fn nothing_at_all() {
    let directory = tempfile::tempdir().unwrap();
    let refused = open(&directory.path().join("x.safetensors"));
    assert!(matches!(refused, Err(CheckpointError::Source(source::SourceError::Missing { .. }))));
    assert!(matches!(open(directory.path()), Err(CheckpointError::NoCheckpoint { .. })));
    let below_a_file = directory.path().join("file");
    File::create(&below_a_file).unwrap();
    assert!(open(&below_a_file.join("x.safetensors")).is_err());
}

#[test]
fn an_empty_file() {
    for name in ["x.safetensors", "x.pt", "x.bin"] {
        let directory = tempfile::tempdir().unwrap();
        File::create(directory.path().join(name)).unwrap();
        let refused = open(&directory.path().join(name)).unwrap_err();
        assert!(matches!(&refused, CheckpointError::UnreadFormat { .. }), "{refused}");
        assert!(refused.to_string().contains("an empty file"));
    }
    let (set, shard) = set();
    File::create(shard).unwrap();
    assert!(matches!(open(set.path()), Err(CheckpointError::UnreadFormat { .. })));
}

/// An account that owns nothing here.
const NOBODY: u32 = 65534;

/// The path that the test below looks at when an account without permission runs it.
const UNREADABLE: &str = "CKPTFS_TEST_UNREADABLE";

/// Permissions do not hold root back, so another account looks.
#[test]
fn a_file_that_may_not_be_read() {
    if let Some(path) = std::env::var_os(UNREADABLE) {
        return must_not_be_readable(Path::new(&path));
    }
    let (set, shard) = set();
    fs::set_permissions(set.path(), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(&shard, valid(&["b"])).unwrap();
    fs::set_permissions(&shard, PermissionsExt::from_mode(0o000)).unwrap();
    if File::open(&shard).is_err() {
        must_not_be_readable(set.path());
        return must_not_be_readable(&shard);
    }
    // A program that the other account may run: this test's own lies in a private directory.
    let program = set.path().join("looks");
    install(std::env::current_exe().unwrap(), &program);
    for path in [set.path(), &shard] {
        let looked = Command::new(&program)
            .args(["--exact", test_path!("a_file_that_may_not_be_read"), "--nocapture"])
            .env(UNREADABLE, path)
            .current_dir("/")
            .gid(NOBODY)
            .uid(NOBODY)
            .output()
            .unwrap();
        let messages = String::from_utf8_lossy(&looked.stdout);
        assert!(looked.status.success() && messages.contains("1 passed"), "{looked:?}");
    }
}

fn must_not_be_readable(path: &Path) {
    let refused = open(path).expect_err("refused");
    // The checkpoint itself may be fine.
    assert!(!refused.is_refusal(), "{refused}");
    let CheckpointError::Source(source::SourceError::Io { source, .. }) = &refused else {
        panic!("refused for another reason: {refused}")
    };
    assert_eq!(source.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(refused.remedy().contains("permission"));
}

/// A checkpoint on disk, and its parsed virtual file.
fn parsed(bytes: &[u8]) -> (TempDir, PathBuf, Arc<VirtualFile>) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("x.ckpt");
    fs::write(&path, bytes).expect("written");
    let virtual_file = VirtualFile::new(open(&path).expect("readable")).expect("a virtual file");
    (directory, path, Arc::new(virtual_file))
}

fn both_formats() -> [Vec<u8>; 2] {
    [valid(&["a", "b"]), archive(&one_tensor())]
}

fn has_changed<T>(answer: Result<T, virtual_file::VirtualFileError>) -> bool {
    matches!(
        answer,
        Err(virtual_file::VirtualFileError::Source(source::SourceError::Changed { .. }))
    )
}

/// Reads all of the data, then each byte of it.
fn every_read_says_so(reader: &VirtualFileReader) {
    let virtual_file = reader.virtual_file();
    let mut data = vec![0; (virtual_file.size() - virtual_file.header_size()) as usize];
    assert!(has_changed(reader.read_at(&mut data, virtual_file.header_size())));
    for at in virtual_file.header_size()..virtual_file.size() {
        assert!(has_changed(reader.read_at(&mut [0], at)), "byte {at}");
    }
    assert!(has_changed(reader.check_all_unchanged()));
}

#[test]
fn a_file_that_shrinks_after_it_was_parsed() {
    for bytes in both_formats() {
        for len in 0..bytes.len() as u64 {
            let (_directory, path, virtual_file) = parsed(&bytes);
            let reader = VirtualFileReader::open(&virtual_file).unwrap();
            OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
            every_read_says_so(&reader);
            assert!(has_changed(VirtualFileReader::open(&virtual_file)));
        }
    }
}

#[test]
fn a_file_that_grows_after_it_was_parsed() {
    for bytes in both_formats() {
        let (_directory, path, virtual_file) = parsed(&bytes);
        let reader = VirtualFileReader::open(&virtual_file).unwrap();
        fs::write(&path, [&bytes[..], b"more"].concat()).unwrap();
        every_read_says_so(&reader);
        assert!(has_changed(VirtualFileReader::open(&virtual_file)));
    }
}

#[test]
fn a_file_that_is_written_in_place_after_it_was_parsed() {
    for bytes in both_formats() {
        let (_directory, path, virtual_file) = parsed(&bytes);
        let reader = VirtualFileReader::open(&virtual_file).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(b"!", bytes.len() as u64 - 30).unwrap();
        // A clock that ticks slower than this test runs could hide the write.
        file.set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
        every_read_says_so(&reader);
        assert!(has_changed(VirtualFileReader::open(&virtual_file)));
    }
}

#[test]
fn a_file_that_is_replaced_after_it_was_parsed() {
    for bytes in both_formats() {
        let (directory, path, virtual_file) = parsed(&bytes);
        let reader = VirtualFileReader::open(&virtual_file).unwrap();
        let before = common::whole(&reader);
        let other = directory.path().join("other");
        fs::write(&other, &bytes).unwrap();
        fs::rename(&other, &path).unwrap();
        // An open file keeps the old bytes; an open by path finds that the file is another.
        assert_eq!(common::whole(&reader), before);
        assert!(has_changed(VirtualFileReader::open(&virtual_file)));
        fs::remove_file(&path).unwrap();
        assert_eq!(common::whole(&reader), before);
        let gone = VirtualFileReader::open(&virtual_file).unwrap_err();
        assert!(
            matches!(
                gone,
                virtual_file::VirtualFileError::Source(source::SourceError::Missing { .. })
            ),
            "{gone}"
        );
    }
}

#[test]
fn a_file_that_is_renamed_linked_or_given_another_mode_is_the_same() {
    for bytes in both_formats() {
        let (directory, path, virtual_file) = parsed(&bytes);
        let reader = VirtualFileReader::open(&virtual_file).unwrap();
        let before = common::whole(&reader);
        fs::hard_link(&path, directory.path().join("linked")).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(common::whole(&VirtualFileReader::open(&virtual_file).unwrap()), before);
        fs::rename(&path, directory.path().join("renamed")).unwrap();
        assert_eq!(common::whole(&reader), before);
    }
}

#[test]
fn a_file_that_becomes_something_else_after_it_was_parsed() {
    for bytes in both_formats() {
        let (_directory, path, virtual_file) = parsed(&bytes);
        fs::remove_file(&path).unwrap();
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let opened =
            common::in_bounded_time(move || VirtualFileReader::open(&virtual_file).map(drop));
        assert!(matches!(
            opened,
            Err(virtual_file::VirtualFileError::Source(source::SourceError::NotAFile { .. }))
        ));
    }
}
