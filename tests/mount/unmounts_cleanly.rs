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
    let place = MountFixture::new();
    let daemon = place.mount(&[]);
    assert_eq!(place.mounts(), 1);
    let done = place.unmount(&[]);
    assert_eq!((done.code, done.stdout.as_str(), done.stderr.as_str()), (0, "", ""));
    assert_eq!(place.mounts(), 0);
    assert!(!daemon.runs());
    assert_eq!(fs::read_dir(&place.mountpoint).unwrap().count(), 0);
}

#[test]
fn concurrent_unmounts_all_succeed() {
    let place = MountFixture::new();
    for options in [&[][..], &["--lazy"]] {
        let daemon = place.mount(&[]);
        // A stopped daemon keeps all of them waiting until it continues.
        daemon.stop();
        let unmounting: Vec<_> = (0..4)
            .map(|_| {
                let mut command = Command::new(ckptfs());
                command.args(["unmount", &place.mountpoint]).args(options);
                command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        wait_until("all of them ask", || unmounting.iter().all(|one| has_a_child(one.id())));
        daemon.kill("CONT");
        for one in unmounting {
            let done = one.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&done.stderr);
            assert_eq!((done.status.code(), &*said), (Some(0), ""), "{options:?}");
        }
        assert_eq!(place.mounts(), 0);
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
    let place = MountFixture::new();
    let link = place.path("link,with a comma");
    std::os::unix::fs::symlink(&place.mountpoint, &link).unwrap();
    for written in [link, format!("{}/", place.mountpoint), format!("{}/../mnt", place.mountpoint)]
    {
        let done = run(&["mount", &place.source, &written]);
        assert_eq!(done.code, 0, "{written}: {}", done.stderr);
        assert_eq!(place.state(), "alive");
        let done = run(&["unmount", &written]);
        assert_eq!(done.code, 0, "{written}: {}", done.stderr);
        assert_eq!(place.mounts(), 0);
    }
}

#[test]
fn a_mount_in_use_goes_only_lazily() {
    let place = MountFixture::new();
    let daemon = place.mount(&[]);
    let held = File::open(&place.mountpoint).unwrap();
    let done = place.unmount(&[]);
    assert_eq!(done.code, 1);
    assert!(done.stderr.contains("in use") && done.stderr.contains("--lazy"), "{}", done.stderr);
    assert_eq!((place.mounts(), daemon.runs()), (1, true));

    let done = place.unmount(&["--lazy"]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert!(done.stdout.contains("ends with the last reader"), "{}", done.stdout);
    assert_eq!((place.mounts(), daemon.runs()), (0, true));
    drop(held);
    wait_until("the daemon ends", || !daemon.runs());
}

#[test]
fn other_programs_can_unmount_and_the_daemon_ends() {
    for words in [&["umount"][..], &["umount", "-l"], &["fusermount3", "-u"]] {
        let place = MountFixture::new();
        let foreground = place.mount_in_foreground(&[]);
        // The `status` of another test may use the mount at this moment, and keep it busy.
        wait_until("it is unmounted", || {
            run_program(&[words, &[&place.mountpoint]].concat()).code == 0
        });
        let (status, said) = foreground.ends();
        assert_eq!((status.code(), said.as_str()), (Some(0), ""));
        assert_eq!(place.mounts(), 0);
    }
}

#[test]
fn other_mounts_at_the_same_place_are_left_alone() {
    let place = MountFixture::new();
    let daemon = place.mount(&[]);
    let held = File::open(&place.mountpoint).unwrap();
    assert_eq!(run_program(&["umount", "-l", &place.mountpoint]).code, 0);
    assert_eq!(run_program(&["mount", "-t", "tmpfs", "other", &place.mountpoint]).code, 0);
    daemon.kill("TERM");
    drop(held);
    wait_until("the daemon ends", || !daemon.runs());
    assert_eq!(place.mounts(), 1);

    // Over a mount of ours: neither mount is taken away for the other.
    assert_eq!(run_program(&["umount", &place.mountpoint]).code, 0);
    let daemon = place.mount(&[]);
    assert_eq!(run_program(&["mount", "-t", "tmpfs", "other", &place.mountpoint]).code, 0);
    assert_eq!(place.state(), "hidden");
    let done = place.unmount(&[]);
    assert_eq!(done.code, 1);
    assert!(done.stderr.contains("type tmpfs"), "{}", done.stderr);
    assert_eq!((place.mounts(), daemon.runs()), (2, true));
    assert_eq!(run_program(&["umount", &place.mountpoint]).code, 0);
    assert_eq!(place.unmount(&[]).code, 0);
}

/// The kernel gives the numbers of a mount that is gone to the next one.
#[test]
fn a_mount_that_is_gone_takes_no_other_with_it() {
    let (first, second) = (MountFixture::new(), MountFixture::new());
    let mount = |place: &MountFixture| {
        let options = MountOptions::new((&place.source).into(), (&place.mountpoint).into());
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
    let place = MountFixture::new();
    let cases = [
        (place.path("missing"), "no such file"),
        (place.source.clone(), "nothing is mounted there"),
        ("/proc".to_owned(), "type proc"),
    ];
    for (path, words) in cases {
        for options in [&[][..], &["--lazy"]] {
            let done = run(&[&["unmount", &path], options].concat());
            assert_eq!(done.code, 1);
            assert!(done.stderr.contains(words), "{}", done.stderr);
            assert!(done.stderr.contains("what to do"), "{}", done.stderr);
        }
    }
    assert!(mounts_at("/proc") > 0);
}

#[test]
fn status_lists_mounts() {
    let place = MountFixture::new();
    assert_eq!(place.state(), "none");
    let daemon = place.mount(&[]);
    let done = run(&["status"]);
    assert_eq!(done.code, 0);
    assert!(done.stdout.contains(&place.mountpoint) && done.stdout.contains("SERVED"));
    let mount = place.status().unwrap();
    assert_eq!(mount["source"], place.source.as_str());
    assert_eq!(mount["stats"]["pid"], daemon.0);
    assert_eq!(mount["stats"]["version"], 1);
}

#[test]
fn status_can_be_watched() {
    let place = MountFixture::new();
    let mut watching = Command::new(ckptfs())
        .args(["status", "--watch", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut next = || serde_json::from_str::<serde_json::Value>(&lines.next().unwrap()).unwrap();
    let here = |all: &serde_json::Value| {
        let mut mounts = all.as_array().unwrap().iter();
        mounts.any(|mount| mount["mountpoint"] == place.mountpoint.as_str())
    };
    assert!(!here(&next()));
    place.mount(&[]);
    wait_until("it is seen", || here(&next()));
    assert_eq!(place.unmount(&[]).code, 0);
    wait_until("it is no more seen", || !here(&next()));
    // Without a reader it ends by itself.
    drop(lines);
    wait_until("it ends", || watching.try_wait().unwrap().is_some());
    assert_eq!(watching.wait().unwrap().code(), Some(0));
}

#[test]
fn a_program_that_uses_the_library_mounts_without_a_daemon() {
    let place = MountFixture::new();
    let mountpoint = Path::new(&place.mountpoint);
    let options = MountOptions::new((&place.source).into(), mountpoint.into());
    let mounted = ckptfs::mount::mount(&options).unwrap();
    assert_eq!((mounted.mountpoint(), place.mounts()), (mountpoint, 1));
    assert_eq!(mounted.stats().pid, std::process::id());
    assert!(mounted.attached().is_attached().unwrap());
    assert!(!mounted.has_ended() && !mounted.wait(Duration::from_millis(1)));
    mounted.detach().unwrap();
    assert!(mounted.wait(Duration::from_secs(40)) && mounted.has_ended());
    assert_eq!((mounted.failure(), place.mounts()), (None, 0));
    mounted.detach().unwrap();
    drop(mounted);
    // Dropping it unmounts too.
    drop(ckptfs::mount::mount(&options).unwrap());
    assert_eq!(place.mounts(), 0);
}
