//! The memory that this process may use: the machine's, or the limit of its control groups if that is smaller.
//!
//! Limits are read from the files of both versions of control groups, as far as they are mounted. They are those of the
//! process's group and of all groups above it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::mount_info::mountinfo::{self, MountEntry};

/// The memory of this machine in bytes.
pub fn machine_memory() -> u64 {
    let info = rustix::system::sysinfo();
    let units: u64 = info.totalram;
    units.saturating_mul(info.mem_unit.into())
}

/// The smallest limit of this process's control groups in bytes, if any is below the machine's memory.
pub fn cgroup_limit() -> Option<u64> {
    limit_beneath(Path::new("/")).filter(|&limit| limit < machine_memory())
}

/// A version of control groups.
struct CgroupVersion {
    /// The type of its filesystem.
    fs_type: &'static str,
    /// The file with the limit of a group.
    limit_file: &'static str,
    /// Whether a line of /proc/self/cgroup with these controllers is of this version's memory groups.
    has_memory: fn(controllers: &str) -> bool,
}

const VERSIONS: [CgroupVersion; 2] = [
    CgroupVersion {
        fs_type: "cgroup2",
        limit_file: "memory.max",
        has_memory: |controllers| controllers.is_empty(),
    },
    CgroupVersion {
        fs_type: "cgroup",
        limit_file: "memory.limit_in_bytes",
        has_memory: names_memory,
    },
];

/// Whether a list of controllers, or of a filesystem's options, names that of memory.
fn names_memory(list: &str) -> bool {
    list.split(',').any(|word| word == "memory")
}

/// The smallest limit, with `/proc` and the mounts of control groups beneath a directory.
fn limit_beneath(root: &Path) -> Option<u64> {
    let process = root.join("proc/self");
    let groups = fs::read_to_string(process.join("cgroup")).ok()?;
    let mounts = mountinfo::mounts_of_process(&process).ok()?;
    let limits = VERSIONS.iter().filter_map(|version| {
        // A line is `number:controllers:path`.
        let mut lines = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let (_, group) = lines.find(|(controllers, _)| (version.has_memory)(controllers))?;
        let is_this = |mount: &&MountEntry| {
            mount.fs_type == version.fs_type
                && (version.fs_type == "cgroup2"
                    || mount.options.to_str().is_some_and(names_memory))
        };
        let mount = mounts.iter().find(is_this)?;
        smallest_limit(root, mount, Path::new(group), version.limit_file)
    });
    limits.min()
}

/// The smallest limit of a group and of those above it, up to the one that is mounted.
fn smallest_limit(root: &Path, mount: &MountEntry, group: &Path, file: &str) -> Option<u64> {
    let mountpoint = root.join(mount.mountpoint.strip_prefix("/").ok()?);
    // In a container the group may have a path that is not mounted there: then its own group is what is mounted.
    let inside = group.strip_prefix(&mount.root).unwrap_or(Path::new(""));
    let has_parent = inside.components().any(|part| part == std::path::Component::ParentDir);
    let inside = if has_parent { Path::new("") } else { inside };
    let groups = inside.ancestors().map(|above| mountpoint.join(above));
    // A group without limit says `max`, and the topmost has no such file.
    let read = |group: PathBuf| fs::read_to_string(group.join(file)).ok()?.trim().parse().ok();
    groups.filter_map(read).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree with `/proc/self` and files with limits.
    fn tree(groups: &str, mounts: &str, limits: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let files = [("proc/self/cgroup", groups), ("proc/self/mountinfo", mounts)];
        for (path, text) in files.iter().chain(limits) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn limit(groups: &str, mounts: &str, limits: &[(&str, &str)]) -> Option<u64> {
        limit_beneath(tree(groups, mounts, limits).path())
    }

    const V2: &str = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "32 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      33 23 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

    #[test]
    fn the_smallest_limit_of_a_group_and_those_above_it_counts() {
        let group = "0::/user.slice/job\n";
        let at = |own: &'static str, above: &'static str| {
            limit(
                group,
                V2,
                &[
                    ("sys/fs/cgroup/user.slice/job/memory.max", own),
                    ("sys/fs/cgroup/user.slice/memory.max", above),
                    ("sys/fs/cgroup/other/memory.max", "1\n"),
                ],
            )
        };
        assert_eq!(at("2000000000\n", "max\n"), Some(2_000_000_000));
        assert_eq!(at("max\n", "3000000000\n"), Some(3_000_000_000));
        assert_eq!(at("2000000000\n", "1000000000\n"), Some(1_000_000_000));
        assert_eq!(at("max\n", "max\n"), None);
        assert_eq!(at("nonsense", "-5"), None);
    }

    #[test]
    fn the_older_version_is_read_where_its_memory_groups_are_mounted() {
        let groups = "5:cpu,cpuacct:/a\n4:memory:/jobs/b\n0::/\n";
        let limits = [("sys/fs/cgroup/memory/jobs/b/memory.limit_in_bytes", "700000000\n")];
        assert_eq!(limit(groups, V1, &limits), Some(700_000_000));
        assert_eq!(limit(groups, &[V2, V1].concat(), &limits), Some(700_000_000));
        assert_eq!(limit("5:cpu:/a\n", V1, &limits), None);
    }

    /// A container sees its own group as the top, whatever the path that the system gives.
    #[test]
    fn a_container_has_the_limit_of_what_is_mounted_in_it() {
        let v2 = [("sys/fs/cgroup/memory.max", "500000000\n")];
        assert_eq!(limit("0::/\n", V2, &v2), Some(500_000_000));
        assert_eq!(limit("0::/../../elsewhere\n", V2, &v2), Some(500_000_000));
        let mounts = "33 23 0:30 /docker/1f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let v1 = [("sys/fs/cgroup/memory/memory.limit_in_bytes", "600000000\n")];
        assert_eq!(limit("4:memory:/docker/1f\n", mounts, &v1), Some(600_000_000));
        assert_eq!(limit("4:memory:/elsewhere\n", mounts, &v1), Some(600_000_000));
    }

    #[test]
    fn a_system_without_groups_has_no_limit() {
        assert_eq!(limit_beneath(Path::new("/nowhere")), None);
        assert_eq!(limit("", "", &[]), None);
        assert!(cgroup_limit().is_none_or(|limit| limit < machine_memory()));
    }
}
