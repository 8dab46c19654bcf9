//! `unmount` takes one mount away, and leaves bind mounts of it and mounts in other namespaces. It says
//! where these are, and never advises killing their daemon.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::common::command::{Outcome, run};
use crate::common::mounting::{MountFixture, run_program, wait_until};
use crate::exclusive;

/// The output of an `unmount` after which the daemon still runs.
#[track_caller]
fn output_of_unmount(outcome: &Outcome) -> &str {
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""), "{}", outcome.stdout);
    assert!(!outcome.stdout.contains("kill"), "{}", outcome.stdout);
    &outcome.stdout
}

fn bind_mount(fixture: &MountFixture) -> String {
    let other = fixture.path("other");
    fs::create_dir_all(&other).unwrap();
    assert_eq!(run_program(&["mount", "--bind", &fixture.mountpoint, &other]).code, 0);
    other
}

/// A process in a mount namespace of its own, with copies of all mounts.
struct Namespace(Child);

impl Namespace {
    fn new() -> Namespace {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", "echo there; read end"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "there\n");
        Namespace(child)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn unmount_reports_a_remaining_bind_mount() {
    let _exclusive = exclusive();
    for options in [&[][..], &["--lazy"]] {
        let fixture = MountFixture::new();
        let daemon = fixture.mount(&[]);
        let other = bind_mount(&fixture);
        let outcome = fixture.unmount(options);
        let words = format!(
            "still shown at {other}; its daemon ({}) ends when it is unmounted there too",
            daemon.0
        );
        assert!(output_of_unmount(&outcome).contains(&words), "{}", outcome.stdout);
        assert_eq!((fixture.mounts(), daemon.runs()), (0, true));
        assert!(fs::read(format!("{other}/model.safetensors")).is_ok());
        // The bind mount is a mount of ours like any other.
        assert_eq!(run(&["unmount", &other]).code, 0);
        wait_until("the daemon ends", || !daemon.runs());
    }
}

#[test]
fn unmount_reports_a_mount_in_another_namespace() {
    let _exclusive = exclusive();
    for options in [&[][..], &["--lazy"]] {
        let fixture = MountFixture::new();
        let daemon = fixture.mount(&[]);
        let namespace = Namespace::new();
        let outcome = fixture.unmount(options);
        let pid = namespace.0.id();
        let words = format!(
            "still shown at {} in the mount namespace of process {pid}; its daemon ({}) ends when it is unmounted there too",
            fixture.mountpoint, daemon.0
        );
        assert!(output_of_unmount(&outcome).contains(&words), "{}", outcome.stdout);
        assert_eq!((fixture.mounts(), daemon.runs()), (0, true));
        let there = format!("/proc/{pid}/root{}/model.safetensors", fixture.mountpoint);
        assert!(fs::read(there).is_ok());
        drop(namespace);
        wait_until("the daemon ends", || !daemon.runs());
    }
}

#[test]
fn a_detached_mount_that_is_in_use_keeps_its_daemon() {
    let _exclusive = exclusive();
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    let other = bind_mount(&fixture);
    let held = File::open(format!("{other}/model.safetensors")).unwrap();
    assert_eq!(run_program(&["umount", "-l", &other]).code, 0);
    let outcome = fixture.unmount(&[]);
    let words = format!("unmounted; its daemon ({}) ends with the last reader", daemon.0);
    assert!(output_of_unmount(&outcome).contains(&words), "{}", outcome.stdout);
    drop(held);
    wait_until("the daemon ends", || !daemon.runs());
}

#[test]
fn a_stopped_daemon_in_use_is_not_to_be_killed() {
    let _exclusive = exclusive();
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    let other = bind_mount(&fixture);
    daemon.stop();
    let outcome = fixture.unmount(&[]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""), "{}", outcome.stdout);
    let words =
        format!("still shown at {other}; its daemon ({0}) is stopped: kill -CONT {0}", daemon.0);
    assert!(
        outcome.stdout.contains(&words) && !outcome.stdout.contains("KILL"),
        "{}",
        outcome.stdout
    );
    daemon.kill("CONT");
    assert_eq!(run_program(&["umount", &other]).code, 0);
    wait_until("the daemon ends", || !daemon.runs());
}
