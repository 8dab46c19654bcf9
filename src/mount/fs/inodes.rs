//! Inodes: what each number stands for, as long as the kernel remembers it.
//!
//! A number is a hash of what identifies the inode, so a forgotten inode gets the same number again. New content is a
//! new inode: a virtual file is identified by its identity hash, a file by its device, inode and birth time. The kernel
//! remembers every name that was looked up, perhaps millions, so an inode must take little memory.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lru::LruCache;

use crate::source::{FileIdentity, FileKind, FileMetadata};
use crate::threads::lock;
use crate::view::{ShownFile, ViewEntry};

/// The number of the mount's root directory, by the protocol.
pub const ROOT: u64 = 1;

/// A path in the view: a name in a directory.
///
/// It owns its name: a name that vanished must not keep all names of its listing in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InodePath {
    /// `None` for the root.
    directory: Option<Arc<Path>>,
    name: Box<OsStr>,
}

impl InodePath {
    /// The path of the root.
    pub fn root() -> InodePath {
        InodePath { directory: None, name: Box::default() }
    }

    pub fn new(directory: &Arc<Path>, name: &OsStr) -> InodePath {
        InodePath { directory: Some(Arc::clone(directory)), name: name.into() }
    }

    /// The directory and the name; `None` for the root.
    pub fn parts(&self) -> Option<(&Path, &OsStr)> {
        Some((self.directory.as_deref()?, &self.name))
    }

    pub fn to_path(&self) -> PathBuf {
        self.parts().map_or_else(PathBuf::new, |(directory, name)| directory.join(name))
    }
}

/// What an inode number stands for.
#[derive(Clone, Debug)]
pub struct Inode {
    /// Its latest path in the view.
    pub path: InodePath,
    pub kind: InodeKind,
    pub attributes: LastAttributes,
}

#[derive(Clone, Debug)]
pub enum InodeKind {
    /// A file, directory or other entry of the source.
    Source,
    VirtualFile(Arc<ShownFile>),
    /// A link and its target; `None` if following it is refused.
    Link(Option<Box<PathBuf>>),
}

/// The latest known attributes of a file: those that identify it, and those that answer `getattr` once it is gone.
#[derive(Clone, Copy, Debug)]
pub struct LastAttributes {
    pub dev: u64,
    pub ino: u64,
    pub size: u64,
    pub mtime: Timestamp,
    pub btime: Option<Timestamp>,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub kind: FileKind,
}

/// Seconds and nanoseconds since 1970. Packed, so that an inode takes little memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(Rust, packed(4))]
pub struct Timestamp(i64, u32);

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Timestamp {
        let seconds = |since: Duration| i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
        match time.duration_since(UNIX_EPOCH) {
            Ok(since) => Timestamp(seconds(since), since.subsec_nanos()),
            Err(before) => {
                let before = before.duration();
                let nanos = before.subsec_nanos();
                let borrow = i64::from(nanos > 0);
                Timestamp(
                    -seconds(before) - borrow,
                    if nanos > 0 { 1_000_000_000 - nanos } else { 0 },
                )
            }
        }
    }
}

impl From<Timestamp> for SystemTime {
    fn from(Timestamp(seconds, nanos): Timestamp) -> SystemTime {
        let by = Duration::from_secs(seconds.unsigned_abs());
        let base =
            if seconds < 0 { UNIX_EPOCH.checked_sub(by) } else { UNIX_EPOCH.checked_add(by) };
        base.and_then(|base| base.checked_add(Duration::from_nanos(nanos.into())))
            .unwrap_or(UNIX_EPOCH)
    }
}

impl From<&FileMetadata> for LastAttributes {
    fn from(metadata: &FileMetadata) -> LastAttributes {
        let &FileMetadata { dev, ino, size, links, uid, gid, mode, kind, .. } = metadata;
        let (mtime, btime) = (metadata.mtime.into(), metadata.btime.map(Timestamp::from));
        LastAttributes { dev, ino, size, mtime, btime, links, uid, gid, mode, kind }
    }
}

impl LastAttributes {
    /// Whether a file still has this identity.
    pub fn has_identity(&self, identity: &FileIdentity) -> bool {
        let FileIdentity { dev, ino, size, mtime, mtime_nsec } = *identity;
        (self.dev, self.ino, self.size, self.mtime)
            == (dev, ino, size, Timestamp(mtime, mtime_nsec))
    }

    /// Whether a name still stands for the same file. Any directory at its path counts as the same.
    pub fn is_same_file(&self, now: &LastAttributes) -> bool {
        let file = |last: &LastAttributes| (last.dev, last.ino, last.btime);
        let are_directories = now.kind == FileKind::Directory && self.kind == FileKind::Directory;
        are_directories || file(now) == file(self)
    }
}

impl Inode {
    pub fn new(path: InodePath, entry: &ViewEntry) -> Inode {
        let kind = match entry {
            ViewEntry::VirtualFile(shown) | ViewEntry::Index(shown) | ViewEntry::Config(shown) => {
                InodeKind::VirtualFile(Arc::clone(shown))
            }
            ViewEntry::Source(_) => InodeKind::Source,
            ViewEntry::Link(_, target) => InodeKind::Link(target.clone().map(Box::new)),
        };
        Inode { path, kind, attributes: entry.metadata().into() }
    }

