//! The system's table of mounts (`/proc/self/mountinfo`).
//!
//! Nothing here asks the filesystem at a path, so that a dead or stuck daemon cannot block us.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::source::SourceError;

/// The type of our mounts in the table: `fuse`, and the subtype that we mount with.
pub const FILESYSTEM_TYPE: &str = "fuse.ckptfs";

const PROC_SELF: &str = "/proc/self";

/// The device number of a mounted filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// 0 for a filesystem without a disk, as ours.
    pub major: u32,
    /// Together with `major` unique among the mounted filesystems.
    pub minor: u32,
}

impl DeviceNumber {
    /// The number as `stat` reports it.
    pub fn to_raw(self) -> u64 {
        rustix::fs::makedev(self.major, self.minor)
    }
}

impl std::fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MountEntry {
    /// The ID of the mount, which is reused when the mount is gone.
    pub id: u64,
    /// The ID of the mount that the mountpoint is on.
    pub parent_id: u64,
    /// The device of the filesystem, the same for all of its mounts.
    pub device: DeviceNumber,
    /// The mounted directory of the filesystem: `/`, except for bind mounts.
    pub root: PathBuf,
    /// The path of the mount.
    pub mountpoint: PathBuf,
    /// The type of the filesystem, such as `ext4`.
    pub fs_type: OsString,
    /// The source, as it was named when it was mounted.
    pub source: OsString,
    /// The options of the filesystem.
    pub options: OsString,
}

impl MountEntry {
    /// Whether it is a mount of ours.
    pub fn is_ckptfs(&self) -> bool {
        self.fs_type == FILESYSTEM_TYPE
    }

    /// The user ID that a FUSE filesystem was mounted by.
    pub fn owner_uid(&self) -> Option<u32> {
        let options = self.options.to_str()?;
        options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok())
    }

    /// Parses a line of the table; `None` if it is malformed.
    fn parse(line: &[u8]) -> Option<MountEntry> {
        // Exactly one space separates two fields: a field may be empty.
        let mut fields = line.split(|&byte| byte == b' ');
        let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
        let id = number(fields.next()?)?;
        let parent_id = number(fields.next()?)?;
        let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
        let device = DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? };
        let root = unescape(fields.next()?).into();
        let mountpoint = unescape(fields.next()?).into();
        let _mount_options = fields.next()?;
        // Any number of optional fields, then a hyphen.
        fields.find(|&field| field == b"-")?;
        let fs_type = unescape(fields.next()?);
        let source = unescape(fields.next()?);
        let options = unescape(fields.next().unwrap_or_default());
        Some(MountEntry { id, parent_id, device, root, mountpoint, fs_type, source, options })
    }
}

/// Decodes `\040` and the like, which the kernel writes for bytes that would end a field or a line.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let code = match (first, after) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..]) => {
                Some((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'))
            }
            _ => None,
        };
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(bytes)
}

fn parse_table(text: &[u8]) -> Vec<MountEntry> {
    text.split(|&byte| byte == b'\n').filter_map(MountEntry::parse).collect()
}

/// The mounts in the namespace of this process.
pub fn mounts() -> Result<Vec<MountEntry>, SourceError> {
    mounts_of_process(Path::new(PROC_SELF))
}

/// The mounts in the namespace of another process, which its directory in `/proc` names.
pub fn mounts_of_process(process: &Path) -> Result<Vec<MountEntry>, SourceError> {
    let table = process.join("mountinfo");
    let text = std::fs::read(&table)
        .map_err(|e| SourceError::io(&table, "read the table of mounts", e))?;
    Ok(parse_table(&text))
}

/// Our mounts, in the order of the table.
pub fn ckptfs_mounts() -> Result<Vec<MountEntry>, SourceError> {
    Ok(mounts()?.into_iter().filter(MountEntry::is_ckptfs).collect())
}

/// The topmost mount at a path, if the path is a mountpoint.
pub fn mount_at(path: &Path) -> Result<Option<MountEntry>, SourceError> {
    let handle = PathHandle::open(path)?;
    Ok(handle.mount_entry()?.filter(|entry| entry.mountpoint == handle.path()))
}

/// A file or directory, held by a descriptor that was opened without asking its filesystem.
#[derive(Debug)]
pub struct PathHandle {
    fd: OwnedFd,
    path: PathBuf,
    mount_id: u64,
}

