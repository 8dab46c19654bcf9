//! Whether what the library does with a file is GPUDirect Storage, or reading by the host's memory.
//!
//! In: what the library says of itself and of the kernel's part, and what the file lies on. Out: nothing, if it is;
//! else what is missing. Pure. The library does not say of a file which it does, so what cannot be told counts as
//! the slower one.

use rustix::fs::FsWord;

use super::GdsUnavailable;
use super::abi::{DriverProperties, control, status};
use super::block_device::{BackingStorage, Disk};

const EXT4: FsWord = 0xef53;
const XFS: FsWord = 0x5846_5342;

/// Filesystems of other machines that nvidia-fs can have support for.
const NETWORK_FILESYSTEMS: [(FsWord, u32, &str); 4] = [
    (0x0bd0_0bd0, status::LUSTRE, "Lustre"),
    (0x6969, status::NFS, "NFS"),
    (0x4750_4653, status::GPFS, "GPFS"),
    (0x1983_0326, status::BEEGFS, "BeeGFS"),
];

/// Names of those that users meet and that have none.
const UNSUPPORTED_FILESYSTEMS: [(FsWord, &str); 8] = [
    (0x6573_5546, "FUSE"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "ZFS"),
    (0x794c_7630, "overlayfs"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58f6, "ramfs"),
    (0xf2f5_2010, "F2FS"),
    (0x00c3_6400, "Ceph"),
];

/// Any kind of disk.
const ANY_DISK_BITS: u32 =
    status::NVME | status::NVME_OVER_FABRICS | status::SCSI | status::SCALEFLUX | status::NVMESH;

/// Whether a file that lies there is read by GPUDirect Storage.
pub fn check_eligible(
    properties: &DriverProperties,
    lies: &BackingStorage,
) -> Result<(), GdsUnavailable> {
    if (properties.major, properties.minor) == (0, 0) {
        return Err(GdsUnavailable::Module);
    }
    if properties.control & control::POSIX_IO != 0 {
        return Err(GdsUnavailable::Posix);
    }
    let has = |bits: u32, storage: &'static str| match properties.status & bits {
        0 => Err(GdsUnavailable::Storage { storage }),
        _ => Ok(()),
    };
    let kind = lies.filesystem;
    if let Some((_, bit, name)) = NETWORK_FILESYSTEMS.iter().find(|(shared, ..)| *shared == kind) {
        return has(*bit, name);
    }
    if ![EXT4, XFS].contains(&kind) {
        let name = UNSUPPORTED_FILESYSTEMS.iter().find(|(without, _)| *without == kind);
        let filesystem = name.map_or_else(|| format!("{kind:#x}"), |(_, name)| name.to_string());
        return Err(GdsUnavailable::Filesystem { filesystem });
    }
    // Where it may not read in another way behind our backs, what it takes is GPUDirect Storage.
    let is_told = properties.control & (control::ALLOW_COMPAT | control::FALLBACK_IO) == 0;
    let unknown = [Disk::Other("of this filesystem".to_owned())];
    let disks = if lies.disks.is_empty() { &unknown[..] } else { &lies.disks };
    disks.iter().try_for_each(|disk| match disk {
        Disk::Nvme => has(status::NVME, "NVMe"),
        Disk::NvmeOverFabrics => has(status::NVME_OVER_FABRICS, "NVMe over fabrics"),
        Disk::Scsi => has(status::SCSI, "SCSI"),
        Disk::ScaleFlux => has(status::SCALEFLUX, "ScaleFlux"),
        Disk::Other(_) if is_told => has(ANY_DISK_BITS, "any disk"),
        Disk::Other(disk) => Err(GdsUnavailable::Disk { disk: disk.clone() }),
    })
}
