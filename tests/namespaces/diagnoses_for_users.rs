//! `doctor`, `status` and errors name what keeps a user from a mount, and the command that mends it.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::unprivileged::Users;

/// A mount of root below a directory that the user may not enter: nothing lies over it.
#[test]
fn a_mount_below_a_closed_directory_is_not_called_hidden() {
    let users = Users::new();
    let closed = users.fixture.path("closed");
    fs::create_dir_all(format!("{closed}/mnt")).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let script = r#"
        "$CKPTFS" mount "$1" "$2/../closed/mnt"
        nobody "$CKPTFS" status --json
        nobody "$CKPTFS" status
        "$CKPTFS" unmount "$2/../closed/mnt""#;
    let outcome = users.run("666", script);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let (json, text) = outcome.stdout.split_once("\n]\n").unwrap();
    let all: Value = serde_json::from_str(&format!("{json}]")).unwrap();
    let mountpoint = format!("{closed}/mnt");
    let is_here = |mount: &&Value| mount["mountpoint"] == mountpoint.as_str();
    let mount = all.as_array().unwrap().iter().find(is_here).unwrap();
    assert_eq!(mount["state"], "not-permitted", "{mount}");
    let reason = format!("this user may not enter {closed}");
    assert_eq!(mount["reason"], reason.as_str(), "{mount}");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("not permitted to look: this user may not enter"), "{text}");
    assert!(!text.contains("hidden"), "{text}");
}

/// fusermount3 mounts without it, and then cannot unmount.
#[test]
fn a_missing_table_of_mounts_is_seen_before_and_after() {
    let users = Users::new();
    let script = r#"
        etc="$2/../etc"; mkdir "$etc"; mount -t tmpfs none "$etc"; cp -a /etc/. "$etc"
        mount --bind "$etc" /etc; rm /etc/mtab
        nobody "$CKPTFS" doctor
        nobody "$CKPTFS" mount -q "$1" "$2"
        nobody "$CKPTFS" unmount "$2" || echo "unmount: $?"
        ln -sf /proc/self/mounts /etc/mtab
        nobody "$CKPTFS" unmount "$2"
        nobody "$CKPTFS" doctor | grep fusermount3; table "$@""#;
    let outcome = users.run("666", script);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let remedy = "ln -sf /proc/self/mounts /etc/mtab";
    let (before, after) = outcome.stdout.split_once("unmount: 1\n").unwrap();
    assert!(before.contains("can mount, but not unmount") && before.contains(remedy), "{before}");
    assert!(outcome.stderr.contains("/etc/mtab") && outcome.stderr.contains(remedy), "{outcome:?}");
    assert!(after.contains("ordinary users can mount\n") && after.ends_with("none\n"), "{after}");
}

#[test]
fn an_empty_directory_of_devices_is_named() {
    let users = Users::new();
    let script = r#"
        mkdir "$2/../dev"; mount --bind "$2/../dev" /dev
        "$CKPTFS" mount "$1" "$2" || echo "mount: $?"
        "$CKPTFS" mount --foreground "$1" "$2" || echo "foreground: $?"
        "$CKPTFS" doctor || echo "doctor: $?""#;
    let outcome = users.run("666", script);
    for words in ["mount: 1", "foreground: 1", "doctor: 1", "not even /dev/null"] {
        assert!(outcome.stdout.contains(words), "{words}: {outcome:?}");
    }
    let remedy = "mount -t devtmpfs dev /dev";
    assert_eq!(outcome.stdout.matches(remedy).count(), 1, "{outcome:?}");
    assert_eq!(outcome.stderr.matches(remedy).count(), 2, "{outcome:?}");
    assert!(!outcome.stderr.contains("ulimit") && !outcome.stderr.contains("modprobe"));
}
