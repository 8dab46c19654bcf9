//! A mount whose daemon is stuck blocks no command, whatever path in it the command gets, and no listing of
//! its parent directory.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::command;
use crate::common::command::{Outcome, ckptfs, run};
use crate::common::failing_source::{Behavior, FailingSource};
use crate::common::mounting::{Daemon, MountFixture, wait_until};
use serde_json::Value;

/// Runs a command that must end by itself. A blocked one fails the test; it cannot be killed before the
/// mount goes, so nothing waits for its end.
#[track_caller]
fn ends(program: &str, args: &[&str]) -> Outcome {
    let mut command = Command::new(program);
    let command = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = command.spawn().unwrap();
    wait_until("the command ends", || running.try_wait().unwrap().is_some());
    let output = running.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    Outcome { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[track_caller]
fn answers(args: &[&str]) -> Outcome {
    ends(ckptfs(), args)
}

/// A mount with a directory in it, whose daemon is stopped.
fn stuck() -> (MountFixture, Daemon) {
    let fixture = MountFixture::new();
    fs::create_dir(Path::new(&fixture.source).join("sub")).unwrap();
    let daemon = fixture.mount(&[]);
    daemon.stop();
    (fixture, daemon)
}

#[test]
fn no_command_waits_for_a_stuck_path() {
    let (fixture, daemon) = stuck();
    let at = |name: &str| format!("{}/{name}", fixture.mountpoint);
    let (mnt, real) = (&fixture.mountpoint[..], &fixture.source[..]);
    let (inside, sub, log, out) = (at("model.safetensors"), at("sub"), at("log"), at("out"));
    let (link, into, free) = (fixture.path("link"), fixture.path("into"), fixture.path("free"));
    symlink(mnt, &link).unwrap();
    symlink("link/sub", &into).unwrap();
    fs::create_dir(&free).unwrap();
    let file = format!("{real}/model.safetensors");
    let all = [
        &["ls", mnt][..],
        &["ls", "-r", "--json", &inside],
        &["ls", &link],
        &["ls", &into],
        &["inspect", "--json", &inside],
        &["verify", mnt],
        &["verify", &file, "--against", &inside],
        &["export", &inside, &fixture.path("out")],
        &["export", &file, &out],
        &["mount", mnt, &free],
        &["mount", &sub, &free],
        &["mount", real, mnt],
        &["mount", real, &sub],
        &["mount", "-f", real, &into],
        &["mount", real, &free, "--log-file", &log],
        &["mount", real, &free, "-o", &format!("log_file={log}")],
        &["unmount", &sub],
        &["unmount", "--lazy", &into],
        &["man", "--dir", &sub],
    ];
    // Each waits for an answer for a while, so all run at once.
    std::thread::scope(|scope| {
        let asked = all.map(|args| scope.spawn(move || (args, answers(args))));
        for (args, outcome) in asked.map(|one| one.join().unwrap()) {
            assert_eq!(outcome.code, 1, "{args:?}: {}", outcome.stderr);
            assert!(
                outcome.stderr.contains("/mnt: mounted, and does not answer"),
                "{}",
                outcome.stderr
            );
            assert!(outcome.stderr.contains("ckptfs unmount --lazy"), "{}", outcome.stderr);
        }
    });
    assert_eq!((fixture.mounts(), fixture.state().as_str()), (1, "not-answering"));
    daemon.kill("CONT");
    // The daemon answers again.
    assert_eq!(answers(&["inspect", mnt]).code, 0);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn doctor_still_checks_the_machine() {
    let (fixture, daemon) = stuck();
    let inside = format!("{}/sub", fixture.mountpoint);
    for path in [&fixture.mountpoint, &inside] {
        let outcome = answers(&["doctor", path]);
        assert_eq!(outcome.code, 1, "{}", outcome.stderr);
        assert!(outcome.stdout.contains("kernel           Linux"), "{}", outcome.stdout);
        assert!(outcome.stdout.contains("does not answer"), "{}", outcome.stdout);
        let outcome = answers(&["doctor", "--json", path]);
        let checks: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let last = checks.as_array().unwrap().last().unwrap();
        assert_eq!((&last["what"], &last["verdict"]), (&"source".into(), &"problem".into()));
        assert!(last["says"].as_str().unwrap().contains("does not answer"), "{last}");
        assert!(last["remedy"].as_str().unwrap().contains("ckptfs unmount --lazy"), "{last}");
    }
    daemon.kill("CONT");
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn status_covers_a_mount_inside_a_stuck_mount() {
    let (fixture, daemon) = stuck();
    daemon.kill("CONT");
    let inner = MountFixture::new();
    let sub = format!("{}/sub", fixture.mountpoint);
    assert_eq!(run(&["mount", &inner.source, &sub]).code, 0);
    daemon.stop();
    let outcome = answers(&["status", "--json"]);
    let all: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let state = |path: &str| {
        let mut mounts = all.as_array().unwrap().iter();
        mounts.find(|mount| mount["mountpoint"] == path).unwrap()["state"].clone()
    };
    assert_eq!(
        (state(&fixture.mountpoint), state(&sub)),
        ("not-answering".into(), "not-answering".into())
    );
    daemon.kill("CONT");
    assert_eq!(answers(&["unmount", &sub]).code, 0);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_directory_with_a_stuck_mount_is_listed() {
    let (fixture, daemon) = stuck();
    symlink("mnt", fixture.path("link")).unwrap();
    for options in [&[][..], &["-r"]] {
        let outcome = answers(&[&["ls", "--json", fixture.parent()], options].concat());
        assert_eq!(outcome.code, 1, "{}", outcome.stderr);
        let all: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let unreadable = all[0]["unreadable"].as_array().unwrap();
        assert_eq!((unreadable.len(), &unreadable[0]["name"]), (1, &"mnt".into()));
        assert!(unreadable[0]["reason"].as_str().unwrap().contains("does not answer"));
        let names = all[0]["entries"].as_array().unwrap().iter().map(|entry| &entry["name"]);
        assert_eq!(names.collect::<Vec<_>>(), ["link", "source"]);
        let beneath = all.as_array().unwrap()[1..].iter().map(|folder| &folder["path"]);
        let beneath: Vec<_> = beneath.collect();
        assert_eq!(beneath, ["source", "source/sub"][..if options.is_empty() { 0 } else { 2 }]);
    }
    let outcome = answers(&["doctor", fixture.parent()]);
    assert!(outcome.stdout.contains("a directory that this user may read"), "{}", outcome.stdout);
    daemon.kill("CONT");
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// A listing asks no other program's mount about itself.
#[test]
fn a_listing_asks_no_other_programs_mount() {
    let fixture = MountFixture::new();
    let far = FailingSource::new(&format!("{}/far", fixture.source), command::two_shards(1, 8));
    symlink("far", Path::new(&fixture.source).join("link")).unwrap();
    far.set(Behavior::Hangs);
    let outcome = answers(&["ls", &fixture.source]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(
        outcome.stdout.contains("far/") && outcome.stdout.contains("link -> far"),
        "{}",
        outcome.stdout
    );
    let outcome = answers(&["doctor", &fixture.source]);
    assert!(outcome.stdout.contains("a directory that this user may read"), "{}", outcome.stdout);
    assert_eq!(far.pending(), 0);
}

#[test]
fn a_mount_over_a_stuck_mount_is_listed_and_unmounted() {
    let (fixture, stopped) = stuck();
    let outer = MountFixture::new();
    let names = || {
        // As a program that reads only names.
        let outcome = ends("ls", &["-f", &outer.mountpoint]);
        outcome.stdout.lines().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    // Never looked at, or known from before.
    for is_known in [false, true] {
        if is_known {
            stopped.kill("CONT");
        }
        assert_eq!(answers(&["mount", fixture.parent(), &outer.mountpoint]).code, 0);
        let shown = outer.daemon().unwrap();
        if is_known {
            fs::read(format!("{}/mnt/model.safetensors", outer.mountpoint)).unwrap();
            stopped.stop();
        }
        // Waiting for it in vain takes longer than the kernel believes its earlier answers.
        assert_eq!(answers(&["doctor", &fixture.mountpoint]).code, 1);
        for _ in 0..2 {
            let names = names();
            assert!(names.contains("mnt") && names.contains("source"), "{names:?}");
        }
        fs::read(format!("{}/source/model.safetensors", outer.mountpoint)).unwrap();
        let outcome = answers(&["unmount", &outer.mountpoint]);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
        wait_until("its daemon is gone", || !shown.runs());
    }
    stopped.kill("CONT");
    assert_eq!(fixture.unmount(&[]).code, 0);
}
