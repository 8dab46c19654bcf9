//! Unprivileged users mount too: through fusermount3, or in a user namespace.
//!
//! Each script runs in a mount namespace of its own, in which /dev/fuse has the mode that the test needs.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;
use std::sync::RwLockReadGuard;

use crate::common::command;
use crate::common::command::{Outcome, ckptfs, install, write_model};
use crate::common::mounting::{MountFixture, daemons_of, wait_until};
use crate::shared;

/// An unprivileged user of every system.
const NOBODY: u32 = 65534;

/// The beginning of each script: /dev/fuse of a mode, and a way to become that user.
const PRELUDE: &str = r#"
    set -e
    rm -f "$2/../fuse"; mknod "$2/../fuse" c 10 229; chmod MODE "$2/../fuse"; mount --bind "$2/../fuse" /dev/fuse
    nobody() { setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; }
    table() { grep " $2 " /proc/self/mounts || echo none; }
    ended() { for n in $(seq 600); do pgrep -r R,S,D,T -f "ckptfs mount $1 $2" > /dev/null || return 0; sleep 0.05; done; return 1; }
    killed() { pkill -KILL -r R,S,D,T -f "ckptfs mount $1 $2"; ended "$@"; }
"#;

/// A fixture whose mountpoint is the user's, and the command where the user can run it.
pub struct Users {
    pub fixture: MountFixture,
    binary: String,
    _shared: RwLockReadGuard<'static, ()>,
}

impl Users {
    pub fn new() -> Users {
        let fixture = MountFixture::new();
        let binary = fixture.path("ckptfs");
        install(ckptfs(), &binary);
        chown(&fixture.mountpoint, Some(NOBODY), Some(NOBODY)).unwrap();
        let helper = fs::metadata("/usr/bin/fusermount3").expect("these tests need fuse3");
        assert!(helper.permissions().mode() & 0o4000 != 0, "fusermount3 must be setuid");
        Users { fixture, binary, _shared: shared() }
    }

    /// Runs a script of root with /dev/fuse of that mode. `$CKPTFS` is the command, `$1` the source, `$2`
    /// the mountpoint, and `nobody` runs something as that user.
    pub fn run(&self, mode: &str, script: &str) -> Outcome {
        let script = [&PRELUDE.replace("MODE", mode), script].concat();
        self.unshare("-m", &script)
    }

    fn unshare(&self, what: &str, script: &str) -> Outcome {
        let mut command = Command::new("unshare");
        command.args([what, "bash", "-c", script]);
        command.args(["bash", &self.fixture.source, &self.fixture.mountpoint]);
        command::run_command(command.env("CKPTFS", &self.binary).current_dir("/"))
    }
}

/// Tells whether the only messages are the notes that the mounts show no virtual file.
fn said_nothing_else(outcome: &Outcome) -> bool {
    let mut lines = outcome.stderr.lines();
    outcome.code == 0 && lines.all(|line| line.contains("becomes a virtual file"))
}

#[test]
fn users_mount_through_fusermount3() {
    let users = Users::new();
    let script = r#"
        nobody "$CKPTFS" mount "$1" "$2"
        table "$@"
        nobody "$CKPTFS" status
        nobody "$CKPTFS" unmount "$2"
        table "$@""#;
    let outcome = users.run("666", script);
    assert!(said_nothing_else(&outcome), "{outcome:?}");
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert!(lines[0].contains("fuse.ckptfs ro,nosuid,nodev"), "{lines:?}");
    assert!(lines[0].contains("user_id=65534") && lines[0].contains("default_permissions"));
    assert!(outcome.stdout.contains("served"), "{lines:?}");
    assert_eq!(lines.last(), Some(&"none"));
}

/// What it costs to be no root is said where that was asked for.
#[test]
fn a_mount_without_privileges_says_so_if_verbose() {
    let users = Users::new();
    let script = r#"
        nobody "$CKPTFS" mount -v "$1" "$2"; nobody "$CKPTFS" unmount "$2"
        "$CKPTFS" mount -v "$1" "$2"; "$CKPTFS" unmount "$2""#;
    let outcome = users.run("666", script);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(outcome.stderr.matches("mounted without privileges").count(), 1, "{outcome:?}");
}

/// fusermount3 opens the device as its caller: it cannot help there.
#[test]
fn a_device_for_root_alone_has_a_remedy() {
    let users = Users::new();
    let script = r#"
        nobody "$CKPTFS" mount "$1" "$2" || echo "mount: $?"
        nobody "$CKPTFS" doctor || echo "doctor: $?"
        table "$@""#;
    let outcome = users.run("600", script);
    assert!(
        outcome.stdout.starts_with("mount: 1") && outcome.stdout.contains("doctor: 1"),
        "{outcome:?}"
    );
    assert!(outcome.stderr.contains("chmod 666 /dev/fuse"), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("chmod 666 /dev/fuse"), "{}", outcome.stdout);
    assert!(outcome.stdout.ends_with("none\n"), "{}", outcome.stdout);
}

