//! A directory of this machine that bounds what may be opened: a path inside it resolves beneath it or not at all.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, StatVfs, StatxFlags, makedev,
};
use rustix::io::Errno;

use crate::source::error::SourceError;
use crate::source::file_limit::open_within_limit;
use crate::source::metadata::FileMetadata;
use crate::source::store::{
    DirEntry, FileHandle, LinkPolicy, MetadataQuery, ResolvedPath, SourceDirectory,
};

use super::file::LocalFile;
use super::long_path;

/// Links that are followed in one path, as many as the kernel follows.
const MAX_LINK_COUNT: usize = 40;

/// Whether a folder has the name of a repository in a Hugging Face cache.
pub fn is_hub_repository(name: &OsStr) -> bool {
    const PREFIXES: [&[u8]; 3] = [b"models--", b"datasets--", b"spaces--"];
    PREFIXES.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix))
}

/// An opened directory of this machine, and the policy for links inside it.
#[derive(Debug)]
pub struct LocalDirectory {
    dir: OwnedFd,
    /// The path for messages.
    path: PathBuf,
    /// The absolute path without links.
    real_path: PathBuf,
    /// The path that the user typed, made absolute: absolute links inside may lead through it.
    typed_path: PathBuf,
    link_policy: LinkPolicy,
    /// The device of our own mount of this root. Opening anything there would recurse.
    excluded_device: OnceLock<u64>,
}

impl LocalDirectory {
    /// The root for a directory that the user typed, and the path from the root to that directory.
    ///
    /// A snapshot in a Hugging Face cache consists of links into `../../blobs`. There the root is the repository's
    /// folder (`models--org--name`), so that these links stay inside.
    pub fn open(
        typed: &Path,
        link_policy: LinkPolicy,
    ) -> Result<(LocalDirectory, PathBuf), SourceError> {
        let typed = if typed.as_os_str().is_empty() { Path::new(".") } else { typed };
        let directory =
            std::fs::canonicalize(typed).map_err(|e| SourceError::io(typed, "find it", e))?;
        let repository = directory.ancestors().skip(1).find(|folder| {
            folder.file_name().is_some_and(is_hub_repository) && folder.join("blobs").is_dir()
        });
        let real_path = repository.unwrap_or(&directory);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = open_within_limit(|| rustix::fs::open(real_path, flags, Mode::empty()))
            .map_err(|e| SourceError::io(real_path, "open it", e))?;
        let inside = directory.strip_prefix(real_path).unwrap_or(Path::new("")).to_path_buf();
        // Messages have the path as the user typed it, unless the root is above it.
        let path = if inside.as_os_str().is_empty() { typed } else { real_path };
        let typed_path = std::path::absolute(path).unwrap_or_else(|_| real_path.to_path_buf());
        let root = LocalDirectory {
            dir,
            path: path.to_path_buf(),
            real_path: real_path.to_path_buf(),
            typed_path,
            link_policy,
            excluded_device: OnceLock::new(),
        };
        Ok((root, inside))
    }

