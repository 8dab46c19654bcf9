//! A daemon without a log file logs to the journal, else to the syslog, if the system has one.
//!
//! This test receives the lines itself: a mount namespace has its socket where the system's would be.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use crate::common::command::run_in_shell;
use crate::common::mounting::MountFixture;
use crate::shared;

/// Puts the folder `$3` in the place of the journal's.
const JOURNAL: &str = r#"
    mount -t tmpfs tmpfs /run; mkdir -p /run/systemd/journal; mount --bind "$3" /run/systemd/journal"#;

/// Makes the socket in the folder `$3` that of the syslog.
const SYSLOG: &str = r#"
    mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /dev
    mknod /dev/fuse c 10 229; mknod /dev/null c 1 3; mknod /dev/urandom c 1 9; ln -s "$3/socket" /dev/log"#;

const SCRIPT: &str = r#"
    "$CKPTFS" mount "$1" "$2"; ls "$2/sub"
    "$CKPTFS" status; "$CKPTFS" status --json; "$CKPTFS" unmount "$2""#;

/// The first line that the log of a mount receives, and the output of `status` in text and JSON.
fn logged(prelude: &str) -> (MountFixture, String, String) {
    let _shared = shared();
    let fixture = MountFixture::new();
    let refused = fixture.path("source/sub");
    fs::create_dir(&refused).unwrap();
    fs::write(format!("{refused}/broken.ckpt"), b"PK\x03\x04 and no archive").unwrap();
    let folder = fixture.path("log");
    fs::create_dir(&folder).unwrap();
    let receiver = UnixDatagram::bind(format!("{folder}/socket")).unwrap();
    receiver.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
    let mut shell = Command::new("unshare");
    shell.args(["-m", "bash"]);
    let script = format!("set -e{prelude}{SCRIPT}");
    let outcome = run_in_shell(shell, &script, &[&fixture.source, &fixture.mountpoint, &folder]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let mut bytes = vec![0; 1 << 16];
    let length = receiver.recv(&mut bytes).unwrap();
    (fixture, String::from_utf8_lossy(&bytes[..length]).into_owned(), outcome.stdout)
}

#[test]
fn the_journal_gets_the_lines_and_status_says_how_to_read_them() {
    let (fixture, line, status) = logged(JOURNAL);
    assert!(line.starts_with("MESSAGE=") && line.contains("broken.ckpt"), "{line}");
    assert!(line.contains("\nPRIORITY=4\n") && line.contains("\nSYSLOG_IDENTIFIER=ckptfs\n"));
    let field = format!("CKPTFS_MOUNTPOINT={}", fixture.mountpoint);
    assert!(line.contains(&format!("\n{field}\n")), "{line}");
    assert!(status.contains(&format!("journalctl {field}")), "{status}");
    assert!(status.contains(r#""target": "journal""#), "{status}");
}

#[test]
fn the_syslog_gets_the_lines_where_there_is_no_journal() {
    let (fixture, line, status) = logged(SYSLOG);
    assert!(line.starts_with("<28>ckptfs[") && line.contains("broken.ckpt"), "{line}");
    assert!(line.contains(&fixture.mountpoint), "{line}");
    assert!(status.contains("syslog, as ckptfs["), "{status}");
    assert!(status.contains(r#""target": "syslog""#), "{status}");
}
