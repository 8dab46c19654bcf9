//! Where a recipe lies, to read it again and again.
//!
//! A mount may cover the directory of its recipe. The path would then lead through that mount, and the thread of it that
//! reads the recipe would wait for itself. So the directory is opened before, and the recipe is opened in it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, openat, openat2, statx};
use rustix::io::Errno;

use crate::threads::lock;

use super::error::RecipeError;
use super::file::{RECIPE_FLAGS, Recipe};

const DIRECTORY_FLAGS: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The file of a recipe, in its open directory.
#[derive(Debug)]
pub struct RecipeLocation {
    path: PathBuf,
    directory: Mutex<Option<OwnedFd>>,
    /// The directory and the name of the file itself, for a path that is a link to another filesystem.
    target: Option<(OwnedFd, OsString)>,
}

impl RecipeLocation {
    /// The location of a recipe at an absolute path, before a mount may cover it.
    pub fn new(path: &Path) -> RecipeLocation {
        let open_parent =
            |path: &Path| openat(CWD, path.parent()?, DIRECTORY_FLAGS, Mode::empty()).ok();
        let target = std::fs::canonicalize(path).ok();
        let target =
            target.and_then(|path| Some((open_parent(&path)?, path.file_name()?.to_owned())));
        let directory = Mutex::new(open_parent(path));
        RecipeLocation { path: path.to_path_buf(), directory, target }
    }

    /// Reads the text of the recipe as it is now.
    pub fn read_text(&self) -> Result<Vec<u8>, RecipeError> {
        let file = self
            .open()
            .map_err(|error| RecipeError::Io { path: self.path.clone(), error: error.into() })?;
        Recipe::read_text_of(File::from(file), &self.path)
    }

    fn open(&self) -> Result<OwnedFd, Errno> {
        let name = self.path.file_name().unwrap_or(OsStr::new("."));
        let mut directory = lock(&self.directory);
        let directory = directory.as_mut().ok_or(Errno::NOENT)?;
        self.renew(directory);
        // A link must not lead into a mount that covers it.
        match openat2(&*directory, name, RECIPE_FLAGS, Mode::empty(), ResolveFlags::NO_XDEV) {
            Err(Errno::XDEV | Errno::NOSYS) => {
                let (directory, name) = self.target.as_ref().ok_or(Errno::XDEV)?;
                openat(directory, name, RECIPE_FLAGS, Mode::empty())
            }
            opened => opened,
        }
    }

    /// Opens the directory again if another one took its place. That one is on the same filesystem: a directory of another is
    /// a mount that covers it.
    fn renew(&self, directory: &mut OwnedFd) {
        let Some(parent) = self.path.parent() else { return };
        // Only what the kernel has cached: it asks no filesystem, which may be the mount itself.
        let now = openat2(CWD, parent, DIRECTORY_FLAGS, Mode::empty(), ResolveFlags::CACHED);
        if let Ok(now) = now
            && let (Some(new), Some(old)) = (identity(&now), identity(&*directory))
            && new.0 == old.0
            && new.1 != old.1
        {
            *directory = now;
        }
    }
}

/// The device and the inode of what is open. Asks no filesystem.
fn identity(fd: impl AsFd) -> Option<((u32, u32), u64)> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(fd, "", flags, StatxFlags::INO).ok()?;
    Some(((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn read(location: &RecipeLocation) -> String {
        location
            .read_text()
            .map_or_else(|error| error.to_string(), |text| String::from_utf8(text).unwrap())
    }

    #[test]
    fn a_recipe_is_read_as_it_is_now_wherever_its_path_leads() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("directory");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("a"), "first").unwrap();
        let location = RecipeLocation::new(&directory.join("a"));
        assert_eq!(read(&location), "first");
        fs::write(folder.path().join("next"), "second").unwrap();
        fs::rename(folder.path().join("next"), directory.join("a")).unwrap();
        assert_eq!(read(&location), "second");
        fs::rename(&directory, folder.path().join("old")).unwrap();
        fs::create_dir(&directory).unwrap();
        assert!(read(&location).contains("cannot be read"), "{}", read(&location));
        fs::write(directory.join("a"), "third").unwrap();
        assert_eq!(read(&location), "third");
        fs::remove_file(directory.join("a")).unwrap();
        symlink(folder.path().join("old/a"), directory.join("a")).unwrap();
        assert_eq!(read(&location), "second");
    }

    #[test]
    fn a_link_to_another_filesystem_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        symlink("/proc/sys/kernel/ostype", folder.path().join("a")).unwrap();
        assert_eq!(read(&RecipeLocation::new(&folder.path().join("a"))), "Linux\n");
    }

    #[test]
    fn no_file_and_a_directory_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read(&RecipeLocation::new(&folder.path().join("a"))).contains("cannot be read"));
        fs::create_dir(folder.path().join("b")).unwrap();
        assert!(read(&RecipeLocation::new(&folder.path().join("b"))).contains("it is not a file"));
    }
}
