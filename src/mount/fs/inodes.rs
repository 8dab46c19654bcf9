//! Inodes: which number stands for what, as long as the kernel remembers it.
//!
//! A number is a hash of what it stands for, so that the same thing has the same number again after
//! it was forgotten. New content is another thing: a virtual file by its identity, a file by its device,
//! inode and birth. The kernel remembers every name that was looked up, so each must take little memory.

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

use super::node_path::InodePath;

/// The number of the mount's own directory, by the protocol.
pub const ROOT: u64 = 1;

/// What a number stands for.
#[derive(Clone, Debug)]
pub struct Inode {
    /// The path in the view where it was last seen.
    pub path: InodePath,
    pub kind: InodeKind,
    pub attributes: LastAttributes,
}

#[derive(Clone, Debug)]
pub enum InodeKind {
    /// A file, directory or other thing of the source.
    Source,
    VirtualFile(Arc<ShownFile>),
    /// A link, and where it leads; nothing where following it is refused.
    Link(Option<Box<PathBuf>>),
}

/// Attributes of a file when it was last seen: those that identify it, and those that answer `getattr`
/// once it is gone.
#[derive(Clone, Copy, Debug)]
pub struct LastAttributes {
    pub dev: u64,
    pub ino: u64,
    pub size: u64,
    pub mtime: Timestamp,
    pub born: Option<Timestamp>,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub kind: FileKind,
}

/// Seconds and nanoseconds since 1970. Packed, so that a node takes little memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(Rust, packed(4))]
pub struct Timestamp(i64, u32);

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Timestamp {
        let whole = |since: Duration| i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
        match time.duration_since(UNIX_EPOCH) {
            Ok(since) => Timestamp(whole(since), since.subsec_nanos()),
            Err(before) => {
                let before = before.duration();
                let nanos = before.subsec_nanos();
                let borrow = i64::from(nanos > 0);
                Timestamp(
                    -whole(before) - borrow,
                    if nanos > 0 { 1_000_000_000 - nanos } else { 0 },
                )
            }
        }
    }
}

impl From<Timestamp> for SystemTime {
    fn from(Timestamp(whole, nanos): Timestamp) -> SystemTime {
        let by = Duration::from_secs(whole.unsigned_abs());
        let base = if whole < 0 { UNIX_EPOCH.checked_sub(by) } else { UNIX_EPOCH.checked_add(by) };
        base.and_then(|base| base.checked_add(Duration::from_nanos(nanos.into())))
            .unwrap_or(UNIX_EPOCH)
    }
}

impl From<&FileMetadata> for LastAttributes {
    fn from(found: &FileMetadata) -> LastAttributes {
        let &FileMetadata { dev, ino, size, links, uid, gid, mode, kind, .. } = found;
        let (mtime, born) = (found.mtime.into(), found.btime.map(Timestamp::from));
        LastAttributes { dev, ino, size, mtime, born, links, uid, gid, mode, kind }
    }
}

impl LastAttributes {
    /// Whether the file had this identity when it was last seen.
    pub fn has_identity(&self, identity: &FileIdentity) -> bool {
        let FileIdentity { dev, ino, size, mtime, mtime_nsec } = *identity;
        (self.dev, self.ino, self.size, self.mtime)
            == (dev, ino, size, Timestamp(mtime, mtime_nsec))
    }

    /// Whether a name still stands for the same file; any directory there is the same one.
    pub fn is_same_file(&self, now: &LastAttributes) -> bool {
        let file = |seen: &LastAttributes| (seen.dev, seen.ino, seen.born);
        let are_directories = now.kind == FileKind::Directory && self.kind == FileKind::Directory;
        are_directories || file(now) == file(self)
    }
}

impl Inode {
    pub fn new(path: InodePath, entry: &ViewEntry) -> Inode {
        let what = match entry {
            ViewEntry::VirtualFile(shown) | ViewEntry::Index(shown) => {
                InodeKind::VirtualFile(Arc::clone(shown))
            }
            ViewEntry::Source(_) => InodeKind::Source,
            ViewEntry::Link(_, target) => InodeKind::Link(target.clone().map(Box::new)),
        };
        Inode { path, kind: what, attributes: entry.metadata().into() }
    }

