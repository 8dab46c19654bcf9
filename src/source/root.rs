//! A directory that bounds what may be opened, of any kind of source.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, OFlags, StatVfs, statat};

use super::error::SourceError;
use super::local::LocalDirectory;
use super::metadata::{FileKind, FileMetadata};
use super::store::{
    DirEntry, FileHandle, LinkPolicy, MetadataQuery, ResolvedPath, SourceDirectory,
};
use super::url::{SourceUrl, UrlError, split_url_parent};

/// An opened directory, and the policy for links inside it.
#[derive(Debug)]
pub struct Root {
    directory: Box<dyn SourceDirectory>,
    link_policy: LinkPolicy,
}

impl Root {
    /// The root for a directory that the user typed, and the path from the root to that directory.
    pub fn for_directory(
        typed: &Path,
        link_policy: LinkPolicy,
    ) -> Result<(Arc<Root>, PathBuf), SourceError> {
        if let Some(url) = SourceUrl::parse(typed) {
            let directory = remote_directory(typed, url)?;
            return Ok((Arc::new(Root { directory, link_policy }), PathBuf::new()));
        }
        let (directory, inside) = LocalDirectory::open(typed, link_policy)?;
        Ok((Root::new(directory, link_policy), inside))
    }

    /// The root that another process holds open. Its path may lead elsewhere by now.
    pub fn from_process_fd(
        pid: u32,
        descriptor: i32,
        link_policy: LinkPolicy,
    ) -> Result<Arc<Root>, SourceError> {
        let directory = LocalDirectory::from_process_fd(pid, descriptor, link_policy)?;
        Ok(Root::new(directory, link_policy))
    }

    fn new(directory: impl SourceDirectory + 'static, link_policy: LinkPolicy) -> Arc<Root> {
        Arc::new(Root { directory: Box::new(directory), link_policy })
    }

    /// Refuses from now on to open anything on a device: it is our own mount of this root.
    pub fn exclude_device(&self, device: u64) {
        self.directory.exclude_device(device);
    }

    /// The path for messages.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The path of a file inside for messages.
    pub fn shown_path(&self, inside: &Path) -> PathBuf {
        self.directory.shown_path(inside)
    }

    /// The absolute path without links.
    pub fn real_path(&self) -> &Path {
        self.directory.real_path()
    }

    /// The path from the root of an absolute path without links; `None` if that leads elsewhere.
    pub fn path_inside<'a>(&self, absolute: &'a Path) -> Option<&'a Path> {
        absolute.strip_prefix(self.real_path()).ok()
    }

    pub(crate) fn link_policy(&self) -> LinkPolicy {
        self.link_policy
    }

    pub(super) fn open_file(
        &self,
        inside: &Path,
        links: LinkPolicy,
    ) -> Result<Box<dyn FileHandle>, SourceError> {
        self.directory.open(inside, links)
    }

    pub(super) fn open_descriptor(
        &self,
        inside: &Path,
        flags: OFlags,
        links: LinkPolicy,
    ) -> Option<OwnedFd> {
        self.directory.open_descriptor(inside, flags, links)
    }

    /// Follows all links of a path by name, whether its target exists or not; `None` if it leads out.
    pub fn resolve_by_name(&self, inside: &Path) -> Option<ResolvedPath> {
        self.directory.resolve_by_name(inside)
    }

    /// Metadata of a path, links followed. The mode permits no more than the directories above the link's target
    /// do.
    pub fn metadata(&self, inside: &Path) -> Result<FileMetadata, SourceError> {
        self.directory.metadata(inside, MetadataQuery::Current)
    }

    /// Metadata of a path, links followed, as it was last seen. Listings use it, so that they never wait for another
    /// filesystem that is mounted in the directory.
    pub fn cached_metadata(&self, inside: &Path) -> Result<FileMetadata, SourceError> {
        self.directory.metadata(inside, MetadataQuery::Cached)
    }

    /// Metadata of a path; a link at its end is not followed.
    pub fn link_metadata(&self, inside: &Path) -> Result<FileMetadata, SourceError> {
        self.directory.metadata(inside, MetadataQuery::Link)
    }

    /// The target of a link, as the link stores it.
    pub fn link_target(&self, inside: &Path) -> Result<PathBuf, SourceError> {
        self.directory.link_target(inside)
    }

    /// Threads that read headers of its files at once.
    pub fn reader_threads(&self) -> usize {
        self.directory.reader_threads()
    }

    /// Whether the directory was removed since it was opened: it can never have entries again, even if another is
    /// created under its name.
    pub fn is_removed(&self) -> bool {
        self.directory.is_removed()
    }

    /// Total and free space of the root's filesystem.
    pub fn filesystem_stats(&self) -> Result<StatVfs, SourceError> {
        self.directory.filesystem_stats()
    }

    /// The descriptor, if it is a directory of this machine.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.directory.descriptor()
    }

    /// The entries of a directory inside the root, sorted by name.
    pub fn entries(&self, inside: &Path) -> Result<Vec<DirEntry>, SourceError> {
        let mut entries = self.directory.entries(inside)?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// The names in a directory that can be checkpoint files: regular files, links to such, and dangling links,
    /// which opening reports. A name that is not UTF-8 cannot be a checkpoint's.
    pub fn file_names(&self, inside: &Path) -> Result<Vec<String>, SourceError> {
        let is_file = |entry: &DirEntry| self.may_be_file(inside, &entry.name, entry.kind);
        let entries = self.entries(inside)?.into_iter().filter(is_file);
        Ok(entries.filter_map(|entry| entry.name.into_string().ok()).collect())
    }

    /// The names in a directory that can be checkpoint files; `None` if its server lists no directories.
    pub fn listed_file_names(&self, inside: &Path) -> Result<Option<Vec<String>>, SourceError> {
        match self.file_names(inside) {
            Err(error) if error.is_unlisted() => Ok(None),
            names => names.map(Some),
        }
    }

    /// Whether a name of a kind in a directory is a file or a link to one. A dangling link counts as a file that
    /// cannot be opened.
    pub fn may_be_file(&self, directory: &Path, name: &OsStr, kind: FileKind) -> bool {
        match kind {
            FileKind::File => true,
            FileKind::Link => {
                let target = self.cached_metadata(&directory.join(name));
                target.map_or(true, |target| target.kind == FileKind::File)
            }
            _ => false,
        }
    }
}

