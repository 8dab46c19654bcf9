//! Inodes: which number stands for what, as long as the kernel remembers it.
//!
//! A number is a hash of what it stands for, so that the same thing has the same number again after
//! it was forgotten. New content is another thing: an image by its identity, a file by its device,
//! inode and birth. The kernel remembers every name that anybody has looked at, so that what is held
//! here of each is kept small.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lru::LruCache;

use crate::source::{Attributes, Identity, Kind};
use crate::threads::lock;
use crate::view::{Entry, Shown};

use super::node_path::NodePath;

/// The number of the mount's own directory, by the protocol.
pub const ROOT: u64 = 1;

/// What a number stands for.
#[derive(Clone, Debug)]
pub struct Node {
    /// Where it was last seen in the view.
    pub path: NodePath,
    pub what: What,
    pub last: LastSeen,
}

#[derive(Clone, Debug)]
pub enum What {
    /// A file, directory or other thing of the source.
    Source,
    Image(Arc<Shown>),
    /// A link, and where it leads; nothing where following it is refused.
    Link(Option<Box<PathBuf>>),
}

/// What a thing said of itself when it was last seen: what tells it from others, and what is to be
/// answered of it once it is gone.
#[derive(Clone, Copy, Debug)]
pub struct LastSeen {
    pub dev: u64,
    pub ino: u64,
    pub size: u64,
    pub mtime: Seconds,
    pub born: Option<Seconds>,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub kind: Kind,
}

/// A time, in seconds and nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(Rust, packed(4))]
pub struct Seconds(i64, u32);

impl From<SystemTime> for Seconds {
    fn from(time: SystemTime) -> Seconds {
        let whole = |since: Duration| i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
        match time.duration_since(UNIX_EPOCH) {
            Ok(since) => Seconds(whole(since), since.subsec_nanos()),
            Err(before) => {
                let before = before.duration();
                let nanos = before.subsec_nanos();
                let borrow = i64::from(nanos > 0);
                Seconds(-whole(before) - borrow, if nanos > 0 { 1_000_000_000 - nanos } else { 0 })
            }
        }
    }
}

impl From<Seconds> for SystemTime {
    fn from(Seconds(whole, nanos): Seconds) -> SystemTime {
        let by = Duration::from_secs(whole.unsigned_abs());
        let base = if whole < 0 { UNIX_EPOCH.checked_sub(by) } else { UNIX_EPOCH.checked_add(by) };
        base.and_then(|base| base.checked_add(Duration::from_nanos(nanos.into())))
            .unwrap_or(UNIX_EPOCH)
    }
}

impl From<&Attributes> for LastSeen {
    fn from(found: &Attributes) -> LastSeen {
        let &Attributes { dev, ino, size, links, uid, gid, mode, kind, .. } = found;
        let (mtime, born) = (found.mtime.into(), found.born.map(Seconds::from));
        LastSeen { dev, ino, size, mtime, born, links, uid, gid, mode, kind }
    }
}

impl LastSeen {
    /// Whether this is the state of a file that was seen.
    pub fn is_state(&self, identity: &Identity) -> bool {
        let Identity { dev, ino, size, mtime, mtime_nsec } = *identity;
        (self.dev, self.ino, self.size, self.mtime) == (dev, ino, size, Seconds(mtime, mtime_nsec))
    }

    /// Whether a name still stands for the same file; any directory there is the same one.
    pub fn is_same(&self, now: &LastSeen) -> bool {
        let file = |seen: &LastSeen| (seen.dev, seen.ino, seen.born);
        let are_directories = now.kind == Kind::Directory && self.kind == Kind::Directory;
        are_directories || file(now) == file(self)
    }
}

impl Node {
    pub fn new(path: NodePath, entry: &Entry) -> Node {
        let what = match entry {
            Entry::Image(shown) | Entry::Index(shown) => What::Image(Arc::clone(shown)),
            Entry::Source(_) => What::Source,
            Entry::Link(_, target) => What::Link(target.clone().map(Box::new)),
        };
        Node { path, what, last: entry.attributes().into() }
    }

    /// What tells it from everything else, so that it has a number of its own.
    fn key(&self) -> impl Hash + Eq {
        let LastSeen { dev, ino, born, kind, .. } = self.last;
        match &self.what {
            What::Image(shown) => Key::Image(&self.path, shown.identity()),
            What::Source if kind == Kind::File => Key::File { dev, ino, born },
            _ => Key::Place(&self.path, kind),
        }
    }

