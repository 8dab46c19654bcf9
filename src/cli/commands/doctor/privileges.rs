//! Checks of privileges: whether this user and ordinary users may mount, by fusermount3 or in a user namespace.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use crate::mount::error::{MOUNT_TABLE, MOUNT_TABLE_REMEDY};
use crate::mount::fuse_device::{DEVICE_MODE_REMEDY, FUSE_DEVICE, is_dev_empty, no_device_remedy};
use crate::mount::lifecycle::fusermount;

use super::check::Check;
use super::system::{has_capability, has_status, is_outermost, read_trimmed};

/// What decides whether users may mount.
#[derive(Clone, Debug)]
struct PrivilegeFacts {
    /// The device's mode, if it is there.
    mode: Option<u32>,
    /// Why this user cannot open the device.
    open_error: Option<Errno>,
    is_root: bool,
    may_mount: bool,
    is_outermost: bool,
    no_new_privileges: bool,
    /// fusermount3, and whether it is setuid.
    fusermount: Option<(PathBuf, bool)>,
    /// Whether the table that fusermount3 reads before it unmounts is the kernel's.
    has_mount_table: bool,
    /// The setting that closes user namespaces to ordinary users, and the value that would open them.
    closing_setting: Option<(&'static str, &'static str)>,
}

pub(super) fn check_privileges() -> Vec<Check> {
    let facts = PrivilegeFacts::of_this_process();
    vec![
        check_device(facts.open_error),
        check_fusermount(&facts),
        check_allow_other(facts.is_root),
        check_namespaces(&facts),
    ]
}

/// Settings that close user namespaces to ordinary users: file, sysctl name, closing value and opening value.
const CLOSING_SETTINGS: [(&str, &str, &str, &str); 3] = [
    ("/proc/sys/user/max_user_namespaces", "user.max_user_namespaces", "0", "10000"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "kernel.unprivileged_userns_clone", "0", "1"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        "0",
    ),
];

