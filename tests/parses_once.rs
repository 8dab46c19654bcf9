//! In a process of its own, because it installs the process's one log subscriber.
//!
//! A checkpoint is parsed once, however many threads ask for it and by which name. No line is logged twice.

#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ckptfs::view::{View, ViewOptions};
use common::view::{torch, view, write};
use tracing_subscriber::fmt::MakeWriter;

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}

impl Log {
    fn count(&self, what: &str) -> usize {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap().matches(what).count()
    }
}

/// One test, because the process has one log.
#[test]
fn parsed_and_logged_once() {
    let log = Log::default();
    tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).init();
    many_ask_at_once(&log);
    a_link_out_is_told_once(&log);
    rewritten_names_are_not_parsed_again(&log);
}

/// Each is refused when it is parsed, and the log says so each time.
const FILES: usize = 200;

fn many_ask_at_once(log: &Log) {
    let bytes = torch();
    // Just written, and unchanged for a while.
    for wait in [0, 200] {
        let folder = tempfile::tempdir().unwrap();
        for n in 0..FILES {
            fs::write(folder.path().join(format!("once-{wait}-{n}.pt")), &bytes[..100]).unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(wait));
        let view = view(folder.path());
        std::thread::scope(|scope| {
            for thread in 0..16 {
                let view = &view;
                scope.spawn(move || {
                    if thread % 4 == 0 {
                        let listing = view.list(Path::new("")).unwrap();
                        assert_eq!(listing.refused.len(), FILES);
                        return;
                    }
                    for n in 0..FILES {
                        let n = (n * thread) % FILES;
                        for extension in ["pt", "safetensors"] {
                            let name = format!("once-{wait}-{n}.{extension}");
                            let entry = view.lookup(Path::new(""), OsStr::new(&name)).unwrap();
                            assert_eq!(entry.is_some(), extension == "pt");
                        }
                    }
                });
            }
        });
        for n in 0..FILES {
            let output = log.count(&format!("name=\"once-{wait}-{n}.pt\""));
            assert_eq!(output, 1, "file {n}, after {wait} ms");
        }
        assert_eq!(view.counts().refused, FILES as u64);
    }
}

fn a_link_out_is_told_once(log: &Log) {
    let folder = tempfile::tempdir().unwrap();
    symlink("/etc/hostname", folder.path().join("told-link")).unwrap();
    let view = view(folder.path());
    for n in 0..20 {
        view.list(Path::new("")).unwrap();
        view.lookup(Path::new(""), OsStr::new("told-link")).unwrap();
        fs::write(folder.path().join(format!("{n}")), "").unwrap();
    }
    assert_eq!(log.count("told-link"), 1);
    assert_eq!(log.count("--follow-symlinks"), 1);
}

fn rewritten_names_are_not_parsed_again(log: &Log) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("again.pt", &torch()[..100])]);
    let view = View::new(folder.path(), ViewOptions::default()).unwrap();
    for n in 0..20 {
        view.list(Path::new("")).unwrap();
        // The directory changes each time, and the checkpoint does not.
        fs::write(folder.path().join(format!("{n}.pt")), "no checkpoint").unwrap();
        fs::hard_link(folder.path().join("again.pt"), folder.path().join(format!("{n}"))).unwrap();
    }
    assert_eq!(log.count("name=\"again.pt\""), 1);
}
