//! Check of the mounts of ckptfs that are there already: dead and stuck ones hang or fail every program that uses them.

use std::path::Path;

use crate::cli::terminal_text::format_count;
use crate::mount::MountError;
use crate::mount::lifecycle::mount_states::{MountObserver, MountState, ObservedMount};
use crate::shell_word::shell_word;

use super::check::Check;

const CHECK_NAME: &str = "mounts";

/// The most mounts that a line names. `ckptfs status` lists all.
const MAX_NAMED_MOUNTS: usize = 8;

pub fn check_mounts() -> Check {
    judge(MountObserver::default().observe())
}

fn judge(observed: Result<Vec<ObservedMount>, MountError>) -> Check {
    let mounts = match observed {
        Ok(mounts) => mounts,
        Err(error) => return Check::note(CHECK_NAME, error.to_string(), error.remedy()),
    };
    let in_state = |state: MountState| -> Vec<&Path> {
        let found = mounts.iter().filter(|mount| mount.state == state);
        found.map(|mount| mount.entry.mountpoint.as_path()).collect()
    };
    let (dead, stuck) = (in_state(MountState::Dead), in_state(MountState::NotAnswering));
    let broken = [
        (
            dead,
            "dead, because its daemon was killed",
            "dead, because their daemons were killed",
            "unmount",
        ),
        (stuck, "stuck: it does not answer", "stuck: they do not answer", "unmount --lazy"),
    ];
    let (mut findings, mut commands) = (Vec::new(), Vec::new());
    for (paths, one, many, command) in broken.into_iter().filter(|(paths, ..)| !paths.is_empty()) {
        let named: Vec<String> =
            paths.iter().take(MAX_NAMED_MOUNTS).map(|path| shell_word(path)).collect();
        let (is, why) = if paths.len() == 1 { ("is", one) } else { ("are", many) };
        let left_out = match paths.len() - named.len() {
            0 => String::new(),
            n => format!(" and {n} more, which ckptfs status lists,"),
        };
        findings.push(format!("{}{left_out} {is} {why}", named.join(", ")));
        commands.push(format!("ckptfs {command} {}", named.join(" ")));
    }
    match mounts.len() {
        0 => Check::ok(CHECK_NAME, "no ckptfs mount is there"),
        n if findings.is_empty() => Check::ok(
            CHECK_NAME,
            format!("{} of ckptfs, none dead or stuck", format_count(n, "mount")),
        ),
        _ => {
            Check::note(CHECK_NAME, findings.join("; "), format!("remove: {}", commands.join("; ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict;
    use super::*;
    use crate::mount_info::mountinfo::{DeviceNumber, MountEntry};

    fn mount(mountpoint: &str, state: MountState) -> ObservedMount {
        let entry = MountEntry {
            id: 1,
            parent_id: 0,
            device: DeviceNumber { major: 0, minor: 1 },
            root: "/".into(),
            mountpoint: mountpoint.into(),
            fs_type: "fuse.ckptfs".into(),
            source: "/models".into(),
            options: "ro".into(),
        };
        ObservedMount { entry, state, reason: None, stats: None }
    }

    #[test]
    fn dead_and_stuck_mounts_have_the_command_that_removes_them() {
        let check =
            judge(Ok(vec![mount("/a", MountState::Alive), mount("/b", MountState::Hidden)]));
        assert_eq!(
            (check.verdict, check.says.as_str()),
            (Verdict::Ok, "2 mounts of ckptfs, none dead or stuck")
        );
        assert_eq!(judge(Ok(Vec::new())).verdict, Verdict::Ok);
        let check = judge(Ok(vec![
            mount("/a", MountState::Alive),
            mount("/it's dead", MountState::Dead),
            mount("/c", MountState::NotAnswering),
            mount("/d", MountState::NotAnswering),
        ]));
        assert_eq!(check.verdict, Verdict::Note);
        assert_eq!(
            check.says,
            r"'/it'\''s dead' is dead, because its daemon was killed; /c, /d are stuck: they do not answer"
        );
        assert_eq!(
            check.remedy,
            r"remove: ckptfs unmount '/it'\''s dead'; ckptfs unmount --lazy /c /d"
        );
    }

    #[test]
    fn a_line_names_only_some_of_many_mounts() {
        let many = (0..20).map(|n| mount(&format!("/m{n}"), MountState::Dead));
        let check = judge(Ok(many.collect()));
        assert!(
            check.says.contains("/m7 and 12 more, which ckptfs status lists, are dead"),
            "{check:?}"
        );
        assert!(check.remedy.ends_with(" /m7"), "{check:?}");
    }
}