    /// What identifies it among all nodes, and gives it a number of its own.
    fn key(&self) -> impl Hash + Eq {
        let LastAttributes { dev, ino, born, kind, .. } = self.attributes;
        match &self.kind {
            InodeKind::VirtualFile(shown) => InodeKey::VirtualFile(&self.path, shown.identity()),
            InodeKind::Source if kind == FileKind::File => InodeKey::File { dev, ino, born },
            _ => InodeKey::Path(&self.path, kind),
        }
    }

    fn preferred_number(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.key().hash(&mut hasher);
        // 0 is no number and 1 is taken.
        hasher.finish().max(ROOT + 1)
    }
}

#[derive(PartialEq, Eq, Hash)]
enum InodeKey<'a> {
    Path(&'a InodePath, FileKind),
    File { dev: u64, ino: u64, born: Option<Timestamp> },
    VirtualFile(&'a InodePath, crate::virtual_file::Digest),
}

/// The numbers that the kernel knows.
#[derive(Debug)]
pub struct InodeTable {
    known: Mutex<HashMap<u64, InodeEntry>>,
    /// Directories of the latest lookups, so that nodes in one directory share its path.
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
        let node =
            Inode { path: InodePath::root(), kind: InodeKind::Source, attributes: root.into() };
        let known = InodeEntry { inode: Arc::new(node), lookups: 1 };
        let directories = Mutex::new(LruCache::new(MAX_SHARED_DIRECTORIES));
        InodeTable { known: Mutex::new(HashMap::from([(ROOT, known)])), directories }
    }

    /// What a number stands for. Nothing that the kernel does not know is asked for.
    pub fn get(&self, number: u64) -> Option<Arc<Inode>> {
        Some(Arc::clone(&lock(&self.known).get(&number)?.inode))
    }

    /// The path of a name that was looked up in a directory.
    pub fn child_path(&self, number: u64, directory: &Path, name: &OsStr) -> InodePath {
        let mut directories = lock(&self.directories);
        let known = directories.get(&number).filter(|known| ***known == *directory).cloned();
        let directory = known.unwrap_or_else(|| {
            let new: Arc<Path> = directory.into();
            directories.put(number, Arc::clone(&new));
            new
        });
        InodePath::new(&directory, name)
    }

    /// The number of a thing, which the kernel is about to learn.
    pub fn add_lookup(&self, node: Inode) -> u64 {
        let mut known = lock(&self.known);
        let number = free_number(&known, &node);
        let node = Arc::new(node);
        let entry =
            known.entry(number).or_insert(InodeEntry { inode: Arc::clone(&node), lookups: 0 });
        entry.lookups += 1;
        entry.inode = node;
        number
    }

    /// The number that a thing has or would have.
    pub fn number_for(&self, node: &Inode) -> u64 {
        free_number(&lock(&self.known), node)
    }

    /// What it says of itself now, for those who ask for it by number.
    pub fn update(&self, number: u64, node: Inode) {
        if let Some(known) = lock(&self.known).get_mut(&number) {
            known.inode = Arc::new(node);
        }
    }

    /// Takes back `times` lookups of a number. Returns whether the kernel has forgotten it altogether.
    pub fn forget(&self, number: u64, times: u64) -> bool {
        let mut known = lock(&self.known);
        let Some(entry) = known.get_mut(&number).filter(|_| number != ROOT) else { return false };
        entry.lookups = entry.lookups.saturating_sub(times);
        let is_forgotten = entry.lookups == 0;
        if is_forgotten {
            known.remove(&number);
            let left = known.len();
            if left < known.capacity() / SHRINK_FACTOR {
                known.shrink_to(2 * left);
            }
        }
        is_forgotten
    }
}

/// The table shrinks once it has room for this many times its entries.
const SHRINK_FACTOR: usize = 8;

/// The number of a node: its hash, or the next free number if another node has that.
fn free_number(known: &HashMap<u64, InodeEntry>, node: &Inode) -> u64 {
    let mut number = node.preferred_number();
    while known.get(&number).is_some_and(|other| other.inode.key() != node.key()) {
        number = number.wrapping_add(1).max(ROOT + 1);
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_takes_little_memory() {
        assert!(size_of::<Inode>() <= 120, "{}", size_of::<Inode>());
    }

    #[test]
    fn timestamps_round_trip() {
        let times = [(0, 0), (1_700_000_000, 123_456_789), (-1, 0), (-1, 999_999_999), (-5, 1)];
        for (whole, nanos) in times {
            let time = SystemTime::from(Timestamp(whole, nanos));
            assert_eq!(Timestamp::from(time), Timestamp(whole, nanos));
        }
    }
}