    /// The root that another process holds open. Its path may lead elsewhere by now.
    pub fn from_process_fd(
        pid: u32,
        descriptor: i32,
        link_policy: LinkPolicy,
    ) -> Result<LocalDirectory, SourceError> {
        let by_descriptor = PathBuf::from(format!("/proc/{pid}/fd/{descriptor}"));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&by_descriptor, flags, Mode::empty())
            .map_err(|e| SourceError::io(&by_descriptor, "open what the daemon has open", e))?;
        // Its path when it was opened, which absolute links inside may lead through.
        let path = std::fs::read_link(&by_descriptor)
            .map_err(|e| SourceError::io(&by_descriptor, "find its name", e))?;
        Ok(LocalDirectory {
            dir,
            real_path: path.clone(),
            typed_path: path.clone(),
            path,
            link_policy,
            excluded_device: OnceLock::new(),
        })
    }

    /// Opens a path inside the root.
    pub(super) fn resolve(
        &self,
        inside: &Path,
        flags: OFlags,
        links: LinkPolicy,
    ) -> Result<OwnedFd, SourceError> {
        let flags = flags | OFlags::CLOEXEC;
        let inside = if inside.as_os_str().is_empty() { Path::new(".") } else { inside };
        let open = |path: &Path, resolve| long_path::open(&self.dir, path, flags, resolve);
        let display_path = || self.path.join(inside);
        let outside = || SourceError::OutsideRoot { path: display_path(), root: self.path.clone() };
        if links == LinkPolicy::Anywhere {
            // The device is checked before anything else is asked: our own daemon may be waiting for this call.
            return match open(inside, ResolveFlags::empty()) {
                Ok(fd) if self.is_on_excluded_device(&fd) => Err(outside()),
                opened => opened.map_err(|e| SourceError::io(&display_path(), "open it", e)),
            };
        }
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        match open(inside, beneath) {
            Ok(fd) => Ok(fd),
            // An absolute link may still lead to a place inside: follow it by name, then resolve its target
            // beneath the root like any other path.
            Err(Errno::XDEV) => {
                let target = match (flags.contains(OFlags::NOFOLLOW), inside.file_name()) {
                    (true, Some(name)) => self
                        .follow_links(inside.parent().unwrap_or(Path::new("")))
                        .map(|folder| folder.join(name)),
                    _ => self.follow_links(inside),
                };
                let target = target.ok_or_else(outside)?;
                let flags = flags | OFlags::NOFOLLOW;
                match long_path::open(&self.dir, &target, flags, beneath) {
                    Ok(fd) => Ok(fd),
                    // The target would be inside, and does not exist.
                    Err(Errno::NOENT) => Err(SourceError::Missing { path: display_path() }),
                    Err(_) => Err(outside()),
                }
            }
            Err(e) => Err(SourceError::io(&display_path(), "open it", e)),
        }
    }

    /// The path from the root without links; `None` if a link leads out. Only links are opened, so that a
    /// filesystem which is mounted over the root is not asked.
    fn follow_links(&self, inside: &Path) -> Option<PathBuf> {
        self.walk_links(inside, &mut Vec::new())
    }

    /// As `follow_links`; adds the paths of the links to `followed`.
    fn walk_links(&self, inside: &Path, followed: &mut Vec<PathBuf>) -> Option<PathBuf> {
        let mut path = PathBuf::new();
        let mut rest: Vec<OsString> = Vec::new();
        let push = |rest: &mut Vec<OsString>, path: &Path| {
            rest.extend(path.components().rev().map(|part| part.as_os_str().to_owned()));
        };
        push(&mut rest, inside);
        while let Some(part) = rest.pop() {
            match part.as_bytes() {
                b"." => continue,
                b".." if path.pop() => continue,
                b".." => return None,
                _ => path.push(&part),
            }
            // If it is no link, or missing, opening it reports that.
            let Ok(target) = long_path::read_link(&self.dir, &path) else { continue };
            followed.push(path.clone());
            if followed.len() > MAX_LINK_COUNT {
                return None;
            }
            if target.is_absolute() {
                let roots = [&self.real_path, &self.typed_path];
                let inside = roots.into_iter().find_map(|root| target.strip_prefix(root).ok())?;
                push(&mut rest, inside);
                path = PathBuf::new();
            } else {
                push(&mut rest, &target);
                path.pop();
            }
        }
        Some(if path.as_os_str().is_empty() { PathBuf::from(".") } else { path })
    }

    /// Metadata of a path, links followed. The mode permits no more than the directories above the link's target
    /// do.
    fn current_metadata(
        &self,
        inside: &Path,
        display_path: &Path,
    ) -> Result<FileMetadata, SourceError> {
        let fd = self.resolve(inside, OFlags::PATH, self.link_policy)?;
        let mut metadata = FileMetadata::of_fd(&fd, display_path)?;
        if self.is_link(inside) {
            let target = match fd_path(&fd) {
                // `/proc` does not report a path of this length.
                Err(e) if Errno::from_io_error(&e) == Some(Errno::NAMETOOLONG) => {
                    self.follow_links(inside).map(|path| self.current_path().join(path)).ok_or(e)
                }
                target => target,
            };
            let target =
                target.map_err(|e| SourceError::io(display_path, "find where it leads", e))?;
            self.restrict_mode(&mut metadata, &target);
        }
        Ok(metadata)
    }

    /// Whether the device excludes it. Only cached attributes are used: the daemon of that mount is not asked.
    fn is_on_excluded_device(&self, fd: &OwnedFd) -> bool {
        let Some(device) = self.excluded_device.get() else { return false };
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(fd, "", flags, StatxFlags::TYPE);
        stat.is_ok_and(|stat| makedev(stat.stx_dev_major, stat.stx_dev_minor) == *device)
    }

    fn is_link(&self, inside: &Path) -> bool {
        long_path::read_link(&self.dir, inside).is_ok()
    }

    /// The current path of the root, from `/proc`; the path at its opening if that fails.
    fn current_path(&self) -> PathBuf {
        fd_path(&self.dir).unwrap_or_else(|_| self.real_path.clone())
    }

    /// Removes from the mode what the directories above an absolute path deny. Directories inside the root are
    /// looked up from the root, for a filesystem may be mounted over it.
    fn restrict_mode(&self, metadata: &mut FileMetadata, target: &Path) {
        let (path, from) = match target.strip_prefix(self.current_path()) {
            Ok(path) => (path, self.dir.as_fd()),
            Err(_) => (target, CWD),
        };
        let above = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
        for folder in above {
            // A directory without a readable mode denies everything.
            let folder = long_path::stat(from, folder).ok();
            metadata.restrict_mode(folder.map(|stat| (stat.st_uid, stat.st_gid, stat.st_mode)));
        }
    }
}

