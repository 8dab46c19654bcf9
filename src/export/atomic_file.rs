//! A file that appears under its name only when it is complete.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::{ExportError, temp_name};

/// What `open` gives a new file before the umask.
const NEW_FILE_MODE: u32 = 0o666;

/// A file being written. Dropped before it is published, it is gone.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    path: PathBuf,
    directory: PathBuf,
    /// The hidden name that it has, if it has one: until it is complete where the filesystem has no files
    /// without a name, else while it takes the place of another.
    temp_path: Option<PathBuf>,
    replace: bool,
}

impl AtomicFile {
    /// Starts a file that is to be called `path`, and removes what a process that was killed left of it.
    pub fn create(path: &Path, replace: bool) -> Result<AtomicFile, ExportError> {
        AtomicFile::create_with(path, replace, open_unnamed)
    }

    fn create_with(
        path: &Path,
        replace: bool,
        nameless: impl Fn(&Path) -> Option<OwnedFd>,
    ) -> Result<AtomicFile, ExportError> {
        let path = &target_path(path, replace)?;
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        temp_name::remove_stale(&temp_name::name_for(path));
        let (fd, part) = match nameless(&directory) {
            Some(fd) => {
                temp_name::try_lock(&fd);
                (fd, None)
            }
            None => {
                let mode = Mode::from_raw_mode(NEW_FILE_MODE);
                let claim = |part: &Path| temp_name::create_locked(part, mode);
                claim_temp_name(path, claim, |part| temp_name::create(part, mode))
                    .map(|(fd, part)| (fd, Some(part)))
                    .map_err(|e| ExportError::io(path, "create it", e))?
            }
        };
        Ok(AtomicFile {
            file: File::from(fd),
            path: path.to_path_buf(),
            directory,
            temp_path: part,
            replace,
        })
    }

    /// The file, to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The name that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses at once what would fail after a long time.
    pub fn require_room(&self, needs: u64) -> Result<(), ExportError> {
        let Ok(stat) = rustix::fs::fstatvfs(&self.file) else { return Ok(()) };
        // Network filesystems that do not know say zero blocks in all.
        let blocks =
            if rustix::process::geteuid().is_root() { stat.f_bfree } else { stat.f_bavail };
        let free = blocks.saturating_mul(stat.f_frsize);
        if stat.f_blocks != 0 && needs > free {
            return Err(ExportError::NoSpace { path: self.path.clone(), needs, free });
        }
        Ok(())
    }

    /// Puts what was written on the disk.
    pub fn sync(&self) -> Result<(), ExportError> {
        self.file.sync_all().map_err(|e| ExportError::io(&self.path, "write it to the disk", e))
    }

    /// Gives the file its name, in one step.
    pub fn publish(mut self) -> Result<(), ExportError> {
        match (&self.temp_path, self.replace) {
            (None, false) => self.link(&self.path).map_err(|e| self.naming_error(e.into()))?,
            (None, true) => {
                let link = |part: &Path| self.link(part);
                let ((), part) = claim_temp_name(&self.path, |part| link(part).map(Some), link)
                    .map_err(|e| self.naming_error(e.into()))?;
                self.temp_path = Some(part);
                self.rename(RenameFlags::empty())?;
            }
            (Some(_), true) => self.rename(RenameFlags::empty())?,
            (Some(_), false) => match self.rename(RenameFlags::NOREPLACE) {
                Err(ExportError::Io { source, .. })
                    if source.raw_os_error() == Some(Errno::INVAL.raw_os_error()) =>
                {
                    // A filesystem without that flag: a link refuses an existing name as well.
                    let part = self.temp_path.clone().unwrap_or_default();
                    std::fs::hard_link(&part, &self.path).map_err(|e| self.naming_error(e))?;
                }
                renamed => renamed?,
            },
        }
        // The name is on the disk once its directory is; some filesystems cannot, and need not, be asked.
        if let Ok(directory) = File::open(&self.directory) {
            let _ = directory.sync_all();
        }
        Ok(())
    }

    fn link(&self, to: &Path) -> Result<(), Errno> {
        let from = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(CWD, from, CWD, to, AtFlags::SYMLINK_FOLLOW)
    }

    fn rename(&mut self, flags: RenameFlags) -> Result<(), ExportError> {
        let part = self.temp_path.clone().unwrap_or_default();
        rustix::fs::renameat_with(CWD, &part, CWD, &self.path, flags)
            .map_err(|e| self.naming_error(e.into()))?;
        self.temp_path = None;
        Ok(())
    }

    fn naming_error(&self, error: io::Error) -> ExportError {
        match error.kind() {
            io::ErrorKind::AlreadyExists => ExportError::Exists { path: self.path.clone() },
            _ => ExportError::io(&self.path, "give it its name", error),
        }
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(part) = self.temp_path.take() {
            let _ = std::fs::remove_file(part);
        }
    }
}

/// A file without a name: not even a killed process leaves one behind. It gets its name through
/// /proc, which must be there for it.
fn open_unnamed(directory: &Path) -> Option<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::from_raw_mode(NEW_FILE_MODE)).ok()?;
    let linkable = Path::new(&format!("/proc/self/fd/{}", fd.as_raw_fd())).is_symlink();
    linkable.then_some(fd)
}

