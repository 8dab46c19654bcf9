//! A file that appears under its name only when it is complete, if a user may give that name.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;

use crate::temp_file::{TempFile, sync_directory};

use super::{ExportError, check_output_path};

/// The permissions of a new file before the umask.
const NEW_FILE_MODE: Mode = Mode::from_raw_mode(0o666);

/// A file being written. Dropped before it is published, it is gone.
#[derive(Debug)]
pub struct AtomicFile {
    file: TempFile,
    path: PathBuf,
    replace: bool,
}

impl AtomicFile {
    /// Starts a file that is to be called `path`. Removes what a killed process left of it.
    pub fn create(path: &Path, replace: bool) -> Result<AtomicFile, ExportError> {
        check_output_path(path, true)?;
        let path = target_path(path, replace)?;
        let directory = path.parent().unwrap_or(Path::new(""));
        let file = TempFile::create(directory, path.file_name(), NEW_FILE_MODE)
            .map_err(|e| ExportError::io(&path, "create it", e))?;
        Ok(AtomicFile { file, path, replace })
    }

    /// The file, to write to.
    pub fn file(&self) -> &File {
        self.file.file()
    }

    /// The path that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses at once a file that is larger than the free space.
    pub fn require_room(&self, needs: u64) -> Result<(), ExportError> {
        let Ok(stat) = rustix::fs::fstatvfs(self.file()) else { return Ok(()) };
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
        self.file().sync_all().map_err(|e| ExportError::io(&self.path, "write it to the disk", e))
    }

    /// Gives the file its name, in one step. The name is then on the disk, too.
    pub fn publish(self) -> Result<(), ExportError> {
        let AtomicFile { file, path, replace } = self;
        file.take(&path, replace).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => ExportError::Exists { path: path.clone() },
            _ => ExportError::io(&path, "give it its name", error),
        })?;
        sync_directory(path.parent().unwrap_or(Path::new("")));
        Ok(())
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