impl SourceDirectory for LocalDirectory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn real_path(&self) -> &Path {
        &self.real_path
    }

    fn metadata(&self, inside: &Path, query: MetadataQuery) -> Result<FileMetadata, SourceError> {
        let display_path = self.path.join(inside);
        match query {
            MetadataQuery::Current => self.current_metadata(inside, &display_path),
            MetadataQuery::Cached => {
                let fd = self.resolve(inside, OFlags::PATH, self.link_policy)?;
                FileMetadata::cached_of_fd(fd, &display_path)
            }
            MetadataQuery::Link => {
                let flags = OFlags::PATH | OFlags::NOFOLLOW;
                let fd = self.resolve(inside, flags, self.link_policy)?;
                FileMetadata::of_fd(fd, &display_path)
            }
        }
    }

    fn open(&self, inside: &Path, links: LinkPolicy) -> Result<Box<dyn FileHandle>, SourceError> {
        let path = self.path.join(inside);
        let stat = rustix::fs::fstat(self.resolve(inside, OFlags::PATH, links)?)
            .map_err(|e| SourceError::io(&path, "look at it", e))?;
        let open = |flags| self.resolve(inside, flags, links);
        Ok(Box::new(LocalFile::open_checked(path, &stat, open)?))
    }

    fn open_descriptor(&self, inside: &Path, flags: OFlags, links: LinkPolicy) -> Option<OwnedFd> {
        self.resolve(inside, flags, links).ok()
    }

    fn resolve_by_name(&self, inside: &Path) -> Option<ResolvedPath> {
        let mut links = Vec::new();
        let path = self.walk_links(inside, &mut links)?;
        let path = path.strip_prefix(".").map(Path::to_path_buf).unwrap_or(path);
        Some(ResolvedPath { path, links })
    }

    fn exclude_device(&self, device: u64) {
        // One mount shows a root, as long as the root lives.
        let _ = self.excluded_device.set(device);
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.dir.as_fd())
    }

    fn link_target(&self, inside: &Path) -> Result<PathBuf, SourceError> {
        let fd = self.resolve(inside, OFlags::PATH | OFlags::NOFOLLOW, self.link_policy)?;
        let target = rustix::fs::readlinkat(fd, "", Vec::new())
            .map_err(|e| SourceError::io(&self.path.join(inside), "read the link", e))?;
        Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
    }

    fn is_removed(&self) -> bool {
        FileMetadata::cached_of_fd(&self.dir, &self.path).is_ok_and(|found| found.links == 0)
    }

    fn filesystem_stats(&self) -> Result<StatVfs, SourceError> {
        rustix::fs::fstatvfs(&self.dir)
            .map_err(|e| SourceError::io(&self.path, "look at its space", e))
    }

    fn entries(&self, inside: &Path) -> Result<Vec<DirEntry>, SourceError> {
        let list_error = |e| SourceError::io(&self.path.join(inside), "list it", e);
        let fd = self.resolve(inside, OFlags::RDONLY | OFlags::DIRECTORY, self.link_policy)?;
        let mut dir = Dir::read_from(&fd).map_err(list_error)?;
        let mut entries = Vec::new();
        for entry in &mut dir {
            let entry = entry.map_err(list_error)?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
                    match rustix::fs::statx(&fd, name, flags, StatxFlags::TYPE) {
                        Ok(stat) => FileType::from_raw_mode(u32::from(stat.stx_mode)),
                        // Removed since it was listed.
                        Err(_) => continue,
                    }
                }
                kind => kind,
            };
            entries.push(DirEntry { name: name.to_owned(), kind: kind.into() });
        }
        Ok(entries)
    }
}

/// The current path of an open file or directory.
fn fd_path(fd: &OwnedFd) -> std::io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}
