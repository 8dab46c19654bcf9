//! A file that appears under its name only when it is complete.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, RenameFlags};
use rustix::io::Errno;

use super::{ExportError, temp_file};

/// The permissions of a new file before the umask.
const NEW_FILE_MODE: Mode = Mode::from_raw_mode(0o666);

/// A file being written. Dropped before it is published, it is gone.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    path: PathBuf,
    directory: PathBuf,
    /// The hidden name, while it has one: until it is complete on filesystems without unnamed files, elsewhere while
    /// it takes the place of another file.
    temp_path: Option<PathBuf>,
    replace: bool,
}

impl AtomicFile {
    /// Starts a file that is to be called `path`. Removes what a killed process left of it.
    pub fn create(path: &Path, replace: bool) -> Result<AtomicFile, ExportError> {
        AtomicFile::create_with(path, replace, temp_file::open_unnamed)
    }

    fn create_with(
        path: &Path,
        replace: bool,
        open_unnamed: impl Fn(&Path, Mode) -> Option<OwnedFd>,
    ) -> Result<AtomicFile, ExportError> {
        let path = target_path(path, replace)?;
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        if let Some(name) = path.file_name() {
            temp_file::remove_stale(&temp_file::hidden_path(&directory, name));
        }
        let (file, temp_path) = match open_unnamed(&directory, NEW_FILE_MODE) {
            Some(file) => (file, None),
            None => temp_file::create_hidden(&directory, path.file_name(), NEW_FILE_MODE)
                .map(|(file, hidden)| (file, Some(hidden)))
                .map_err(|e| ExportError::io(&path, "create it", e))?,
        };
        Ok(AtomicFile { file: File::from(file), path, directory, temp_path, replace })
    }

    /// The file, to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The path that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses at once a file that is larger than the free space.
    pub fn require_room(&self, needs: u64) -> Result<(), ExportError> {
        let Ok(stat) = rustix::fs::fstatvfs(&self.file) else { return Ok(()) };
        // Network filesystems that do not know their size report no blocks at all.
        let blocks =
            if rustix::process::geteuid().is_root() { stat.f_bfree } else { stat.f_bavail };
        let free = blocks.saturating_mul(stat.f_frsize);
        if stat.f_blocks != 0 && needs > free {
            return Err(ExportError::NoSpace { path: self.path.clone(), needs, free });
        }
        Ok(())
    }

    /// Writes everything to the disk.
    pub fn sync(&self) -> Result<(), ExportError> {
        self.file.sync_all().map_err(|e| ExportError::io(&self.path, "write it to the disk", e))
    }

    /// Gives the file its name, in one step.
    pub fn publish(mut self) -> Result<(), ExportError> {
        match (&self.temp_path, self.replace) {
            (None, false) => {
                temp_file::link(&self.file, &self.path).map_err(|e| self.naming_error(e.into()))?;
            }
            (None, true) => {
                let hidden =
                    temp_file::link_hidden(&self.file, &self.directory, self.path.file_name());
                self.temp_path = Some(hidden.map_err(|e| self.naming_error(e.into()))?);
                self.rename(RenameFlags::empty())?;
            }
            (Some(_), true) => self.rename(RenameFlags::empty())?,
            (Some(_), false) => match self.rename(RenameFlags::NOREPLACE) {
                Err(ExportError::Io { source, .. })
                    if source.raw_os_error() == Some(Errno::INVAL.raw_os_error()) =>
                {
                    // A filesystem without that flag. A link refuses an existing name as well.
                    let hidden = self.temp_path.clone().unwrap_or_default();
                    std::fs::hard_link(&hidden, &self.path).map_err(|e| self.naming_error(e))?;
                }
                renamed => renamed?,
            },
        }
        // The name is on the disk once its directory is. Some filesystems cannot sync one, and need not.
        if let Ok(directory) = File::open(&self.directory) {
            let _ = directory.sync_all();
        }
        Ok(())
    }

    fn rename(&mut self, flags: RenameFlags) -> Result<(), ExportError> {
        let hidden = self.temp_path.clone().unwrap_or_default();
        rustix::fs::renameat_with(CWD, &hidden, CWD, &self.path, flags)
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
        if let Some(hidden) = self.temp_path.take() {
            let _ = std::fs::remove_file(hidden);
        }
    }
}

/// Where the file is to be: the end of a link that is replaced. Refuses at once a name that it could never take.
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
        return match std::fs::canonicalize(path) {
            Ok(real) => target_path(&real, replace),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let target = std::fs::read_link(path).unwrap_or_default();
                Err(ExportError::DanglingLink { path: path.to_path_buf(), target })
            }
            Err(error) => Err(ExportError::io(path, "follow the link", error)),
        };
    }
    if !found.is_file() {
        return Err(ExportError::NotRegularFile { path: path.to_path_buf() });
    }
    Ok(path.to_path_buf())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::io::Write;

    use rustix::fs::{FlockOperation, flock};

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let names = std::fs::read_dir(folder).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Runs a test as on filesystems with and without unnamed files.
    fn both(test: impl Fn(&Path, &dyn Fn(&Path, bool) -> Result<AtomicFile, ExportError>)) {
        let kinds: [fn(&Path, Mode) -> Option<OwnedFd>; 2] = [temp_file::open_unnamed, |_, _| None];
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

    #[test]
    fn what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not() {
        both(|folder, create| {
            let path = folder.join("out");
            let part = temp_file::hidden_path(folder, OsStr::new("out"));
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
            assert!(flock(&held, FlockOperation::NonBlockingLockExclusive).is_ok());
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
