//! Decides whether the library reads a file by GPUDirect Storage, or through the host's memory.
//!
//! The library does not report which it does. So this is decided from its properties and the file's storage; where
//! that is not enough, the file counts as not eligible.

use rustix::fs::FsWord;

use super::abi::{DriverProperties, control, status};
use super::block_device::{BackingStorage, Disk};
use super::unavailable::GdsUnavailable;

const EXT4: FsWord = 0xef53;
const XFS: FsWord = 0x5846_5342;

/// Network filesystems that nvidia-fs can support.
const NETWORK_FILESYSTEMS: [(FsWord, u32, &str); 4] = [
    (0x0bd0_0bd0, status::LUSTRE, "Lustre"),
    (0x6969, status::NFS, "NFS"),
    (0x4750_4653, status::GPFS, "GPFS"),
    (0x1983_0326, status::BEEGFS, "BeeGFS"),
];

/// Common filesystems without support, for messages.
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

/// Fails with the reason why a file there is not read by GPUDirect Storage.
pub fn check_eligible(
    properties: &DriverProperties,
    storage: &BackingStorage,
) -> Result<(), GdsUnavailable> {
    if (properties.major, properties.minor) == (0, 0) {
        return Err(GdsUnavailable::Module);
    }
    if properties.control & control::POSIX_IO != 0 {
        return Err(GdsUnavailable::Posix);
    }
    let has = |bits: u32, kind: &'static str| match properties.status & bits {
        0 => Err(GdsUnavailable::Storage { storage: kind }),
        _ => Ok(()),
    };
    let magic = storage.filesystem;
    if let Some((_, bit, name)) = NETWORK_FILESYSTEMS.iter().find(|(known, ..)| *known == magic) {
        return has(*bit, name);
    }
    if ![EXT4, XFS].contains(&magic) {
        let name = UNSUPPORTED_FILESYSTEMS.iter().find(|(known, _)| *known == magic);
        let filesystem = name.map_or_else(|| format!("{magic:#x}"), |(_, name)| name.to_string());
        return Err(GdsUnavailable::Filesystem { filesystem });
    }
    // If the library must not read through the host's memory, all that it accepts is GPUDirect Storage.
    let is_strict = properties.control & (control::ALLOW_COMPAT | control::FALLBACK_IO) == 0;
    let unknown = [Disk::Other("of this filesystem".to_owned())];
    let disks = if storage.disks.is_empty() { &unknown[..] } else { &storage.disks };
    disks.iter().try_for_each(|disk| match disk {
        Disk::Nvme => has(status::NVME, "NVMe"),
        Disk::NvmeOverFabrics => has(status::NVME_OVER_FABRICS, "NVMe over fabrics"),
        Disk::Scsi => has(status::SCSI, "SCSI"),
        Disk::ScaleFlux => has(status::SCALEFLUX, "ScaleFlux"),
        Disk::Other(_) if is_strict => has(ANY_DISK_BITS, "any disk"),
        Disk::Other(disk) => Err(GdsUnavailable::Disk { disk: disk.clone() }),
    })
}
