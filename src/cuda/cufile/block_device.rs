//! The storage of a file: its filesystem (`statfs`), and the disks beneath it (`/sys/dev/block`).

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{FsWord, fstat, fstatfs, major, minor};

use crate::source::OpenFile;

/// Levels of block devices, such as partitions of arrays of volumes.
const MAX_DEPTH: usize = 8;

/// The filesystem and the disks of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackingStorage {
    /// The magic number of the filesystem; 0 if unknown.
    pub filesystem: FsWord,
    /// The disks that store its bytes; empty if unknown, or without a disk.
    pub disks: Vec<Disk>,
}

/// A disk, by the way it is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// NVMe in this machine.
    Nvme,
    /// NVMe in another machine, over RDMA.
    NvmeOverFabrics,
    Scsi,
    ScaleFlux,
    /// Any other disk, with its name.
    Other(String),
}

impl BackingStorage {
    pub fn of_file(file: &OpenFile) -> BackingStorage {
        let Some(descriptor) = file.descriptor() else {
            return BackingStorage { filesystem: 0, disks: Vec::new() };
        };
        let filesystem = fstatfs(descriptor).map(|stat| stat.f_type).unwrap_or_default();
        let mut disks = Vec::new();
        if let Ok(stat) = fstat(descriptor) {
            let name = format!("{}:{}", major(stat.st_dev), minor(stat.st_dev));
            if let Ok(device) = fs::canonicalize(Path::new("/sys/dev/block").join(name)) {
                collect_disks(device, MAX_DEPTH, &mut disks);
            }
        }
        BackingStorage { filesystem, disks }
    }
}

/// Adds the disks that a block device consists of.
fn collect_disks(device: PathBuf, depth: usize, disks: &mut Vec<Disk>) {
    let parts = fs::read_dir(device.join("slaves")).into_iter().flatten().flatten();
    let parts: Vec<PathBuf> = parts.filter_map(|part| fs::canonicalize(part.path()).ok()).collect();
    let whole = device.join("partition").exists().then(|| device.parent()).flatten();
    match whole {
        _ if depth == 0 => disks.push(Disk::Other(device_name(&device))),
        Some(whole) => collect_disks(whole.to_path_buf(), depth - 1, disks),
        None if parts.is_empty() => disks.push(classify_disk(&device)),
        None => parts.into_iter().for_each(|part| collect_disks(part, depth - 1, disks)),
    }
}

fn classify_disk(device: &Path) -> Disk {
    let name = device_name(device);
    if name.starts_with("nvme") {
        // A multipath disk has no transport; each of its paths has one.
        let transport = fs::read_to_string(device.join("device/transport"));
        return match transport.as_deref().map(str::trim) {
            Ok("pcie") | Err(_) => Disk::Nvme,
            Ok("rdma") => Disk::NvmeOverFabrics,
            Ok(_) => Disk::Other(name),
        };
    }
    match &name {
        name if name.starts_with("sfd") => Disk::ScaleFlux,
        name if name.starts_with("sd") => Disk::Scsi,
        _ => Disk::Other(name),
    }
}

fn device_name(device: &Path) -> String {
    device.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn found(device: &Path) -> Vec<Disk> {
        let mut disks = Vec::new();
        collect_disks(fs::canonicalize(device).unwrap(), MAX_DEPTH, &mut disks);
        disks
    }

    #[test]
    fn partitions_and_arrays_are_the_disks_beneath() {
        let system = tempfile::tempdir().unwrap();
        let at = |name: &str| system.path().join(name);
        for (disk, transport) in
            [("nvme0n1", "pcie\n"), ("nvme1n1", "rdma\n"), ("nvme2n1", "tcp\n")]
        {
            fs::create_dir_all(at(disk).join("device")).unwrap();
            fs::write(at(disk).join("device/transport"), transport).unwrap();
        }
        for folder in ["nvme0n1/nvme0n1p2", "sda", "vda", "sfdv0n1", "md0/slaves", "dm-0/slaves"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        fs::write(at("nvme0n1/nvme0n1p2/partition"), "2").unwrap();
        symlink(at("nvme0n1/nvme0n1p2"), at("md0/slaves/nvme0n1p2")).unwrap();
        symlink(at("md0"), at("dm-0/slaves/md0")).unwrap();
        assert_eq!(found(&at("dm-0")), [Disk::Nvme]);
        symlink(at("dm-0"), at("md0/slaves/dm-0")).unwrap();
        assert!(found(&at("dm-0")).iter().any(|disk| matches!(disk, Disk::Other(_))), "no end");
        for (name, disk) in [
            ("nvme1n1", Disk::NvmeOverFabrics),
            ("nvme2n1", Disk::Other("nvme2n1".to_owned())),
            ("sda", Disk::Scsi),
            ("sfdv0n1", Disk::ScaleFlux),
            ("vda", Disk::Other("vda".to_owned())),
        ] {
            assert_eq!(found(&at(name)), [disk]);
        }
    }
}
