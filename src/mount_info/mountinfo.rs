//! The system's table of mounts: which filesystem shows at which path.
//!
//! In: `mountinfo` in `/proc`, and paths. Out: an [`ViewEntry`] for each mount, and a [`PathHandle`]: what lies
//! at a path, found without asking whoever serves it, so that a dead or stuck daemon cannot hold us up.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::source::SourceError;

/// How the kernel calls our type: `fuse`, and the subtype that we mount with.
pub const FILESYSTEM_TYPE: &str = "fuse.ckptfs";

/// This process in `/proc`.
const PROC_SELF: &str = "/proc/self";

/// The number that the kernel gives the filesystem that is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// The first half; 0 for what lies on no disk, as ours.
    pub major: u32,
    /// The second half.
    pub minor: u32,
}

impl DeviceNumber {
    /// As `stat` has it.
    pub fn to_raw(self) -> u64 {
        rustix::fs::makedev(self.major, self.minor)
    }
}

impl std::fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MountEntry {
    /// The mount's number, unique among those that are there, and given again when it is gone.
    pub id: u64,
    /// The number of the mount that it lies on.
    pub parent_id: u64,
    /// What is mounted: the same for every place where it shows.
    pub device: DeviceNumber,
    /// Which part of it shows there: `/`, but for bind mounts.
    pub root: PathBuf,
    /// Where it shows.
    pub mountpoint: PathBuf,
    /// Its type, such as `ext4`.
    pub fs_type: OsString,
    /// What it was mounted from, as it was told.
    pub source: OsString,
    /// The options of the filesystem, as the kernel says them.
    pub options: OsString,
}

impl MountEntry {
    /// Whether it is one of ours.
    pub fn is_ckptfs(&self) -> bool {
        self.fs_type == FILESYSTEM_TYPE
    }

    /// The user who made it, where it is a mount of FUSE.
    pub fn owner_uid(&self) -> Option<u32> {
        let options = self.options.to_str()?;
        options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok())
    }

    /// A line of the table; `None` where it has not the form that the kernel gives it.
    fn parse(line: &[u8]) -> Option<MountEntry> {
        // Exactly one space separates two fields: a field may be empty.
        let mut fields = line.split(|&byte| byte == b' ');
        let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
        let id = number(fields.next()?)?;
        let parent = number(fields.next()?)?;
        let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
        let device = DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? };
        let root = unescape(fields.next()?).into();
        let mountpoint = unescape(fields.next()?).into();
        let _options_of_the_place = fields.next()?;
        // Any number of optional fields, ended by a hyphen.
        fields.find(|&field| field == b"-")?;
        let kind = unescape(fields.next()?);
        let source = unescape(fields.next()?);
        let options = unescape(fields.next().unwrap_or_default());
        Some(MountEntry {
            id,
            parent_id: parent,
            device,
            root,
            mountpoint,
            fs_type: kind,
            source,
            options,
        })
    }
}

/// Undoes `\040` and the like, which the kernel writes for bytes that would break a line up.
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

/// Every mount that this process sees.
pub fn mounts() -> Result<Vec<MountEntry>, SourceError> {
    mounts_of_process(Path::new(PROC_SELF))
}

/// Every mount that a process sees, by its directory in `/proc`.
pub fn mounts_of_process(process: &Path) -> Result<Vec<MountEntry>, SourceError> {
    let table = process.join("mountinfo");
    let text = std::fs::read(&table)
        .map_err(|e| SourceError::io(&table, "read the table of mounts", e))?;
    Ok(parse_table(&text))
}

/// The mounts of ours, in the order of the table.
pub fn ckptfs_mounts() -> Result<Vec<MountEntry>, SourceError> {
    Ok(mounts()?.into_iter().filter(MountEntry::is_ckptfs).collect())
}

/// What shows at a path: the mount whose mountpoint it is, if it is one.
pub fn mount_at(path: &Path) -> Result<Option<MountEntry>, SourceError> {
    let spot = PathHandle::open(path)?;
    Ok(spot.mount_entry()?.filter(|entry| entry.mountpoint == spot.path()))
}

/// What lies at a path, held by a descriptor that no daemon was asked for.
#[derive(Debug)]
pub struct PathHandle {
    fd: OwnedFd,
    path: PathBuf,
    mount_id: u64,
}

impl PathHandle {
    /// Finds it; links are followed.
    pub fn open(path: &Path) -> Result<PathHandle, SourceError> {
        // O_PATH resolves names and opens nothing: the last component's filesystem is not asked.
        let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| SourceError::io(path, "find it", e))?;
        let number = fd.as_raw_fd();
        let real = std::fs::read_link(format!("/proc/self/fd/{number}"))
            .map_err(|e| SourceError::io(path, "find its absolute path", e))?;
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"))
            .map_err(|e| SourceError::io(path, "find the mount it lies on", e))?;
        let mount = about
            .lines()
            .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
            .ok_or_else(|| {
                let missing = std::io::Error::other("the kernel does not tell the mount");
                SourceError::io(path, "find the mount it lies on", missing)
            })?;
        Ok(PathHandle { fd, path: real, mount_id: mount })
    }

    /// Its path, absolute and without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of the mount it lies on.
    pub fn mount_id(&self) -> u64 {
        self.mount_id
    }

    /// The mount it lies on; `None` where that is gone since.
    pub fn mount_entry(&self) -> Result<Option<MountEntry>, SourceError> {
        Ok(mounts()?.into_iter().find(|entry| entry.id == self.mount_id))
    }

    /// A path that leads to this very spot, whatever is mounted over it since.
    pub fn fd_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()))
    }
}

/// Text of the table for people, whatever bytes it has.
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
    fn a_line_of_ours() {
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
    fn what_has_not_the_form_is_left_out_and_the_rest_read() {
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
    fn this_machine_has_a_root_and_it_shows_at_its_path() {
        let root = mount_at(Path::new("/")).unwrap().unwrap();
        assert_eq!(root.mountpoint, Path::new("/"));
        assert!(mount_at(Path::new("/proc/self")).unwrap().is_none());
        assert!(mount_at(Path::new("/proc")).unwrap().unwrap().fs_type == "proc");
        assert!(matches!(mount_at(Path::new("/nowhere")), Err(SourceError::Missing { .. })));
    }
}