impl PrivilegeFacts {
    fn of_this_process() -> PrivilegeFacts {
        let permissions =
            |path: &PathBuf| fs::metadata(path).ok().map(|it| it.permissions().mode());
        let opened = rustix::fs::open(FUSE_DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let closing = CLOSING_SETTINGS
            .iter()
            .find(|(path, _, value, _)| read_trimmed(path).as_deref() == Some(*value));
        PrivilegeFacts {
            mode: permissions(&FUSE_DEVICE.into()),
            open_error: opened.err(),
            is_root: rustix::process::geteuid().is_root(),
            may_mount: has_capability(CapabilitySet::SYS_ADMIN),
            is_outermost: is_outermost(),
            no_new_privileges: has_status("NoNewPrivs", "1"),
            fusermount: fusermount::find().map(|path| {
                let is_setuid = permissions(&path).is_some_and(|mode| mode & 0o4000 != 0);
                (path, is_setuid)
            }),
            has_mount_table: fs::canonicalize(MOUNT_TABLE).is_ok_and(|it| it.starts_with("/proc")),
            closing_setting: closing.map(|&(_, setting, _, opens)| (setting, opens)),
        }
    }

    fn can_mount_directly(&self) -> bool {
        self.may_mount && self.open_error.is_none()
    }

    /// The device's mode if that decides which users open it: not if the device is missing or kept from a container.
    fn deciding_mode(&self) -> Option<u32> {
        self.mode.filter(|_| matches!(self.open_error, None | Some(Errno::ACCESS)))
    }

    /// Whether ordinary users may open the device: this user, or if this user is root, all others.
    fn is_open_to_users(&self) -> bool {
        let for_all = self.mode.is_some_and(|mode| mode & 0o006 == 0o006);
        self.open_error.is_none() && (for_all || !self.is_root)
    }
}

fn check_device(refused: Option<Errno>) -> Check {
    const CHECK_NAME: &str = FUSE_DEVICE;
    match refused {
        None => Check::ok(CHECK_NAME, "there, and this user may open it"),
        Some(Errno::ACCESS) => {
            Check::problem(CHECK_NAME, "there, and this user may not open it", DEVICE_MODE_REMEDY)
        }
        Some(Errno::PERM) => Check::problem(
            CHECK_NAME,
            "there, and this container may not open it",
            no_device_remedy(),
        ),
        Some(Errno::NOENT) => {
            let also =
                if is_dev_empty() { ": /dev has no devices, not even /dev/null" } else { "" };
            let says = format!("not there, so nothing can be mounted{also}");
            Check::problem(CHECK_NAME, says, no_device_remedy())
        }
        Some(e) => Check::problem(CHECK_NAME, format!("cannot be opened: {e}"), no_device_remedy()),
    }
}

fn check_fusermount(facts: &PrivilegeFacts) -> Check {
    const CHECK_NAME: &str = "fusermount3";
    let fusermount =
        facts.fusermount.as_ref().map(|(path, is_setuid)| (path.display(), *is_setuid));
    match fusermount {
        Some((path, true)) if facts.no_new_privileges && !facts.can_mount_directly() => {
            Check::problem(
                CHECK_NAME,
                format!("{path}: cannot help, because this process may not gain privileges"),
                "in a container, start it without no-new-privileges, or as root",
            )
        }
        Some((path, true)) if facts.is_outermost => match facts.deciding_mode() {
            _ if facts.is_open_to_users() && !facts.has_mount_table => Check::note(
                CHECK_NAME,
                format!(
                    "{path}: ordinary users can mount, but not unmount: it reads {MOUNT_TABLE}, which is not the kernel's table of mounts"
                ),
                MOUNT_TABLE_REMEDY,
            ),
            _ if facts.is_open_to_users() => {
                Check::ok(CHECK_NAME, format!("{path}: ordinary users can mount"))
            }
            None => Check::ok(
                CHECK_NAME,
                format!("{path}: found; it cannot mount without {FUSE_DEVICE}"),
            ),
            // fusermount3 opens the device as its caller.
            Some(mode) => {
                let says = format!(
                    "{path}: ordinary users cannot mount, because they may not open {FUSE_DEVICE} (mode {:04o})",
                    mode & 0o7777
                );
                match facts.can_mount_directly() {
                    true => Check::note(CHECK_NAME, says, DEVICE_MODE_REMEDY),
                    false => Check::problem(CHECK_NAME, says, DEVICE_MODE_REMEDY),
                }
            }
        },
        fusermount if facts.can_mount_directly() => {
            let state = if fusermount.is_some() { "cannot help here" } else { "not there" };
            Check::ok(CHECK_NAME, format!("{state}, and not needed: this user may mount by itself"))
        }
        Some((path, true)) => Check::problem(
            CHECK_NAME,
            format!("{path}: has no power inside a user namespace"),
            "let this user open /dev/fuse (mode 0666), or mount from outside the namespace",
        ),
        Some((path, false)) => Check::problem(
            CHECK_NAME,
            format!("{path}: is not setuid root, so this user cannot mount"),
            "reinstall the package fuse3 (chmod u+s), or run as root",
        ),
        None => Check::problem(
            CHECK_NAME,
            "not there, so this user cannot mount",
            "install the package fuse3",
        ),
    }
}

fn check_allow_other(is_root: bool) -> Check {
    const CHECK_NAME: &str = "--allow-other";
    let config = read_trimmed("/etc/fuse.conf").unwrap_or_default();
    if config.lines().any(|line| line.trim() == "user_allow_other") {
        Check::ok(CHECK_NAME, "anybody may use it (user_allow_other in /etc/fuse.conf)")
    } else if is_root {
        Check::ok(CHECK_NAME, "root may use it, other users not")
    } else {
        Check::note(
            CHECK_NAME,
            "not for this user: a mount is seen by its own user only",
            "have root put the line user_allow_other in /etc/fuse.conf",
        )
    }
}

fn check_namespaces(facts: &PrivilegeFacts) -> Check {
    const CHECK_NAME: &str = "user namespaces";
    match facts.closing_setting {
        _ if !facts.is_outermost && facts.may_mount => {
            Check::ok(CHECK_NAME, "inside one, with the right to mount")
        }
        _ if !facts.is_outermost => Check::note(
            CHECK_NAME,
            "inside one, without the right to mount",
            "enter it as its root (unshare -Urm)",
        ),
        Some((setting, opens)) => Check::note(
            CHECK_NAME,
            format!("denied to ordinary users ({setting}): they cannot mount inside unshare -Urm"),
            format!(
                "only needed where there is neither root nor fusermount3; root allows them: sysctl {setting}={opens}"
            ),
        ),
        None if facts.is_open_to_users() => {
            Check::ok(CHECK_NAME, "allowed: ordinary users can mount inside unshare -Urm")
        }
        None if facts.deciding_mode().is_none() => Check::note(
            CHECK_NAME,
            format!("allowed; a mount inside one needs {FUSE_DEVICE} too"),
            no_device_remedy(),
        ),
        None => Check::note(
            CHECK_NAME,
            format!(
                "allowed; a mount inside one needs {FUSE_DEVICE} too, which ordinary users may not open"
            ),
            DEVICE_MODE_REMEDY,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict;
    use super::*;

    /// Root of a machine with the settings of a distribution.
    fn usual() -> PrivilegeFacts {
        PrivilegeFacts {
            mode: Some(0o020_666),
            open_error: None,
            is_root: true,
            may_mount: true,
            is_outermost: true,
            no_new_privileges: false,
            fusermount: Some(("/usr/bin/fusermount3".into(), true)),
            has_mount_table: true,
            closing_setting: None,
        }
    }

    /// An ordinary user of the same machine.
    fn user() -> PrivilegeFacts {
        PrivilegeFacts { is_root: false, may_mount: false, ..usual() }
    }

    #[test]
    fn devices_that_cannot_be_used_are_problems() {
        assert_eq!(check_device(None).verdict, Verdict::Ok);
        for refused in [Errno::ACCESS, Errno::NOENT, Errno::PERM, Errno::NODEV] {
            assert_eq!(check_device(Some(refused)).verdict, Verdict::Problem);
        }
    }

    #[test]
    fn users_can_mount_where_they_may_open_the_device() {
        let of_group = PrivilegeFacts { mode: Some(0o660), ..user() };
        for facts in [usual(), user(), of_group] {
            assert!(
                check_fusermount(&facts).says.contains("ordinary users can mount"),
                "{facts:?}"
            );
            assert!(check_namespaces(&facts).says.contains("can mount inside unshare -Urm"));
        }
        let root = PrivilegeFacts { mode: Some(0o600), ..usual() };
        let user = PrivilegeFacts { mode: Some(0o600), open_error: Some(Errno::ACCESS), ..user() };
        for (facts, verdict) in [(root, Verdict::Note), (user, Verdict::Problem)] {
            let helper = check_fusermount(&facts);
            assert_eq!(helper.verdict, verdict, "{helper:?}");
            assert!(helper.says.contains("cannot mount") && helper.says.contains("0600"));
            let namespaces = check_namespaces(&facts);
            assert_eq!(namespaces.verdict, Verdict::Note, "{namespaces:?}");
            assert!(!namespaces.says.contains("unshare"), "{namespaces:?}");
            for check in [helper, namespaces] {
                assert!(check.remedy.contains("chmod 666 /dev/fuse"), "{check:?}");
                assert!(check.remedy.contains("/etc/udev/rules.d"), "{check:?}");
            }
        }
    }

    #[test]
    fn namespaces_that_are_closed_are_not_recommended() {
        for (_, setting, _, opens) in CLOSING_SETTINGS {
            let check = check_namespaces(&PrivilegeFacts {
                closing_setting: Some((setting, opens)),
                ..user()
            });
            assert_eq!(check.verdict, Verdict::Note);
            assert!(check.says.contains(setting) && check.says.contains("cannot mount inside"));
            assert!(check.remedy.contains(&format!("{setting}={opens}")), "{check:?}");
        }
    }

    #[test]
    fn without_a_device_nothing_is_promised() {
        let none = PrivilegeFacts { mode: None, open_error: Some(Errno::NOENT), ..usual() };
        let kept_from_a_container = PrivilegeFacts { open_error: Some(Errno::PERM), ..usual() };
        for facts in [none, kept_from_a_container] {
            for check in [check_fusermount(&facts), check_namespaces(&facts)] {
                assert!(!check.says.contains("can mount"), "{check:?}");
                assert!(check.says.contains("/dev/fuse"), "{check:?}");
            }
        }
    }

    #[test]
    fn users_who_could_not_unmount_are_told_before() {
        let (root, user) = (usual(), user());
        for facts in [root, user] {
            let check = check_fusermount(&PrivilegeFacts { has_mount_table: false, ..facts });
            assert_eq!(check.verdict, Verdict::Note, "{check:?}");
            assert!(check.says.contains("can mount, but not unmount"), "{check:?}");
            assert!(check.remedy.contains("ln -sf /proc/self/mounts /etc/mtab"), "{check:?}");
        }
    }
}