#[test]
fn a_name_with_commas_stays_a_name_and_root_can_take_it_away() {
    let users = Users::new();
    let source = users.fixture.path("a,allow_other,\\b");
    fs::create_dir(&source).unwrap();
    write_model(&std::path::Path::new(&source).join("model.safetensors"), 1, 8);
    let script = r#"
        nobody "$CKPTFS" mount "$2/../a,allow_other,\\b" "$2"
        table "$@"
        nobody "$CKPTFS" status --json
        "$CKPTFS" status | grep permitted
        "$CKPTFS" unmount "$2"
        table "$@""#;
    let outcome = users.run("666", script);
    assert!(said_nothing_else(&outcome), "{outcome:?}");
    let (table, rest) = outcome.stdout.split_once('\n').unwrap();
    assert!(!table.split(' ').nth(3).unwrap().contains("allow_other"), "{table}");
    let (json, rest) = rest.split_once("\n]\n").unwrap();
    let all: serde_json::Value = serde_json::from_str(&format!("{json}]")).unwrap();
    let here = |mount: &&serde_json::Value| mount["source"] == source.as_str();
    assert!(all.as_array().unwrap().iter().any(|mount| here(&mount)), "{all}");
    assert!(rest.contains("not permitted") && rest.ends_with("none\n"), "{rest}");
}

#[test]
fn another_users_mount_names_its_owner() {
    let users = Users::new();
    let script = r#"
        nobody "$CKPTFS" mount "$1" "$2" OPTIONS
        other() { setpriv --reuid 65533 --regid 65533 --clear-groups "$@"; }
        other "$CKPTFS" unmount "$2" || echo "unmount: $?"
        other "$CKPTFS" unmount --lazy "$2" || echo "lazy: $?"
        table "$@" | wc -l
        "$CKPTFS" unmount "$2"
        table "$@"; ended "$@""#;
    // A mount that lets no other user look, and one that does.
    for options in ["", "--allow-other"] {
        let conf =
            r#"echo user_allow_other > "$2/../conf"; mount --bind "$2/../conf" /etc/fuse.conf"#;
        let outcome = users.run("666", &format!("{conf}\n{}", script.replace("OPTIONS", options)));
        assert_eq!(outcome.code, 0, "{outcome:?}");
        assert_eq!(outcome.stdout, "unmount: 1\nlazy: 1\n1\nnone\n", "{outcome:?}");
        let owner = "was mounted by nobody (user 65534): only that user or root may unmount it";
        assert_eq!(outcome.stderr.matches(owner).count(), 2, "{}", outcome.stderr);
        assert!(outcome.stderr.contains("what to do: ask that user"), "{}", outcome.stderr);
        assert!(!outcome.stderr.contains("fusermount"), "{}", outcome.stderr);
    }
}

/// What ordinary users can do depends on the device, and not on the caller.
#[test]
fn the_doctor_tells_root_what_users_can_do() {
    let users = Users::new();
    let output = |mode: &str| {
        let outcome = users.run(mode, r#""$CKPTFS" doctor"#);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""), "{outcome:?}");
        outcome.stdout
    };
    let (open, shut) = (output("666"), output("600"));
    assert!(open.contains("ordinary users can mount"), "{open}");
    assert!(!open.contains("chmod 666"), "{open}");
    assert!(shut.contains("ordinary users cannot mount") && shut.contains("mode 0600"), "{shut}");
    assert!(shut.contains("chmod 666 /dev/fuse") && shut.contains("/etc/udev/rules.d"), "{shut}");
    assert!(!shut.contains("can mount inside unshare -Urm"), "{shut}");
}

#[test]
fn signals_and_dead_mounts_work_as_for_root() {
    let users = Users::new();
    let script = r#"
        mount() { nobody "$CKPTFS" mount "$@"; }
        mount "$@"; pkill -TERM -f "ckptfs mount $1 $2"; ended "$@"; table "$@"
        mount "$@"; killed "$@"; nobody "$CKPTFS" status
        mount "$@"; table "$@" | wc -l
        killed "$@"; nobody "$CKPTFS" unmount "$2"; table "$@""#;
    let outcome = users.run("666", script);
    assert!(said_nothing_else(&outcome), "{outcome:?}");
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines.first(), Some(&"none"), "{lines:?}");
    assert!(outcome.stdout.contains("DEAD"), "{lines:?}");
    let was_dead = format!("{}: was dead, removed", users.fixture.mountpoint);
    assert!(lines.ends_with(&["1", &was_dead, "none"]), "{lines:?}");
}

