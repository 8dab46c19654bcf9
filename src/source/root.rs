//! A directory that bounds what may be opened: names inside it resolve beneath it or not at all.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, StatxFlags, makedev};
use rustix::io::Errno;

use super::location::FileLocation;
use super::{FileKind, FileMetadata, OpenFile, SourceError, beneath};

/// Whether a folder is called as a hub cache calls a repository's.
pub fn is_hub_repository(name: &OsStr) -> bool {
    const KINDS: [&[u8]; 3] = [b"models--", b"datasets--", b"spaces--"];
    KINDS.iter().any(|kind| name.as_encoded_bytes().starts_with(kind))
}

/// Where a symbolic link may lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkPolicy {
    /// Only to what lies beneath the root.
    Inside,
    /// Anywhere: the user said so, or typed this very path.
    Anywhere,
}

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The name.
    pub name: OsString,
    /// What it stands for: links are not followed.
    pub kind: FileKind,
}

/// Where a path comes out, all links followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedPath {
    /// The way there from the root, without links.
    pub path: PathBuf,
    /// The links on the way, each as the way to it.
    pub links: Vec<PathBuf>,
}

/// Links that are followed in one path, as many as the kernel follows.
const MAX_LINK_COUNT: usize = 40;

/// An opened directory, and the rule for links inside it.
#[derive(Debug)]
pub struct Root {
    dir: OwnedFd,
    /// As people see it.
    path: PathBuf,
    /// As the system sees it, absolute and without links.
    real_path: PathBuf,
    /// As it was typed, made absolute: absolute links inside may lead through that name.
    typed_path: PathBuf,
    link_policy: LinkPolicy,
    /// The device of a filesystem that shows this very root: there is no end to that.
    excluded_device: OnceLock<u64>,
}

impl Root {
    /// From now on nothing on this device is opened: it shows what is in this root.
    pub fn exclude_device(&self, device: u64) {
        // One filesystem shows it, as long as it lives.
        let _ = self.excluded_device.set(device);
    }

    /// The root for a directory that the user typed, and the way from it to that directory.
    ///
    /// A snapshot of a hub cache is made of links into `../../blobs`: inside a repository's folder,
    /// `models--org--name`, that folder is the root, so that its own links stay inside.
    pub fn for_directory(
        typed: &Path,
        links: LinkPolicy,
    ) -> Result<(Arc<Root>, PathBuf), SourceError> {
        let typed = if typed.as_os_str().is_empty() { Path::new(".") } else { typed };
        let real =
            std::fs::canonicalize(typed).map_err(|e| SourceError::io(typed, "find it", e))?;
        let in_hub = real.ancestors().skip(1).find(|folder| {
            folder.file_name().is_some_and(is_hub_repository) && folder.join("blobs").is_dir()
        });
        let path = in_hub.unwrap_or(&real);
        let dir = rustix::fs::open(
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| SourceError::io(path, "open it", e))?;
        let way = real.strip_prefix(path).unwrap_or(Path::new("")).to_path_buf();
        // What people see is the path as they typed it, unless the root lies above it.
        let shown = if way.as_os_str().is_empty() { typed } else { path };
        let typed = std::path::absolute(shown).unwrap_or_else(|_| path.to_path_buf());
        let (path, real, shown_by) = (shown.to_path_buf(), path.to_path_buf(), OnceLock::new());
        Ok((
            Arc::new(Root {
                dir,
                path,
                real_path: real,
                typed_path: typed,
                link_policy: links,
                excluded_device: shown_by,
            }),
            way,
        ))
    }