    /// Identifies it among all inodes, and is hashed for its number.
    fn key(&self) -> impl Hash + Eq {
        let LastAttributes { dev, ino, btime, kind, .. } = self.attributes;
        match &self.kind {
            InodeKind::VirtualFile(shown) => InodeKey::VirtualFile(&self.path, shown.identity()),
            InodeKind::Source if kind == FileKind::File => InodeKey::File { dev, ino, btime },
            _ => InodeKey::Path(&self.path, kind),
        }
    }

    fn preferred_number(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.key().hash(&mut hasher);
        // 0 is no number, and 1 is the root's.
        hasher.finish().max(ROOT + 1)
    }
}

#[derive(PartialEq, Eq, Hash)]
enum InodeKey<'a> {
    Path(&'a InodePath, FileKind),
    File { dev: u64, ino: u64, btime: Option<Timestamp> },
    VirtualFile(&'a InodePath, crate::virtual_file::Digest),
}

/// The inodes that the kernel knows, by number.
#[derive(Debug)]
pub struct InodeTable {
    inodes: Mutex<HashMap<u64, InodeEntry>>,
    /// Directories of the latest lookups, whose inodes share the path.
    directories: Mutex<LruCache<u64, Arc<Path>>>,
}

#[derive(Debug)]
struct InodeEntry {
    inode: Arc<Inode>,
    lookups: u64,
}

/// More directories than programs walk through at once.
const MAX_SHARED_DIRECTORIES: NonZeroUsize = NonZeroUsize::new(256).unwrap();

impl InodeTable {
    pub fn new(root: &FileMetadata) -> InodeTable {
        let inode =
            Inode { path: InodePath::root(), kind: InodeKind::Source, attributes: root.into() };
        let root = InodeEntry { inode: Arc::new(inode), lookups: 1 };
        let directories = Mutex::new(LruCache::new(MAX_SHARED_DIRECTORIES));
        InodeTable { inodes: Mutex::new(HashMap::from([(ROOT, root)])), directories }
    }

    /// The inode of a number; `None` if the kernel does not know it.
    pub fn get(&self, number: u64) -> Option<Arc<Inode>> {
        Some(Arc::clone(&lock(&self.inodes).get(&number)?.inode))
    }

    /// The path of a name that was looked up in the directory of this number.
    pub fn child_path(&self, number: u64, directory: &Path, name: &OsStr) -> InodePath {
        let mut directories = lock(&self.directories);
        let shared = directories.get(&number).filter(|shared| ***shared == *directory).cloned();
        let directory = shared.unwrap_or_else(|| {
            let new: Arc<Path> = directory.into();
            directories.put(number, Arc::clone(&new));
            new
        });
        InodePath::new(&directory, name)
    }

    /// Counts a lookup of an inode, and returns its number, which the kernel is about to learn.
    pub fn add_lookup(&self, inode: Inode) -> u64 {
        let mut inodes = lock(&self.inodes);
        let number = free_number(&inodes, &inode);
        let inode = Arc::new(inode);
        let entry =
            inodes.entry(number).or_insert(InodeEntry { inode: Arc::clone(&inode), lookups: 0 });
        entry.lookups += 1;
        entry.inode = inode;
        number
    }

    /// The number that an inode has, or would get.
    pub fn number_for(&self, inode: &Inode) -> u64 {
        free_number(&lock(&self.inodes), inode)
    }

    /// Replaces the inode of a number by its present state.
    pub fn update(&self, number: u64, inode: Inode) {
        if let Some(entry) = lock(&self.inodes).get_mut(&number) {
            entry.inode = Arc::new(inode);
        }
    }

    /// Takes back `times` lookups of a number. Returns whether the kernel has forgotten it altogether.
    pub fn forget(&self, number: u64, times: u64) -> bool {
        let mut inodes = lock(&self.inodes);
        let Some(entry) = inodes.get_mut(&number).filter(|_| number != ROOT) else { return false };
        entry.lookups = entry.lookups.saturating_sub(times);
        let is_forgotten = entry.lookups == 0;
        if is_forgotten {
            inodes.remove(&number);
            let len = inodes.len();
            if len < inodes.capacity() / SHRINK_FACTOR {
                inodes.shrink_to(2 * len);
            }
        }
        is_forgotten
    }
}

/// The table shrinks once it has room for this many times its entries.
const SHRINK_FACTOR: usize = 8;

/// The number of an inode: its hash, or the next free number if another inode has that.
fn free_number(inodes: &HashMap<u64, InodeEntry>, inode: &Inode) -> u64 {
    let mut number = inode.preferred_number();
    while inodes.get(&number).is_some_and(|other| other.inode.key() != inode.key()) {
        number = number.wrapping_add(1).max(ROOT + 1);
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_takes_little_memory() {
        assert!(size_of::<Inode>() <= 120, "{}", size_of::<Inode>());
    }

    #[test]
    fn timestamps_round_trip() {
        let times = [(0, 0), (1_700_000_000, 123_456_789), (-1, 0), (-1, 999_999_999), (-5, 1)];
        for (seconds, nanos) in times {
            let time = SystemTime::from(Timestamp(seconds, nanos));
            assert_eq!(Timestamp::from(time), Timestamp(seconds, nanos));
        }
    }
}
