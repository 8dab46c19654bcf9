//! /dev/fuse, and what to do where it cannot be opened.

use std::fs;
use std::path::Path;

/// The device that a mount is made with.
pub(crate) const FUSE_DEVICE: &str = "/dev/fuse";

/// A device of every machine and every usual container.
const NULL_DEVICE: &str = "/dev/null";

/// fusermount3 opens the device as its caller.
pub(crate) const DEVICE_MODE_REMEDY: &str = "have root let every user open the device, as distributions do: chmod 666 /dev/fuse; \
     to make it last, add a file to /etc/udev/rules.d with the line KERNEL==\"fuse\", MODE=\"0666\"";

const NO_MODULE_REMEDY: &str = "have root load the module on the machine itself: modprobe fuse; \
     a container must then be started with --device /dev/fuse --cap-add SYS_ADMIN";

const NO_NODE_REMEDY: &str = "in a container, start it with --device /dev/fuse --cap-add SYS_ADMIN; \
     elsewhere, have root make the device: mknod -m 666 /dev/fuse c 10 229";

const EMPTY_DEV_REMEDY: &str = "fill /dev with the machine's devices: in a chroot, as root, mount -t devtmpfs dev /dev; \
     with bubblewrap, --dev-bind /dev /dev; in a container, --device /dev/fuse --cap-add SYS_ADMIN";

/// Whether the directory of devices is empty, or as good as that.
pub(crate) fn is_dev_empty() -> bool {
    !Path::new(NULL_DEVICE).exists()
}

/// What to do where the device is missing, or is kept from this process.
pub(crate) fn no_device_remedy() -> &'static str {
    let filesystems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    choose_remedy(is_dev_empty(), &filesystems)
}

/// `filesystems` is the kernel's list of filesystems: a line for each, which ends with its name.
fn choose_remedy(is_dev_empty: bool, filesystems: &str) -> &'static str {
    let mut names = filesystems.lines().filter_map(|line| line.split_whitespace().last());
    match (is_dev_empty, names.any(|name| name == "fuse")) {
        (true, _) => EMPTY_DEV_REMEDY,
        (false, true) => NO_NODE_REMEDY,
        (false, false) => NO_MODULE_REMEDY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_has_the_remedy_of_its_cause() {
        let (with, without) =
            ("nodev\tsysfs\n\text4\nnodev\tfuse\n", "\tfuseblk\nnodev\tfusectl\n");
        for (is_dev_empty, filesystems, words) in [
            (false, without, "modprobe fuse"),
            (false, "", "modprobe fuse"),
            (false, with, "mknod -m 666 /dev/fuse"),
            (true, with, "mount -t devtmpfs"),
            (true, without, "mount -t devtmpfs"),
        ] {
            let remedy = choose_remedy(is_dev_empty, filesystems);
            assert!(remedy.contains(words), "{remedy}");
            assert!(remedy.contains("--device /dev/fuse --cap-add SYS_ADMIN"), "{remedy}");
            assert_eq!(remedy.contains("modprobe"), words.contains("modprobe"), "{remedy}");
        }
    }
}