    /// The root that another process holds open, which a path need not lead to any more.
    pub fn from_process_fd(
        pid: u32,
        descriptor: i32,
        links: LinkPolicy,
    ) -> Result<Arc<Root>, SourceError> {
        let held = PathBuf::from(format!("/proc/{pid}/fd/{descriptor}"));
        let named = |e| SourceError::io(&held, "open what the daemon has open", e);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&held, flags, Mode::empty()).map_err(named)?;
        // The name that it had when it was opened: links within it say that.
        let real =
            std::fs::read_link(&held).map_err(|e| SourceError::io(&held, "find its name", e))?;
        let (path, typed, shown_by) = (real.clone(), real.clone(), OnceLock::new());
        Ok(Arc::new(Root {
            dir,
            path,
            real_path: real,
            typed_path: typed,
            link_policy: links,
            excluded_device: shown_by,
        }))
    }

    /// The path to show to people.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a regular file that somebody other than the user named.
    pub fn open(self: &Arc<Self>, inside: &Path) -> Result<OpenFile, SourceError> {
        self.open_with_policy(inside, self.link_policy)
    }

    /// Opens the regular file whose path the user typed: where its links lead is theirs to say.
    pub fn open_user_path(self: &Arc<Self>, inside: &Path) -> Result<OpenFile, SourceError> {
        self.open_with_policy(inside, LinkPolicy::Anywhere)
    }

    fn open_with_policy(
        self: &Arc<Self>,
        inside: &Path,
        links: LinkPolicy,
    ) -> Result<OpenFile, SourceError> {
        OpenFile::open(FileLocation::InRoot {
            root: Arc::clone(self),
            path: inside.to_path_buf(),
            links,
        })
    }

    pub(super) fn resolve(
        &self,
        inside: &Path,
        flags: OFlags,
        links: LinkPolicy,
    ) -> Result<OwnedFd, SourceError> {
        let flags = flags | OFlags::CLOEXEC;
        let inside = if inside.as_os_str().is_empty() { Path::new(".") } else { inside };
        let open = |path: &Path, resolve| beneath::open(&self.dir, path, flags, resolve);
        let shown = || self.path.join(inside);
        if links == LinkPolicy::Anywhere {
            // Whatever is opened is looked at first, which asks nobody: its filesystem may be waiting for us.
            let found = open(inside, ResolveFlags::empty());
            return match found {
                Ok(fd) if self.is_on_excluded_device(&fd) => {
                    Err(SourceError::OutsideRoot { path: shown(), root: self.path.clone() })
                }
                found => found.map_err(|e| SourceError::io(&shown(), "open it", e)),
            };
        }
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        match open(inside, beneath) {
            Ok(fd) => Ok(fd),
            // An absolute link may still lead to a place inside: follow it by name, then resolve
            // what it leads to beneath the root like any other.
            Err(Errno::XDEV) => {
                let outside =
                    || SourceError::OutsideRoot { path: shown(), root: self.path.clone() };
                let way = match (flags.contains(OFlags::NOFOLLOW), inside.file_name()) {
                    (true, Some(name)) => self
                        .follow_links(inside.parent().unwrap_or(Path::new("")))
                        .map(|w| w.join(name)),
                    _ => self.follow_links(inside),
                };
                let way = way.ok_or_else(outside)?;
                let flags = flags | OFlags::NOFOLLOW;
                match beneath::open(&self.dir, &way, flags, beneath) {
                    Ok(fd) => Ok(fd),
                    // It leads inside, and to nothing there.
                    Err(Errno::NOENT) => Err(SourceError::Missing { path: shown() }),
                    Err(_) => Err(outside()),
                }
            }
            Err(e) => Err(SourceError::io(&shown(), "open it", e)),
        }
    }

    /// The way from the root to what a path stands for, all links followed by name; nothing if one
    /// leads out. Nothing on this way is opened but links, so that a filesystem mounted over the
    /// root is not asked.
    fn follow_links(&self, inside: &Path) -> Option<PathBuf> {
        self.walk_links(inside, &mut Vec::new())
    }

    /// The same, and the ways of the links that were followed.
    fn walk_links(&self, inside: &Path, passed: &mut Vec<PathBuf>) -> Option<PathBuf> {
        let mut way = PathBuf::new();
        let mut rest: Vec<OsString> = Vec::new();
        let push = |rest: &mut Vec<OsString>, path: &Path| {
            rest.extend(path.components().rev().map(|part| part.as_os_str().to_owned()));
        };
        push(&mut rest, inside);
        while let Some(part) = rest.pop() {
            match part.as_bytes() {
                b"." => continue,
                b".." if way.pop() => continue,
                b".." => return None,
                _ => way.push(&part),
            }
            // What is no link, or not there, is for the opening to say.
            let Ok(target) = beneath::read_link(&self.dir, &way) else { continue };
            passed.push(way.clone());
            if passed.len() > MAX_LINK_COUNT {
                return None;
            }
            if target.is_absolute() {
                let roots = [&self.real_path, &self.typed_path];
                let inside = roots.into_iter().find_map(|root| target.strip_prefix(root).ok())?;
                push(&mut rest, inside);
                way = PathBuf::new();
            } else {
                push(&mut rest, &target);
                way.pop();
            }
        }
        Some(if way.as_os_str().is_empty() { PathBuf::from(".") } else { way })
    }

    /// Where in the root a path comes out, whether something is there or not; nothing if it leads out.
    pub fn resolve_by_name(&self, inside: &Path) -> Option<ResolvedPath> {
        let mut passed = Vec::new();
        let way = self.walk_links(inside, &mut passed)?;
        let way = way.strip_prefix(".").map(Path::to_path_buf).unwrap_or(way);
        Some(ResolvedPath { path: way, links: passed })
    }

    /// What the system says of what a path stands for, links followed. At the end of a link nobody is
    /// permitted more than by the way that the link stands for.
    pub fn metadata(&self, inside: &Path) -> Result<FileMetadata, SourceError> {
        let shown = self.path.join(inside);
        let fd = self.resolve(inside, OFlags::PATH, self.link_policy)?;
        let mut attributes = FileMetadata::of_fd(&fd, &shown)?;
        if self.is_link(inside) {
            let end = match fd_path(&fd) {
                // `/proc` does not tell a path of this length.
                Err(e) if Errno::from_io_error(&e) == Some(Errno::NAMETOOLONG) => {
                    self.follow_links(inside).map(|way| self.current_path().join(way)).ok_or(e)
                }
                end => end,
            };
            let end = end.map_err(|e| SourceError::io(&shown, "find where it leads", e))?;
            self.restrict_mode(&mut attributes, &end);
        }
        Ok(attributes)
    }

    /// Whether it lies on a filesystem that shows this root. Its own word for that is not asked for.
    fn is_on_excluded_device(&self, fd: &OwnedFd) -> bool {
        let Some(device) = self.excluded_device.get() else { return false };
        let known = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(fd, "", known, StatxFlags::TYPE);
        stat.is_ok_and(|stat| makedev(stat.stx_dev_major, stat.stx_dev_minor) == *device)
    }

    fn is_link(&self, inside: &Path) -> bool {
        beneath::read_link(&self.dir, inside).is_ok()
    }

    /// The current path of the root, from `/proc`; the path at its opening if that fails.
    fn current_path(&self) -> PathBuf {
        fd_path(&self.dir).unwrap_or_else(|_| self.real_path.clone())
    }

    /// Takes from what lies at an absolute path the permissions that those would not have who had to
    /// pass the directories above it: all of them, or those within the root if it lies there, which
    /// are looked at from the root, for a filesystem may be mounted over it.
    fn restrict_mode(&self, attributes: &mut FileMetadata, end: &Path) {
        let (way, from) = match end.strip_prefix(self.current_path()) {
            Ok(way) => (way, self.dir.as_fd()),
            Err(_) => (end, CWD),
        };
        let above = way.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
        for folder in above {
            // What cannot be looked at lets nobody through.
            let folder = beneath::stat(from, folder).ok();
            attributes.restrict_mode(folder.map(|stat| (stat.st_uid, stat.st_gid, stat.st_mode)));
        }
    }

    /// The same, as the system last knew it: what a listing goes by, so that it waits for no other
    /// filesystem that happens to be mounted in the directory.
    pub fn cached_metadata(&self, inside: &Path) -> Result<FileMetadata, SourceError> {
        let fd = self.resolve(inside, OFlags::PATH, self.link_policy)?;
        FileMetadata::cached_of_fd(fd, &self.path.join(inside))
    }

    /// Whether the directory was removed since it was opened: nothing will ever be in it again,
    /// whatever is made under its name.
    pub fn is_removed(&self) -> bool {
        FileMetadata::cached_of_fd(&self.dir, &self.path).is_ok_and(|found| found.links == 0)
    }

    /// What the system says of the link itself if it is one.
    pub fn link_metadata(&self, inside: &Path) -> Result<FileMetadata, SourceError> {
        let fd = self.resolve(inside, OFlags::PATH | OFlags::NOFOLLOW, self.link_policy)?;
        FileMetadata::of_fd(fd, &self.path.join(inside))
    }

    /// What a link says.
    pub fn link_target(&self, inside: &Path) -> Result<PathBuf, SourceError> {
        let shown = || self.path.join(inside);
        let fd = self.resolve(inside, OFlags::PATH | OFlags::NOFOLLOW, self.link_policy)?;
        let target = rustix::fs::readlinkat(fd, "", Vec::new())
            .map_err(|e| SourceError::io(&shown(), "read the link", e))?;
        Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
    }

    /// Where the root lies, absolute and without links.
    pub fn real_path(&self) -> &Path {
        &self.real_path
    }

    /// How full the filesystem is that a path lies on.
    pub fn filesystem_stats(&self) -> Result<rustix::fs::StatVfs, SourceError> {
        rustix::fs::fstatvfs(&self.dir)
            .map_err(|e| SourceError::io(&self.path, "look at its space", e))
    }

    /// The names in a directory of this root, sorted.
    pub fn entries(&self, inside: &Path) -> Result<Vec<DirEntry>, SourceError> {
        let shown = self.path.join(inside);
        let fd = self.resolve(inside, OFlags::RDONLY | OFlags::DIRECTORY, self.link_policy)?;
        let mut dir = Dir::read_from(&fd).map_err(|e| SourceError::io(&shown, "list it", e))?;
        let mut entries = Vec::new();
        for entry in &mut dir {
            let entry = entry.map_err(|e| SourceError::io(&shown, "list it", e))?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
                    match rustix::fs::statx(&fd, name, flags, StatxFlags::TYPE) {
                        Ok(stat) => FileType::from_raw_mode(u32::from(stat.stx_mode)),
                        // Gone since it was listed.
                        Err(_) => continue,
                    }
                }
                kind => kind,
            };
            entries.push(DirEntry { name: name.to_owned(), kind: kind.into() });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// The names of a directory that can be files: regular ones, and links to such or to nothing,
    /// which opening says. Names that are no text cannot be a checkpoint's.
    pub fn file_names(&self, inside: &Path) -> Result<Vec<String>, SourceError> {
        let is_file = |entry: &DirEntry| match entry.kind {
            FileKind::File => true,
            FileKind::Link => {
                let target = self.cached_metadata(&inside.join(&entry.name));
                target.map_or(true, |target| target.kind == FileKind::File)
            }
            _ => false,
        };
        let entries = self.entries(inside)?.into_iter().filter(is_file);
        Ok(entries.filter_map(|entry| entry.name.into_string().ok()).collect())
    }
}

/// Where an open file or directory lies.
fn fd_path(fd: &OwnedFd) -> std::io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

/// Whether the path names a directory, links followed.
pub fn is_directory(path: &Path) -> Result<bool, SourceError> {
    match rustix::fs::statat(CWD, path, AtFlags::empty()) {
        Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
        Err(e) => Err(SourceError::io(path, "look at it", e)),
    }
}
