//! Users and other programs can unmount a mount, and nothing of it stays.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::command::{ckptfs, run};
use crate::common::mounting::{MountFixture, mounts_at, run_program, wait_until};
use ckptfs::mount::MountOptions;

#[test]
fn unmount_waits_until_the_daemon_has_ended() {
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    assert_eq!(fixture.mounts(), 1);
    let outcome = fixture.unmount(&[]);
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (0, "", ""));
    assert_eq!(fixture.mounts(), 0);
    assert!(!daemon.runs());
    assert_eq!(fs::read_dir(&fixture.mountpoint).unwrap().count(), 0);
}

#[test]
fn concurrent_unmounts_all_succeed() {
    let fixture = MountFixture::new();
    for options in [&[][..], &["--lazy"]] {
        let daemon = fixture.mount(&[]);
        // A stopped daemon keeps all of them waiting until it continues.
        daemon.stop();
        let unmounting: Vec<_> = (0..4)
            .map(|_| {
                let mut command = Command::new(ckptfs());
                command.args(["unmount", &fixture.mountpoint]).args(options);
                command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        wait_until("all of them ask", || unmounting.iter().all(|one| has_a_child(one.id())));
        daemon.kill("CONT");
        for one in unmounting {
            let outcome = one.wait_with_output().unwrap();
            let messages = String::from_utf8_lossy(&outcome.stderr);
            assert_eq!((outcome.status.code(), &*messages), (Some(0), ""), "{options:?}");
        }
        assert_eq!(fixture.mounts(), 0);
        wait_until("the daemon ends", || !daemon.runs());
    }
}

/// Tells whether a process has started another.
fn has_a_child(pid: u32) -> bool {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    !children.unwrap_or_default().is_empty()
}

#[test]
fn any_spelling_of_the_mountpoint_works() {
    let fixture = MountFixture::new();
    let link = fixture.path("link,with a comma");
    std::os::unix::fs::symlink(&fixture.mountpoint, &link).unwrap();
    for written in
        [link, format!("{}/", fixture.mountpoint), format!("{}/../mnt", fixture.mountpoint)]
    {
        let outcome = run(&["mount", &fixture.source, &written]);
        assert_eq!(outcome.code, 0, "{written}: {}", outcome.stderr);
        fixture.wait_until_alive();
        let outcome = run(&["unmount", &written]);
        assert_eq!(outcome.code, 0, "{written}: {}", outcome.stderr);
        assert_eq!(fixture.mounts(), 0);
    }
}

#[test]
fn a_mount_in_use_goes_only_lazily() {
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    let held = File::open(&fixture.mountpoint).unwrap();
    let outcome = fixture.unmount(&[]);
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.stderr.contains("in use") && outcome.stderr.contains("--lazy"),
        "{}",
        outcome.stderr
    );
    assert_eq!((fixture.mounts(), daemon.runs()), (1, true));

    let outcome = fixture.unmount(&["--lazy"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("ends with the last reader"), "{}", outcome.stdout);
    assert_eq!((fixture.mounts(), daemon.runs()), (0, true));
    drop(held);
    wait_until("the daemon ends", || !daemon.runs());
}

#[test]
fn other_programs_can_unmount_and_the_daemon_ends() {
    for words in [&["umount"][..], &["umount", "-l"], &["fusermount3", "-u"]] {
        let fixture = MountFixture::new();
        let foreground = fixture.mount_in_foreground(&[]);
        // The `status` of another test may use the mount at this moment, and keep it busy.
        wait_until("it is unmounted", || {
            run_program(&[words, &[&fixture.mountpoint]].concat()).code == 0
        });
        let (status, messages) = foreground.ends();
        assert_eq!((status.code(), messages.as_str()), (Some(0), ""));
        assert_eq!(fixture.mounts(), 0);
    }
}

#[test]
fn other_mounts_at_the_same_place_are_left_alone() {
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    let held = File::open(&fixture.mountpoint).unwrap();
    assert_eq!(run_program(&["umount", "-l", &fixture.mountpoint]).code, 0);
    assert_eq!(run_program(&["mount", "-t", "tmpfs", "other", &fixture.mountpoint]).code, 0);
    daemon.kill("TERM");
    drop(held);
    wait_until("the daemon ends", || !daemon.runs());
    assert_eq!(fixture.mounts(), 1);

    // Over a mount of ours: neither mount is taken away for the other.
    assert_eq!(run_program(&["umount", &fixture.mountpoint]).code, 0);
    let daemon = fixture.mount(&[]);
    assert_eq!(run_program(&["mount", "-t", "tmpfs", "other", &fixture.mountpoint]).code, 0);
    assert_eq!(fixture.state(), "hidden");
    let outcome = fixture.unmount(&[]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("type tmpfs"), "{}", outcome.stderr);
    assert_eq!((fixture.mounts(), daemon.runs()), (2, true));
    assert_eq!(run_program(&["umount", &fixture.mountpoint]).code, 0);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// The kernel gives the numbers of a mount that is gone to the next one.
#[test]
fn a_mount_that_is_gone_takes_no_other_with_it() {
    let (first, second) = (MountFixture::new(), MountFixture::new());
    let mount = |fixture: &MountFixture| {
        let options = MountOptions::new((&fixture.source).into(), (&fixture.mountpoint).into());
        ckptfs::mount::mount(&options).unwrap()
    };
    for _ in 0..20 {
        let gone = mount(&first);
        wait_until("it is unmounted", || run_program(&["umount", &first.mountpoint]).code == 0);
        let other = mount(&second);
        gone.detach().unwrap();
        drop(gone);
        assert_eq!(second.mounts(), 1);
        drop(other);
        assert_eq!(second.mounts(), 0);
    }
}

#[test]
fn other_mounts_are_named_for_what_they_are() {
    let fixture = MountFixture::new();
    let cases = [
        (fixture.path("missing"), "no such file"),
        (fixture.source.clone(), "nothing is mounted there"),
        ("/proc".to_owned(), "type proc"),
    ];
    for (path, words) in cases {
        for options in [&[][..], &["--lazy"]] {
            let outcome = run(&[&["unmount", &path], options].concat());
            assert_eq!(outcome.code, 1);
            assert!(outcome.stderr.contains(words), "{}", outcome.stderr);
            assert!(outcome.stderr.contains("what to do"), "{}", outcome.stderr);
        }
    }
    assert!(mounts_at("/proc") > 0);
}

#[test]
fn status_lists_mounts() {
    let fixture = MountFixture::new();
    assert_eq!(fixture.state(), "none");
    let daemon = fixture.mount(&[]);
    let outcome = run(&["status"]);
    assert_eq!(outcome.code, 0);
    assert!(outcome.stdout.contains(&fixture.mountpoint) && outcome.stdout.contains("served"));
    let mount = fixture.status().unwrap();
    assert_eq!(mount["source"], fixture.source.as_str());
    assert_eq!(mount["stats"]["pid"], daemon.0);
    assert_eq!(mount["stats"]["version"], 1);
}

#[test]
fn status_can_be_watched() {
    let fixture = MountFixture::new();
    let mut watching = Command::new(ckptfs())
        .args(["status", "--watch", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut next = || serde_json::from_str::<serde_json::Value>(&lines.next().unwrap()).unwrap();
    let here = |all: &serde_json::Value| {
        let mut mounts = all.as_array().unwrap().iter();
        mounts.any(|mount| mount["mountpoint"] == fixture.mountpoint.as_str())
    };
    assert!(!here(&next()));
    fixture.mount(&[]);
    wait_until("it is seen", || here(&next()));
    assert_eq!(fixture.unmount(&[]).code, 0);
    wait_until("it is no more seen", || !here(&next()));
    // Without a reader it ends by itself.
    drop(lines);
    wait_until("it ends", || watching.try_wait().unwrap().is_some());
    assert_eq!(watching.wait().unwrap().code(), Some(0));
}

#[test]
fn a_program_that_uses_the_library_mounts_without_a_daemon() {
    let fixture = MountFixture::new();
    let mountpoint = Path::new(&fixture.mountpoint);
    let options = MountOptions::new((&fixture.source).into(), mountpoint.into());
    let mounted = ckptfs::mount::mount(&options).unwrap();
    assert_eq!((mounted.mountpoint(), fixture.mounts()), (mountpoint, 1));
    assert_eq!(mounted.stats().pid, std::process::id());
    assert!(mounted.attached().is_attached().unwrap());
    assert!(!mounted.has_ended() && !mounted.wait(Duration::from_millis(1)));
    mounted.detach().unwrap();
    assert!(mounted.wait(Duration::from_secs(40)) && mounted.has_ended());
    assert_eq!((mounted.failure(), fixture.mounts()), (None, 0));
    mounted.detach().unwrap();
    drop(mounted);
    // Dropping it unmounts too.
    drop(ckptfs::mount::mount(&options).unwrap());
    assert_eq!(fixture.mounts(), 0);
}