#[test]
fn busy_and_lazy_unmounts_work_as_for_root() {
    let users = Users::new();
    let script = r#"
        nobody "$CKPTFS" mount "$1" "$2"
        nobody bash -c '
            exec 3<"$2"
            "$CKPTFS" unmount "$2"; echo "busy: $?"
            "$CKPTFS" unmount --lazy "$2"; echo "lazy: $?"' bash "$@"
        table "$@"; ended "$@""#;
    let outcome = users.run("666", script);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(
        outcome.stdout.contains("busy: 1") && outcome.stdout.contains("lazy: 0"),
        "{outcome:?}"
    );
    assert!(outcome.stdout.contains("none\n"), "{}", outcome.stdout);
    assert!(
        outcome.stderr.contains("in use") && outcome.stderr.contains("--lazy"),
        "{}",
        outcome.stderr
    );
    wait_until("the daemon ends", || daemons_of(&users.fixture.mountpoint).is_empty());
}

#[test]
fn a_forbidden_option_has_a_remedy() {
    let users = Users::new();
    for (options, words) in [
        ("--allow-other", "leave --allow-other out"),
        ("--uid 5", "--uid needs root"),
        ("--gid 5", "--gid needs root"),
    ] {
        let script = r#"
            touch "$2/../conf"; mount --bind "$2/../conf" /etc/fuse.conf
            nobody "$CKPTFS" mount "$1" "$2" OPTIONS"#;
        let outcome = users.run("666", &script.replace("OPTIONS", options));
        assert_eq!(outcome.code, 1);
        assert!(outcome.stderr.contains(words), "{}", outcome.stderr);
    }
    let outcome = users.run("666", r#"chmod 700 "$1"; nobody "$CKPTFS" mount "$1" "$2""#);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("ask for read permission on it"), "{}", outcome.stderr);
    fs::set_permissions(&users.fixture.source, fs::Permissions::from_mode(0o755)).unwrap();
    chown(&users.fixture.mountpoint, Some(0), Some(0)).unwrap();
    let outcome = users.run("666", r#"nobody "$CKPTFS" mount "$1" "$2""#);
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.stderr.contains("mount at a directory that you may write to"),
        "{}",
        outcome.stderr
    );
}

#[test]
fn a_missing_helper_or_device_has_a_remedy() {
    let users = Users::new();
    let script = r#"
        for helper in $(type -ap fusermount3 fusermount); do mount --bind /dev/null "$helper"; done
        nobody "$CKPTFS" mount "$1" "$2" || echo "mount: $?"
        nobody "$CKPTFS" doctor || echo "doctor: $?""#;
    let outcome = users.run("666", script);
    assert!(
        outcome.stdout.contains("mount: 1") && outcome.stdout.contains("doctor: 1"),
        "{outcome:?}"
    );
    assert!(outcome.stderr.contains("install the package fuse3"), "{}", outcome.stderr);

    let script = r#"
        mount -t tmpfs none /dev; mknod -m 666 /dev/null c 1 3
        "$CKPTFS" mount "$1" "$2" || echo "mount: $?"
        "$CKPTFS" doctor || echo "doctor: $?"
        nobody "$CKPTFS" mount "$1" "$2" || echo "nobody: $?""#;
    let outcome = users.run("666", script);
    for words in ["mount: 1", "doctor: 1", "nobody: 1", "PROBLEM  /dev/fuse"] {
        assert!(outcome.stdout.contains(words), "{outcome:?}");
    }
    assert_eq!(outcome.stderr.matches("--device /dev/fuse").count(), 2, "{}", outcome.stderr);
}

/// A namespace of root, and one of a user with access to the device.
#[test]
fn users_mount_in_a_user_namespace() {
    let users = Users::new();
    let inside = r#"
        set -e
        "$CKPTFS" mount "$1" "$2"
        grep " $2 " /proc/self/mounts
        "$CKPTFS" status
        "$CKPTFS" doctor > /dev/null
        "$CKPTFS" unmount "$2"
        ! grep " $2 " /proc/self/mounts"#;
    let of_root = users.unshare("-Urm", inside);
    fs::write(users.fixture.path("inside"), inside).unwrap();
    let outside = r#"nobody unshare -Urm bash "$2/../inside" "$1" "$2""#;
    let of_a_user = users.run("666", outside);
    for outcome in [of_root, of_a_user] {
        assert!(said_nothing_else(&outcome), "{outcome:?}");
        assert!(
            outcome.stdout.contains("fuse.ckptfs") && outcome.stdout.contains("served"),
            "{outcome:?}"
        );
    }
    let refused = users.run("600", outside);
    assert_eq!(refused.code, 1);
}