    fn number(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.key().hash(&mut hasher);
        // 0 is no number and 1 is taken.
        hasher.finish().max(ROOT + 1)
    }
}

#[derive(PartialEq, Eq, Hash)]
enum Key<'a> {
    Place(&'a NodePath, Kind),
    File { dev: u64, ino: u64, born: Option<Seconds> },
    Image(&'a NodePath, crate::image::Hash),
}

/// The numbers that the kernel knows.
#[derive(Debug)]
pub struct Nodes {
    known: Mutex<HashMap<u64, Known>>,
    /// The directories in which names were looked up last, so that these share one path.
    directories: Mutex<LruCache<u64, Arc<Path>>>,
}

#[derive(Debug)]
struct Known {
    node: Arc<Node>,
    lookups: u64,
}

/// More directories than programs walk through at once.
const DIRECTORIES: NonZeroUsize = NonZeroUsize::new(256).unwrap();

impl Nodes {
    pub fn new(root: &Attributes) -> Nodes {
        let node = Node { path: NodePath::ROOT, what: What::Source, last: root.into() };
        let known = Known { node: Arc::new(node), lookups: 1 };
        let directories = Mutex::new(LruCache::new(DIRECTORIES));
        Nodes { known: Mutex::new(HashMap::from([(ROOT, known)])), directories }
    }

    /// What a number stands for. Nothing that the kernel does not know is asked for.
    pub fn get(&self, number: u64) -> Option<Arc<Node>> {
        Some(Arc::clone(&lock(&self.known).get(&number)?.node))
    }

    /// The path of a name that was looked up in a directory.
    pub fn path(&self, number: u64, directory: &Path, name: &OsStr) -> NodePath {
        let mut directories = lock(&self.directories);
        let known = directories.get(&number).filter(|known| ***known == *directory).cloned();
        let directory = known.unwrap_or_else(|| {
            let new: Arc<Path> = directory.into();
            directories.put(number, Arc::clone(&new));
            new
        });
        NodePath::single(directory, name)
    }

    /// The number of a thing, which the kernel is about to learn.
    pub fn learn(&self, node: Node) -> u64 {
        let mut known = lock(&self.known);
        let number = number_of(&known, &node);
        let node = Arc::new(node);
        let entry = known.entry(number).or_insert(Known { node: Arc::clone(&node), lookups: 0 });
        entry.lookups += 1;
        entry.node = node;
        number
    }

    /// The number that a thing has or would have.
    pub fn number(&self, node: &Node) -> u64 {
        number_of(&lock(&self.known), node)
    }

    /// What it says of itself now, for those who ask for it by number.
    pub fn update(&self, number: u64, node: Node) {
        if let Some(known) = lock(&self.known).get_mut(&number) {
            known.node = Arc::new(node);
        }
    }

    /// The kernel forgets so many of the times it learned the number; whether it has forgotten it altogether.
    pub fn forget(&self, number: u64, times: u64) -> bool {
        let mut known = lock(&self.known);
        let Some(entry) = known.get_mut(&number).filter(|_| number != ROOT) else { return false };
        entry.lookups = entry.lookups.saturating_sub(times);
        let is_forgotten = entry.lookups == 0;
        if is_forgotten {
            known.remove(&number);
            let left = known.len();
            if left < known.capacity() / SHRINK {
                known.shrink_to(2 * left);
            }
        }
        is_forgotten
    }
}

/// A table with room for so many times what is in it is made smaller.
const SHRINK: usize = 8;

/// The number of a thing: its hash, or the next that is free, should two have the same.
fn number_of(known: &HashMap<u64, Known>, node: &Node) -> u64 {
    let mut number = node.number();
    while known.get(&number).is_some_and(|other| other.node.key() != node.key()) {
        number = number.wrapping_add(1).max(ROOT + 1);
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_of_a_name_is_small() {
        assert!(size_of::<Node>() <= 112, "{}", size_of::<Node>());
    }

    #[test]
    fn times_go_round_unchanged() {
        let times = [(0, 0), (1_700_000_000, 123_456_789), (-1, 0), (-1, 999_999_999), (-5, 1)];
        for (whole, nanos) in times {
            let time = SystemTime::from(Seconds(whole, nanos));
            assert_eq!(Seconds::from(time), Seconds(whole, nanos));
        }
    }
}
