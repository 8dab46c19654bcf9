//! A directory that bounds what may be opened: names inside it resolve beneath it or not at all.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, openat2};
use rustix::io::Errno;

use super::file::require_regular;
use super::{Error, File, Identity, OpenFile};

/// Whether a folder is called as a hub cache calls a repository's.
fn is_hub_repository(name: &OsStr) -> bool {
    const KINDS: [&[u8]; 3] = [b"models--", b"datasets--", b"spaces--"];
    KINDS.iter().any(|kind| name.as_encoded_bytes().starts_with(kind))
}

/// Where a symbolic link may lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Only to what lies beneath the root.
    Inside,
    /// Anywhere: the user said so, or typed this very path.
    Anywhere,
}

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name, when it is valid UTF-8: others cannot be a checkpoint's.
    pub name: String,
    /// Whether it is a regular file, or a link to one or to nothing.
    pub is_file: bool,
}

/// An opened directory, and the rule for links inside it.
#[derive(Debug)]
pub struct Root {
    dir: OwnedFd,
    /// As people see it.
    path: PathBuf,
    /// As the system sees it, absolute and without links.
    real: PathBuf,
    links: Links,
}

impl Root {
    /// The root for a directory that the user typed, and the way from it to that directory.
    ///
    /// A snapshot of a hub cache is made of links into `../../blobs`: there the root is the
    /// repository's folder, `models--org--name`, so that its own links stay inside.
    pub fn around(typed: &Path, links: Links) -> Result<(Arc<Root>, PathBuf), Error> {
        let typed = if typed.as_os_str().is_empty() { Path::new(".") } else { typed };
        let real = std::fs::canonicalize(typed).map_err(|e| Error::io(typed, "find it", e))?;
        let mut path = real.as_path();
        for snapshot in real.ancestors() {
            let Some(snapshots) = snapshot.parent() else {
                break;
            };
            let Some(repository) = snapshots.parent() else {
                break;
            };
            if snapshots.file_name().is_some_and(|n| n == "snapshots")
                && repository.file_name().is_some_and(is_hub_repository)
                && repository.join("blobs").is_dir()
            {
                path = repository;
                break;
            }
        }
        let dir = rustix::fs::open(
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| Error::io(path, "open it", e))?;
        let way = real.strip_prefix(path).unwrap_or(Path::new("")).to_path_buf();
        // What people see is the path as they typed it, unless the root lies above it.
        let shown = if way.as_os_str().is_empty() { typed } else { path };
        let root = Root { dir, path: shown.to_path_buf(), real: path.to_path_buf(), links };
        Ok((Arc::new(root), way))
    }

    /// The path to show to people.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a regular file that somebody other than the user named.
    pub fn open(self: &Arc<Self>, inside: &Path) -> Result<OpenFile, Error> {
        self.open_with(inside, self.links)
    }

    /// Opens the regular file whose path the user typed: where its links lead is theirs to say.
    pub fn open_typed(self: &Arc<Self>, inside: &Path) -> Result<OpenFile, Error> {
        self.open_with(inside, Links::Anywhere)
    }

    fn open_with(self: &Arc<Self>, inside: &Path, links: Links) -> Result<OpenFile, Error> {
        let (fd, stat) = self.open_regular(inside, links)?;
        let identity = Identity::from(&stat);
        let file = File { root: Arc::clone(self), inside: inside.to_path_buf(), links, identity };
        Ok(OpenFile { fd, file: Arc::new(file) })
    }

    /// Opens `inside` for reading if it is a regular file. What it is gets settled before it is
    /// opened in earnest: opening a pipe blocks, and opening a device can do things.
    pub(super) fn open_regular(
        &self,
        inside: &Path,
        links: Links,
    ) -> Result<(OwnedFd, Stat), Error> {
        let shown = self.path.join(inside);
        let probe = self.resolve(inside, OFlags::PATH, links)?;
        let stat = rustix::fs::fstat(&probe).map_err(|e| Error::io(&shown, "look at it", e))?;
        require_regular(&stat, &shown)?;
        let fd = self.resolve(inside, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY, links)?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| Error::io(&shown, "look at it", e))?;
        require_regular(&stat, &shown)?;
        Ok((fd, stat))
    }

    fn resolve(&self, inside: &Path, flags: OFlags, links: Links) -> Result<OwnedFd, Error> {
        let flags = flags | OFlags::CLOEXEC;
        let inside = if inside.as_os_str().is_empty() { Path::new(".") } else { inside };
        let open = |path: &Path, resolve| loop {
            match openat2(&self.dir, path, flags, Mode::empty(), resolve) {
                // The kernel asks for another try when a rename raced with the walk.
                Err(Errno::AGAIN | Errno::INTR) => {}
                answer => return answer,
            }
        };
        let shown = || self.path.join(inside);
        if links == Links::Anywhere {
            return open(inside, ResolveFlags::empty())
                .map_err(|e| Error::io(&shown(), "open it", e));
        }
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        match open(inside, beneath) {
            Ok(fd) => Ok(fd),
            Err(Errno::XDEV) => {
                // An absolute link may still lead to a place inside: follow it by name, then
                // resolve what it leads to beneath the root like any other.
                let outside = || Error::Outside { path: shown(), root: self.path.clone() };
                if inside
                    .components()
                    .any(|c| !matches!(c, Component::Normal(_) | Component::CurDir))
                {
                    return Err(outside());
                }
                let real = std::fs::canonicalize(self.real.join(inside)).map_err(|_| outside())?;
                let way = real.strip_prefix(&self.real).map_err(|_| outside())?;
                open(way, beneath).map_err(|_| outside())
            }
            Err(e) => Err(Error::io(&shown(), "open it", e)),
        }
    }

    /// The names in a directory of this root, sorted.
    pub fn entries(&self, inside: &Path) -> Result<Vec<Entry>, Error> {
        let shown = self.path.join(inside);
        let fd = self.resolve(inside, OFlags::RDONLY | OFlags::DIRECTORY, Links::Anywhere)?;
        let mut dir = Dir::read_from(&fd).map_err(|e| Error::io(&shown, "list it", e))?;
        let mut entries = Vec::new();
        for entry in &mut dir {
            let entry = entry.map_err(|e| Error::io(&shown, "list it", e))?;
            let Ok(name) = entry.file_name().to_str() else {
                continue;
            };
            if name == "." || name == ".." {
                continue;
            }
            let is_file = match entry.file_type() {
                FileType::RegularFile => true,
                // A link that leads nowhere counts: opening it says so.
                FileType::Symlink | FileType::Unknown => {
                    rustix::fs::statat(&fd, name, AtFlags::empty()).map_or(true, |s| {
                        FileType::from_raw_mode(s.st_mode) == FileType::RegularFile
                    })
                }
                _ => false,
            };
            entries.push(Entry { name: name.to_owned(), is_file });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }
}

/// Whether the path names a directory, links followed.
pub fn is_directory(path: &Path) -> Result<bool, Error> {
    match rustix::fs::statat(CWD, path, AtFlags::empty()) {
        Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
        Err(e) => Err(Error::io(path, "look at it", e)),
    }
}
