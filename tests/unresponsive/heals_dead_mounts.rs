//! A killed or stuck daemon is reported without a hang, and its mount can be replaced.

use std::any::Any;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};

use crate::common::command::run;
use crate::common::mounting;
use crate::common::mounting::{MountFixture, wait_until};
use fuser::{FileHandle, Filesystem, INodeNo, ReplyAttr, ReplyXattr, Request};

/// Mounts, kills the daemon, and waits until the kernel has noticed.
fn dead() -> MountFixture {
    let fixture = MountFixture::dead();
    wait_until("the mount is dead", || fixture.state() == "dead");
    fixture
}

#[test]
fn status_reports_a_dead_mount() {
    let fixture = dead();
    let output = run(&["status"]).stdout;
    let text = output.split_once(&format!("{}\n", fixture.mountpoint)).unwrap().1;
    let text = text.split("\n\n").next().unwrap();
    assert!(text.contains("DEAD") && text.contains("ckptfs unmount"), "{output}");
}

/// The mount, what lies in it, and every other path.
#[test]
fn doctor_names_a_dead_mount_and_the_command_that_removes_it() {
    let fixture = dead();
    let command = format!("ckptfs unmount {}", fixture.mountpoint);
    let outcome = run(&["doctor"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stdout);
    let (_, line) = outcome.stdout.split_once("\nnote     mounts").unwrap();
    assert!(line.contains(&fixture.mountpoint) && line.contains("dead"), "{line}");
    assert!(line.contains("what to do: remove: ckptfs unmount "), "{line}");
    for path in [fixture.mountpoint.clone(), format!("{}/sub/x.bin", fixture.mountpoint)] {
        let outcome = run(&["doctor", "--json", &path]);
        assert_eq!(outcome.code, 1, "{}", outcome.stdout);
        let checks: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        let last = checks.as_array().unwrap().last().unwrap();
        assert_eq!((&last["what"], &last["verdict"]), (&"source".into(), &"problem".into()));
        assert!(last["says"].as_str().unwrap().contains("its daemon was killed"), "{last}");
        assert_eq!(last["remedy"], format!("remove it: {command}"), "{last}");
    }
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn the_next_mount_replaces_a_dead_one() {
    let fixture = dead();
    fixture.mount(&[]);
    fixture.wait_until_alive();
    assert_eq!(fixture.mounts(), 1);
    // A live one is not replaced.
    let outcome = fixture.try_mount(&[]);
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.stderr.contains(&format!("already shows {}", fixture.source)),
        "{}",
        outcome.stderr
    );
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn unmount_removes_a_dead_mount() {
    for options in [&[][..], &["--lazy"]] {
        let fixture = dead();
        let outcome = fixture.unmount(options);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert!(outcome.stdout.contains("was dead"), "{}", outcome.stdout);
        assert_eq!(fixture.mounts(), 0);
    }
}

#[test]
fn a_dead_mount_over_its_own_source_is_replaced() {
    let fixture = MountFixture::new();
    for _ in 0..2 {
        let outcome = run(&["mount", &fixture.source, &fixture.source]);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        mounting::daemons_of(&fixture.source).pop().unwrap().kill_and_wait();
    }
    assert_eq!(mounting::mounts_at(&fixture.source), 1);
    assert_eq!(run(&["unmount", &fixture.source]).code, 0);
    assert!(Path::new(&fixture.source).join("model.safetensors").exists());
}

#[test]
fn a_stopped_daemon_is_not_waited_for() {
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    daemon.stop();
    assert_eq!(fixture.state(), "not-answering");
    let outcome = fixture.try_mount(&[]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("does not answer"), "{}", outcome.stderr);
    assert_eq!(fixture.unmount(&["--lazy"]).code, 0);
    assert_eq!(fixture.mounts(), 0);
    daemon.kill("CONT");
    wait_until("the daemon ends", || !daemon.runs());
}

/// Takes every request and answers none: its callers cannot even be killed.
struct Stuck(Mutex<Sender<Box<dyn Any + Send>>>);

impl Stuck {
    fn keep(&self, reply: impl Any + Send) {
        // A dropped reply would be an answer.
        self.0.lock().expect("no panic with it").send(Box::new(reply)).expect("the test lives");
    }
}

impl Filesystem for Stuck {
    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.keep(reply);
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        self.keep(reply);
    }
}

#[test]
fn a_stuck_daemon_that_took_the_request_is_not_waited_for() {
    let fixture = MountFixture::new();
    let wanted = ckptfs::mount::lifecycle::attach::AttachRequest {
        mountpoint: Path::new(&fixture.mountpoint),
        fsname: OsStr::new("stuck"),
        allow_other: false,
    };
    let (fd, attached) = ckptfs::mount::lifecycle::attach::attach(&wanted).unwrap();
    let (send, kept) = channel();
    let config = fuser::Config::default();
    let stuck = Stuck(Mutex::new(send));
    let session = fuser::Session::from_fd(stuck, fd, fuser::SessionACL::All, config).unwrap();
    let session = std::thread::spawn(move || session.run());

    assert!(attached.is_attached().unwrap());
    assert_eq!(fixture.state(), "not-answering");
    let outcome = fixture.try_mount(&[]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("does not answer"), "{}", outcome.stderr);
    let outcome = fixture.unmount(&["--lazy"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(fixture.mounts(), 0);
    assert!(!attached.is_attached().unwrap());
    attached.detach().unwrap();

    assert!(kept.try_iter().count() > 0, "nobody was stuck");
    // Dropping the replies answers them, which ends the session.
    drop(kept);
    wait_until("the session ends", || session.is_finished());
}