impl PathHandle {
    /// Resolves a path; links are followed.
    pub fn open(path: &Path) -> Result<PathHandle, SourceError> {
        // O_PATH resolves names and opens nothing: the filesystem of the last component is not asked.
        let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| SourceError::io(path, "find it", e))?;
        let number = fd.as_raw_fd();
        let real_path = std::fs::read_link(format!("/proc/self/fd/{number}"))
            .map_err(|e| SourceError::io(path, "find its absolute path", e))?;
        let fdinfo = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"))
            .map_err(|e| SourceError::io(path, "find the mount it lies on", e))?;
        let mount_id = fdinfo
            .lines()
            .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
            .ok_or_else(|| {
                let missing = std::io::Error::other("the kernel does not tell the mount");
                SourceError::io(path, "find the mount it lies on", missing)
            })?;
        Ok(PathHandle { fd, path: real_path, mount_id })
    }

    /// The absolute path without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The ID of the mount that it is on.
    pub fn mount_id(&self) -> u64 {
        self.mount_id
    }

    /// The mount that it is on; `None` if that is gone.
    pub fn mount_entry(&self) -> Result<Option<MountEntry>, SourceError> {
        Ok(mounts()?.into_iter().find(|entry| entry.id == self.mount_id))
    }

    /// A path that leads here even if something has been mounted over it.
    pub fn fd_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()))
    }
}

/// Text of the table for messages; bytes that are not UTF-8 are replaced.
pub fn to_display(text: &OsStr) -> String {
    String::from_utf8_lossy(text.as_bytes()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(line: &str) -> Option<MountEntry> {
        MountEntry::parse(line.as_bytes())
    }

    #[test]
    fn a_line_of_our_mount_is_parsed() {
        let line = "52 27 0:43 / /mnt/a\\040b ro,nosuid,nodev shared:7 master:1 - fuse.ckptfs /m\\134x\\054y ro,user_id=0,group_id=0";
        let entry = entry(line).unwrap();
        assert!(entry.is_ckptfs());
        assert_eq!((entry.id, entry.parent_id), (52, 27));
        assert_eq!(entry.device, DeviceNumber { major: 0, minor: 43 });
        assert_eq!(entry.device.to_string(), "0:43");
        assert_eq!(entry.mountpoint, Path::new("/mnt/a b"));
        assert_eq!(entry.source, "/m\\x,y");
        assert_eq!(entry.options, "ro,user_id=0,group_id=0");
        assert_eq!(entry.owner_uid(), Some(0));
    }

    #[test]
    fn fields_may_be_empty_or_look_like_others() {
        let empty = entry("52 27 0:43 / /m ro - fuse.ckptfs  ro").unwrap();
        assert_eq!((empty.source.as_bytes(), empty.options.as_bytes()), (&b""[..], &b"ro"[..]));
        // A mountpoint called `-` and a source called `fuse.ckptfs` are only names.
        let hyphen = entry("52 27 0:43 / - ro - ext4 fuse.ckptfs rw").unwrap();
        assert_eq!((hyphen.mountpoint.as_path(), hyphen.is_ckptfs()), (Path::new("-"), false));
        assert_eq!(hyphen.owner_uid(), None);
        let named = entry("52 27 0:43 / /m\\040-\\040fuse.ckptfs rw - tmpfs none rw").unwrap();
        assert_eq!(named.mountpoint, Path::new("/m - fuse.ckptfs"));
        assert!(!named.is_ckptfs());
        let bytes = MountEntry::parse(b"1 0 8:1 / /\xff\\377\\09 rw - ext4 /dev/sda rw").unwrap();
        assert_eq!(bytes.mountpoint.as_os_str().as_bytes(), b"/\xff\xff\\09");
    }

    #[test]
    fn malformed_lines_are_skipped() {
        let lines = [
            "",
            "52",
            "x 27 0:43 / /m ro - fuse.ckptfs s ro",
            "52 27 43 / /m ro - fuse.ckptfs s ro",
            "52 27 0:99999999999 / /m ro - fuse.ckptfs s ro",
            "52 27 0:43 / /m ro fuse.ckptfs s ro",
            "52 27 0:43 / /m ro -",
            "52 27 0:43 / /m ro - fuse.ckptfs",
            "18446744073709551616 27 0:43 / /m ro - fuse.ckptfs s ro",
        ];
        for line in lines {
            assert_eq!(entry(line), None, "{line}");
        }
        let text = format!("{}\n53 27 0:44 / /n ro - fuse.ckptfs s ro\n", lines.join("\n"));
        assert_eq!(parse_table(text.as_bytes()).len(), 1);
    }

    #[test]
    fn the_root_of_this_machine_is_found_at_its_path() {
        let root = mount_at(Path::new("/")).unwrap().unwrap();
        assert_eq!(root.mountpoint, Path::new("/"));
        assert!(mount_at(Path::new("/proc/self")).unwrap().is_none());
        assert!(mount_at(Path::new("/proc")).unwrap().unwrap().fs_type == "proc");
        assert!(matches!(mount_at(Path::new("/nowhere")), Err(SourceError::Missing { .. })));
    }
}
