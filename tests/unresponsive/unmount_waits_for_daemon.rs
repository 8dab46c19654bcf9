//! `unmount` returns when the daemon has ended. If that takes long, it says what it waits for and what to
//! do; if the daemon never ends, it fails.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use crate::common::command::{ckptfs, run};
use crate::common::mounting::{Daemon, MountFixture, run_program, wait_until};

/// A mount whose daemon is stopped, and whose PID the command must name.
fn stopped() -> (MountFixture, Daemon) {
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    daemon.stop();
    (fixture, daemon)
}

#[test]
fn unmount_says_that_it_waits_for_a_stopped_daemon() {
    let (fixture, daemon) = stopped();
    let mut unmounting = Command::new(ckptfs())
        .args(["unmount", &fixture.mountpoint])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut messages = BufReader::new(unmounting.stderr.take().unwrap());
    let mut note = String::new();
    messages.read_line(&mut note).unwrap();
    for words in ["note: ", "waiting for its daemon", "is stopped", &format!("-CONT {}", daemon.0)]
    {
        assert!(note.contains(words), "{note}");
    }
    assert_eq!(fixture.mounts(), 0);
    daemon.kill("CONT");
    assert_eq!(unmounting.wait().unwrap().code(), Some(0));
    let mut rest = String::new();
    messages.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
    wait_until("the daemon ends", || !daemon.runs());
}

#[test]
fn a_daemon_that_never_ends_is_a_failure() {
    let (fixture, daemon) = stopped();
    // Callers that asked the mount and were killed while they waited change nothing.
    let inside = format!("{}/model.safetensors", fixture.mountpoint);
    for words in [&["cat", &inside][..], &["ls", "-l", &fixture.mountpoint]] {
        assert_eq!(run_program(&[&["timeout", "-s", "KILL", "1"], words].concat()).code, 128);
    }
    assert_eq!(run(&["doctor", &fixture.mountpoint]).code, 1);
    let outcome = fixture.unmount(&[]);
    assert_eq!(
        (outcome.code, outcome.stdout.as_str(), fixture.mounts()),
        (1, "", 0),
        "{}",
        outcome.stderr
    );
    let failure = format!("its daemon ({}) has not ended", daemon.0);
    assert!(outcome.stderr.contains(&failure), "{}", outcome.stderr);
    assert!(outcome.stderr.contains(&format!("-KILL {}", daemon.0)), "{}", outcome.stderr);
    assert!(daemon.runs());
}

#[test]
fn a_lazy_unmount_reports_a_stopped_daemon() {
    let (fixture, daemon) = stopped();
    let outcome = fixture.unmount(&["--lazy"]);
    assert_eq!((outcome.code, outcome.stderr.as_str(), fixture.mounts()), (0, "", 0));
    let words = format!("detached; its daemon ({}) is stopped", daemon.0);
    assert!(outcome.stdout.contains(&words), "{}", outcome.stdout);
}
