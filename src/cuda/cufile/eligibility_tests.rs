//! Each thing that can be missing is told from all others.

use super::Missing;
use super::abi::{Properties, control, status};
use super::block_device::{Disk, Lies};
use super::eligibility::is_offered;

const EXT4: i64 = 0xef53;
const NFS: i64 = 0x6969;

fn says(status: u32, control: u32) -> Properties {
    Properties { major: 2, minor: 22, status, control, ..Properties::default() }
}

fn on(filesystem: i64, disks: &[Disk]) -> Lies {
    Lies { filesystem: filesystem as _, disks: disks.to_vec() }
}

fn words(properties: &Properties, lies: &Lies) -> String {
    is_offered(properties, lies).unwrap_err().to_string()
}

#[test]
fn disks_and_servers_that_are_supported_are_read() {
    let compat = control::ALLOW_COMPAT;
    assert_eq!(is_offered(&says(status::NVME, compat), &on(EXT4, &[Disk::Nvme])), Ok(()));
    let xfs = on(0x5846_5342, &[Disk::Scsi, Disk::Nvme]);
    assert_eq!(is_offered(&says(status::NVME | status::SCSI, compat), &xfs), Ok(()));
    assert_eq!(is_offered(&says(status::NFS, compat), &on(NFS, &[])), Ok(()));
}

#[test]
fn the_kernels_part_must_be_there_and_be_used() {
    let none = Properties { major: 0, minor: 0, ..says(u32::MAX, 0) };
    assert_eq!(is_offered(&none, &on(EXT4, &[Disk::Nvme])), Err(Missing::Module));
    let posix = says(u32::MAX, control::POSIX_IO);
    assert_eq!(is_offered(&posix, &on(EXT4, &[Disk::Nvme])), Err(Missing::Posix));
}

#[test]
fn every_disk_beneath_must_be_supported() {
    let array = on(EXT4, &[Disk::Nvme, Disk::Scsi]);
    assert!(words(&says(status::NVME, 0), &array).ends_with("does not support SCSI"));
    let fabrics = on(EXT4, &[Disk::NvmeOverFabrics]);
    assert!(words(&says(status::NVME, 0), &fabrics).ends_with("NVMe over fabrics"));
    assert!(words(&says(status::NVME, 0), &on(NFS, &[])).ends_with("does not support NFS"));
}

#[test]
fn a_disk_that_is_not_known_needs_a_library_that_may_do_nothing_else() {
    let virtio = on(EXT4, &[Disk::Other("vda".to_owned())]);
    let allowed = says(status::NVME, control::ALLOW_COMPAT);
    assert!(words(&allowed, &virtio).contains("the disk vda"));
    let again = says(status::NVME, control::FALLBACK_IO);
    assert!(words(&again, &virtio).contains("the disk vda"));
    assert!(matches!(is_offered(&allowed, &on(EXT4, &[])), Err(Missing::Disk { .. })));
    assert_eq!(is_offered(&says(status::NVME, 0), &virtio), Ok(()));
    assert!(words(&says(status::NFS, 0), &virtio).ends_with("any disk"));
}

#[test]
fn other_filesystems_are_refused_by_their_names() {
    let all = says(u32::MAX, 0);
    for (kind, name) in [(0x6573_5546, "FUSE"), (0x9123_683e, "btrfs"), (0x1234, "0x1234")] {
        let lies = on(kind, &[Disk::Nvme]);
        assert_eq!(words(&all, &lies), format!("GPUDirect Storage: not for files of {name}"));
    }
}
