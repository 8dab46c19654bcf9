//! A signal ends a mount, and leaves no dead one behind.

use std::fs::{self, File};

use crate::common::mounting::{MountFixture, wait_until};

#[test]
fn each_signal_ends_an_idle_mount() {
    for name in ["TERM", "INT", "HUP", "QUIT"] {
        let fixture = MountFixture::new();
        let foreground = fixture.mount_in_foreground(&[]);
        foreground.kill(name);
        let (status, messages) = foreground.ends();
        assert_eq!((status.code(), messages.as_str()), (Some(0), ""), "{name}");
        assert_eq!(fixture.mounts(), 0);
    }
}

#[test]
fn other_signals_do_nothing() {
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    for name in ["USR1", "USR2", "ALRM", "PIPE"] {
        daemon.kill(name);
        fixture.wait_until_alive();
    }
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_signal_ends_a_daemon_too() {
    let fixture = MountFixture::new();
    let daemon = fixture.mount(&[]);
    daemon.kill("TERM");
    wait_until("the daemon ends", || !daemon.runs());
    assert_eq!(fixture.mounts(), 0);
}

#[test]
fn a_reader_may_finish() {
    let fixture = MountFixture::new();
    let mut foreground = fixture.mount_in_foreground(&[]);
    let held = File::open(&fixture.mountpoint).unwrap();
    foreground.kill("TERM");
    wait_until("it is detached", || fixture.mounts() == 0);
    assert!(foreground.runs());
    drop(held);
    let (status, messages) = foreground.ends();
    assert_eq!((status.code(), messages.as_str()), (Some(0), ""));
}

#[test]
fn a_reader_that_never_finishes_is_cut_off() {
    let fixture = MountFixture::new();
    let foreground = fixture.mount_in_foreground(&[]);
    let held = File::open(&fixture.mountpoint).unwrap();
    foreground.kill("TERM");
    let (status, messages) = foreground.ends();
    assert_eq!(status.code(), Some(1));
    assert!(messages.contains("its readers took too long"), "{messages}");
    assert_eq!(fixture.mounts(), 0);
    // An open file gives an error instead of a hang.
    assert!(rustix::fs::fgetxattr(&held, "user.ckptfs.stats", &mut [0_u8; 4096]).is_err());
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let fixture = MountFixture::new();
    let mut foreground = fixture.mount_in_foreground(&[]);
    let held = File::open(&fixture.mountpoint).unwrap();
    foreground.kill("TERM");
    wait_until("it is detached", || fixture.mounts() == 0);
    assert!(foreground.runs());
    foreground.kill("INT");
    let (status, messages) = foreground.ends();
    assert_eq!(status.code(), Some(1));
    assert!(messages.contains("SIGINT"), "{messages}");
    drop(held);
    assert_eq!(fs::read_dir(&fixture.mountpoint).unwrap().count(), 0);
}
