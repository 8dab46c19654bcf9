//! A log file in a folder of the user's own, of bounded size: where a daemon logs if the system has no log.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, fstat, openat, renameat};

use crate::private_folder::{check_private, create_private};

/// The most bytes of the file. What it held then goes to a second one, in the place of what that held.
const MAX_LOG_BYTES: u64 = 1 << 20;

/// Bytes of a name, of the 255 that filesystems take.
const MAX_NAME_BYTES: usize = 200;

/// A log file of this user. It is created with the first line.
#[derive(Debug)]
pub struct StateFile {
    /// Held open: the mount may lie over its path later.
    folder: OwnedFd,
    name: String,
    path: PathBuf,
}

impl StateFile {
    /// The log of a mount in a folder, which is created if it is not there.
    pub fn create(folder: &Path, mountpoint: &Path) -> io::Result<StateFile> {
        let name = log_name(mountpoint);
        Ok(StateFile { folder: create_private(folder)?, path: folder.join(&name), name })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut file = self.open()?;
        if file.metadata()?.len().saturating_add(line.len() as u64) > MAX_LOG_BYTES {
            renameat(&self.folder, &self.name, &self.folder, format!("{}.old", self.name))?;
            file = self.open()?;
        }
        file.write_all(line)
    }

    /// Opens the file for one line: the user may remove it at any time.
    fn open(&self) -> io::Result<File> {
        let flags = OFlags::WRONLY
            | OFlags::APPEND
            | OFlags::CREATE
            | OFlags::NOFOLLOW
            | OFlags::NONBLOCK
            | OFlags::NOCTTY
            | OFlags::CLOEXEC;
        let file = openat(&self.folder, &self.name, flags, Mode::RUSR | Mode::WUSR)?;
        let stat = fstat(&file)?;
        check_private(&stat)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("it is not a regular file"));
        }
        Ok(file.into())
    }
}

impl Write for StateFile {
    /// Takes a whole line: tracing writes each in one call. A line that cannot be written is lost.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = self.append(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The name of the log of a mount: `/mnt/models` has `mnt-models.log`.
fn log_name(mountpoint: &Path) -> String {
    let text = mountpoint.to_string_lossy();
    let kept = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let name: String = text.chars().map(kept).collect();
    // The end of a path says more than its beginning. A name that begins with a dot would be hidden.
    let name = name[name.len().saturating_sub(MAX_NAME_BYTES)..].trim_matches(['-', '.']);
    format!("{}.log", if name.is_empty() { "root" } else { name })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_mountpoint_gives_the_name() {
        assert_eq!(log_name(Path::new("/mnt/my models")), "mnt-my-models.log");
        assert_eq!(log_name(Path::new("/")), "root.log");
        assert_eq!(log_name(Path::new("/.hidden")), "hidden.log");
        assert_eq!(log_name(Path::new("/...")), "root.log");
        assert_eq!(log_name(Path::new(&format!("/{}", "x/".repeat(500)))).len(), 203);
    }

    #[test]
    fn two_files_of_bounded_size_have_the_last_lines() {
        let folder = tempfile::tempdir().unwrap();
        let logs = folder.path().join("a/ckptfs");
        let mut file = StateFile::create(&logs, Path::new("/mnt")).unwrap();
        assert_eq!(
            (file.path(), fs::read_dir(&logs).unwrap().count()),
            (&*logs.join("mnt.log"), 0)
        );
        let line = format!("{}\n", "x".repeat(999));
        for _ in 0..5_000 {
            file.write_all(line.as_bytes()).unwrap();
        }
        file.write_all(b"the last\n").unwrap();
        let size = |name: &str| fs::metadata(logs.join(name)).unwrap().len();
        assert!(size("mnt.log") <= MAX_LOG_BYTES && size("mnt.log.old") <= MAX_LOG_BYTES);
        assert!(size("mnt.log") + size("mnt.log.old") > MAX_LOG_BYTES);
        assert!(fs::read_to_string(file.path()).unwrap().ends_with("x\nthe last\n"));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&logs), mode(file.path())), (0o700, 0o600));
        // A log that was removed begins again.
        fs::remove_file(file.path()).unwrap();
        file.write_all(b"again\n").unwrap();
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "again\n");
    }

    #[test]
    fn nothing_is_written_through_a_link_or_to_what_others_may_write() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        fs::write(&target, "kept").unwrap();
        let mut file = StateFile::create(&folder.path().join("logs"), Path::new("/mnt")).unwrap();
        symlink(&target, file.path()).unwrap();
        file.write_all(b"lost\n").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "kept");
        let open_to_all = folder.path().join("open");
        fs::create_dir(&open_to_all).unwrap();
        fs::set_permissions(&open_to_all, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(StateFile::create(&open_to_all, Path::new("/mnt")).is_err());
    }
}
