//! Each reason is distinguished from all others.

use super::abi::{DriverProperties, control, status};
use super::block_device::{BackingStorage, Disk};
use super::eligibility::check_eligible;
use super::unavailable::GdsUnavailable;

const EXT4: i64 = 0xef53;
const NFS: i64 = 0x6969;

fn driver_properties(status: u32, control: u32) -> DriverProperties {
    DriverProperties { major: 2, minor: 22, status, control, ..DriverProperties::default() }
}

fn storage(filesystem: i64, disks: &[Disk]) -> BackingStorage {
    BackingStorage { filesystem: filesystem as _, disks: disks.to_vec() }
}

fn refusal_text(properties: &DriverProperties, lies: &BackingStorage) -> String {
    check_eligible(properties, lies).unwrap_err().to_string()
}

#[test]
fn supported_disks_and_servers_are_eligible() {
    let compat = control::ALLOW_COMPAT;
    assert_eq!(
        check_eligible(&driver_properties(status::NVME, compat), &storage(EXT4, &[Disk::Nvme])),
        Ok(())
    );
    let xfs = storage(0x5846_5342, &[Disk::Scsi, Disk::Nvme]);
    assert_eq!(
        check_eligible(&driver_properties(status::NVME | status::SCSI, compat), &xfs),
        Ok(())
    );
    assert_eq!(check_eligible(&driver_properties(status::NFS, compat), &storage(NFS, &[])), Ok(()));
}

#[test]
fn the_kernel_module_must_be_loaded_and_used() {
    let none = DriverProperties { major: 0, minor: 0, ..driver_properties(u32::MAX, 0) };
    assert_eq!(check_eligible(&none, &storage(EXT4, &[Disk::Nvme])), Err(GdsUnavailable::Module));
    let posix = driver_properties(u32::MAX, control::POSIX_IO);
    assert_eq!(check_eligible(&posix, &storage(EXT4, &[Disk::Nvme])), Err(GdsUnavailable::Posix));
}

#[test]
fn every_disk_beneath_must_be_supported() {
    let array = storage(EXT4, &[Disk::Nvme, Disk::Scsi]);
    assert!(
        refusal_text(&driver_properties(status::NVME, 0), &array)
            .ends_with("does not support SCSI")
    );
    let fabrics = storage(EXT4, &[Disk::NvmeOverFabrics]);
    assert!(
        refusal_text(&driver_properties(status::NVME, 0), &fabrics).ends_with("NVMe over fabrics")
    );
    assert!(
        refusal_text(&driver_properties(status::NVME, 0), &storage(NFS, &[]))
            .ends_with("does not support NFS")
    );
}

#[test]
fn an_unknown_disk_needs_a_library_without_fallback() {
    let virtio = storage(EXT4, &[Disk::Other("vda".to_owned())]);
    let allowed = driver_properties(status::NVME, control::ALLOW_COMPAT);
    assert!(refusal_text(&allowed, &virtio).contains("the disk vda"));
    let again = driver_properties(status::NVME, control::FALLBACK_IO);
    assert!(refusal_text(&again, &virtio).contains("the disk vda"));
    assert!(matches!(
        check_eligible(&allowed, &storage(EXT4, &[])),
        Err(GdsUnavailable::Disk { .. })
    ));
    assert_eq!(check_eligible(&driver_properties(status::NVME, 0), &virtio), Ok(()));
    assert!(refusal_text(&driver_properties(status::NFS, 0), &virtio).ends_with("any disk"));
}

#[test]
fn other_filesystems_are_refused_by_their_names() {
    let all = driver_properties(u32::MAX, 0);
    for (kind, name) in [(0x6573_5546, "FUSE"), (0x9123_683e, "btrfs"), (0x1234, "0x1234")] {
        let lies = storage(kind, &[Disk::Nvme]);
        assert_eq!(
            refusal_text(&all, &lies),
            format!("GPUDirect Storage: not for files of {name}")
        );
    }
}