/// What `claim` makes of the hidden name that goes with `path`, and the name; or, where somebody who lives has
/// that, `make` of a name of its own.
fn claim_temp_name<T>(
    path: &Path,
    claim: impl Fn(&Path) -> Result<Option<T>, Errno>,
    make: impl Fn(&Path) -> Result<T, Errno>,
) -> Result<(T, PathBuf), Errno> {
    let wanted = temp_name::name_for(path);
    loop {
        match claim(&wanted) {
            Ok(Some(made)) => return Ok((made, wanted)),
            Err(Errno::EXIST) if temp_name::remove_stale(&wanted) => {}
            Ok(None) | Err(Errno::EXIST) => break,
            Err(error) => return Err(error),
        }
    }
    loop {
        let name = temp_name::unique_name(path);
        match make(&name) {
            Err(Errno::EXIST) => {}
            made => return made.map(|made| (made, name)),
        }
    }
}

/// Where the file is to be: what a link leads to, if it is one that is replaced. Refuses a name that
/// could not be given in the end.
fn target_path(path: &Path, replace: bool) -> Result<PathBuf, ExportError> {
    let named_as_directory = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if path.file_name().is_none() || named_as_directory {
        return Err(ExportError::IsDirectory { path: path.to_path_buf() });
    }
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(path.to_path_buf()),
        Err(error) => return Err(ExportError::io(path, "create it", error)),
    };
    if found.is_dir() {
        return Err(ExportError::IsDirectory { path: path.to_path_buf() });
    }
    if !replace {
        return Err(ExportError::Exists { path: path.to_path_buf() });
    }
    if found.is_symlink() {
        let real =
            std::fs::canonicalize(path).map_err(|e| ExportError::io(path, "follow the link", e))?;
        return target_path(&real, replace);
    }
    if !found.is_file() {
        return Err(ExportError::NotRegularFile { path: path.to_path_buf() });
    }
    Ok(path.to_path_buf())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let names = std::fs::read_dir(folder).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Filesystems with and without nameless files.
    fn both(test: impl Fn(&Path, &dyn Fn(&Path, bool) -> Result<AtomicFile, ExportError>)) {
        let kinds: [fn(&Path) -> Option<OwnedFd>; 2] = [open_unnamed, |_| None];
        for kind in kinds {
            let folder = tempfile::tempdir().unwrap();
            test(folder.path(), &|path, replace| AtomicFile::create_with(path, replace, kind));
        }
    }

    #[test]
    fn a_published_file_has_its_name_and_no_other_is_left() {
        both(|folder, create| {
            let path = folder.join("out");
            let new = create(&path, false).unwrap();
            new.file().write_all(b"first").unwrap();
            new.publish().unwrap();
            let new = create(&path, true).unwrap();
            new.file().write_all(b"second").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"first");
            new.publish().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"second");
            assert_eq!(names(folder), ["out"]);
        });
    }

    #[test]
    fn a_dropped_file_is_gone() {
        both(|folder, create| {
            drop(create(&folder.join("out"), true).unwrap());
            assert!(names(folder).is_empty());
        });
    }

    #[test]
    fn a_name_that_appears_meanwhile_is_kept() {
        both(|folder, create| {
            let path = folder.join("out");
            let new = create(&path, false).unwrap();
            std::fs::write(&path, "mine").unwrap();
            assert!(matches!(new.publish(), Err(ExportError::Exists { .. })));
            assert_eq!(std::fs::read(&path).unwrap(), b"mine");
            assert_eq!(names(folder), ["out"]);
        });
    }

    /// What is left hidden by a process that is dead, and what one that lives has there.
    #[test]
    fn what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not() {
        both(|folder, create| {
            let path = folder.join("out");
            let part = temp_name::name_for(&path);
            for replace in [false, true] {
                std::fs::write(&part, "left").unwrap();
                create(&path, replace).unwrap().publish().unwrap();
                assert_eq!(names(folder), ["out"]);
            }
            // Left while it was written, as by one that is killed when it takes the name.
            let new = create(&path, true).unwrap();
            if new.temp_path.is_none() {
                std::fs::write(&part, "left").unwrap();
            }
            new.publish().unwrap();
            assert_eq!(names(folder), ["out"]);
            let held = File::create(&part).unwrap();
            assert!(temp_name::try_lock(&held));
            create(&path, true).unwrap().publish().unwrap();
            drop(create(&path, true).unwrap());
            assert_eq!(names(folder).len(), 2);
            assert!(part.exists());
        });
    }

    #[test]
    fn a_file_that_is_written_is_nobody_elses_to_remove() {
        both(|folder, create| {
            let path = folder.join("out");
            let (one, other) = (create(&path, true).unwrap(), create(&path, true).unwrap());
            one.file().write_all(b"one").unwrap();
            other.file().write_all(b"other").unwrap();
            other.publish().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"other");
            one.publish().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"one");
            assert_eq!(names(folder), ["out"]);
        });
    }
}