/// The directory part of a path, and the name in it: of a web server's URL, without percent-encoding.
pub fn split_parent(path: &Path) -> Result<(Cow<'_, Path>, Cow<'_, OsStr>), SourceError> {
    let (parent, name) = match split_url_parent(path) {
        Some((parent, name)) => (Cow::Owned(parent), name),
        None => {
            let missing = || SourceError::Missing { path: path.to_path_buf() };
            let name = path.file_name().ok_or_else(missing)?;
            (Cow::Borrowed(path.parent().unwrap_or(Path::new(""))), name)
        }
    };
    let name = match SourceUrl::parse(path) {
        Some(Ok(url)) => {
            let name = url.key.rsplit('/').next().unwrap_or_default();
            Cow::Owned(OsString::from(name))
        }
        _ => Cow::Borrowed(name),
    };
    Ok((parent, name))
}

/// The directory of a URL.
#[cfg(feature = "remote")]
fn remote_directory(
    typed: &Path,
    url: Result<SourceUrl, UrlError>,
) -> Result<Box<dyn SourceDirectory>, SourceError> {
    Ok(Box::new(open_remote(typed, url)?))
}

#[cfg(not(feature = "remote"))]
fn remote_directory(
    typed: &Path,
    _: Result<SourceUrl, UrlError>,
) -> Result<Box<dyn SourceDirectory>, SourceError> {
    Err(SourceError::NoRemote { path: typed.to_path_buf() })
}

#[cfg(feature = "remote")]
fn open_remote(
    typed: &Path,
    url: Result<SourceUrl, UrlError>,
) -> Result<super::remote::RemoteDirectory, SourceError> {
    super::remote::RemoteDirectory::open(typed, url)
}

/// Whether a URL leads to a directory.
fn is_remote_directory(
    typed: &Path,
    url: Result<SourceUrl, UrlError>,
) -> Result<bool, SourceError> {
    #[cfg(feature = "remote")]
    return open_remote(typed, url)?.is_directory();
    #[cfg(not(feature = "remote"))]
    remote_directory(typed, url).map(|_| false)
}

/// Whether a path leads to a directory, links followed.
pub fn is_directory(path: &Path) -> Result<bool, SourceError> {
    if let Some(url) = SourceUrl::parse(path) {
        return is_remote_directory(path, url);
    }
    match statat(CWD, path, AtFlags::empty()) {
        Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
        Err(e) => Err(SourceError::io(path, "look at it", e)),
    }
}
