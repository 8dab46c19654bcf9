//! Inodes: which number stands for what, as long as the kernel remembers it.
//!
//! A number is a hash of what it stands for, so that the same thing has the same number again after
//! it was forgotten. New content is another thing: an image by its identity, a file by its device,
//! inode and birth.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use crate::source::{Attributes, Kind};
use crate::threads::lock;
use crate::view::{Entry, Shown};

/// The number of the mount's own directory, by the protocol.
pub const ROOT: u64 = 1;

/// What a number stands for.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its place in the view, where it was last seen.
    pub place: PathBuf,
    pub what: What,
    /// What it said of itself when it was last seen.
    pub attributes: Attributes,
}

#[derive(Clone, Debug)]
pub enum What {
    /// A file, directory or other thing of the source.
    Source,
    Image(Arc<Shown>),
    /// A link, and where it leads; nothing where following it is refused.
    Link(Option<PathBuf>),
}

impl Node {
    pub fn new(place: PathBuf, entry: &Entry) -> Node {
        let (what, attributes) = match entry {
            Entry::Image(shown) | Entry::Index(shown) => {
                (What::Image(Arc::clone(shown)), *shown.attributes())
            }
            Entry::Source(attributes) => (What::Source, *attributes),
            Entry::Link(attributes, target) => (What::Link(target.clone()), *attributes),
        };
        Node { place, what, attributes }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Place(PathBuf, Kind),
    File { dev: u64, ino: u64, born: Option<SystemTime> },
    Image(PathBuf, crate::image::Hash),
}

impl Key {
    fn of(node: &Node) -> Key {
        let Attributes { dev, ino, born, kind, .. } = node.attributes;
        match &node.what {
            What::Image(shown) => Key::Image(node.place.clone(), shown.identity()),
            What::Source if kind == Kind::File => Key::File { dev, ino, born },
            _ => Key::Place(node.place.clone(), kind),
        }
    }

    fn number(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        // 0 is no number and 1 is taken.
        hasher.finish().max(ROOT + 1)
    }
}

/// The numbers that the kernel knows.
#[derive(Debug)]
pub struct Nodes(Mutex<HashMap<u64, Known>>);

#[derive(Debug)]
struct Known {
    key: Key,
    node: Arc<Node>,
    lookups: u64,
}

impl Nodes {
    pub fn new(root: Attributes) -> Nodes {
        let node = Node { place: PathBuf::new(), what: What::Source, attributes: root };
        let key = Key::of(&node);
        let known = Known { key, node: Arc::new(node), lookups: 1 };
        Nodes(Mutex::new(HashMap::from([(ROOT, known)])))
    }

    /// What a number stands for. Nothing that the kernel does not know is asked for.
    pub fn get(&self, number: u64) -> Option<Arc<Node>> {
        Some(Arc::clone(&lock(&self.0).get(&number)?.node))
    }

    /// The number of a thing, which the kernel is about to learn.
    pub fn learn(&self, node: Node) -> u64 {
        let key = Key::of(&node);
        let mut known = lock(&self.0);
        let number = number_of(&known, &key);
        let entry = known.entry(number).or_insert_with(|| Known {
            key,
            node: Arc::new(node.clone()),
            lookups: 0,
        });
        entry.lookups += 1;
        entry.node = Arc::new(node);
        number
    }

    /// The number that a thing has or would have.
    pub fn number(&self, node: &Node) -> u64 {
        number_of(&lock(&self.0), &Key::of(node))
    }

    /// What it says of itself now, for those who ask for it by number.
    pub fn update(&self, number: u64, node: Node) {
        if let Some(known) = lock(&self.0).get_mut(&number) {
            known.node = Arc::new(node);
        }
    }

    /// The kernel forgets so many of the times it learned the number; whether it has forgotten it altogether.
    pub fn forget(&self, number: u64, times: u64) -> bool {
        let mut known = lock(&self.0);
        let Some(entry) = known.get_mut(&number).filter(|_| number != ROOT) else { return false };
        entry.lookups = entry.lookups.saturating_sub(times);
        let is_forgotten = entry.lookups == 0;
        if is_forgotten {
            known.remove(&number);
        }
        is_forgotten
    }
}

/// The number of a key: its hash, or the next that is free, should two have the same.
fn number_of(known: &HashMap<u64, Known>, key: &Key) -> u64 {
    let mut number = key.number();
    while known.get(&number).is_some_and(|other| other.key != *key) {
        number = number.wrapping_add(1).max(ROOT + 1);
    }
    number
}
