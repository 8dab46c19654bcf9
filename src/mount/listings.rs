//! Directories that are being listed: the names are those that were there when it was read from its start, and
//! hold for the rest of that reading.
//!
//! Handles that read the same names share them. Where all of them together take more than they may, those of the
//! handle that was read least lately go, and its next read goes on behind the last name that it was given.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::OsString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use fuser::{Errno, FileType, INodeNo, ReplyDirectory, ReplyDirectoryPlus};

use crate::source::{Attributes, Kind};
use crate::threads::lock;

use super::attr::kind;
use super::filesystem::{GENERATION, Inner, TTL};
use super::node_path::{DirNames, NodePath};
use super::nodes::{LastSeen, Node, What};

/// `.` and `..`, which have the first offsets.
const DOTS: u64 = 2;

/// Names that are looked at together; a reply of one page takes fewer.
const BATCH: usize = 32;

/// The listings of open directories.
#[derive(Debug)]
pub struct Listings {
    next: AtomicU64,
    limit: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    handles: HashMap<u64, Reading>,
    /// By the number of each directory that is being read.
    directories: HashMap<u64, Directory>,
    clock: u64,
}

/// A directory that is being read.
#[derive(Debug, Default)]
struct Directory {
    latest: Weak<DirNames>,
    handles: usize,
}

/// How far a handle is.
#[derive(Debug)]
struct Reading {
    directory: u64,
    names: Names,
    /// The place among the names of the offset `start`.
    first: usize,
    start: u64,
    /// The offset behind the last name that it was given.
    next: u64,
    used: u64,
}

#[derive(Debug)]
enum Names {
    Held(Arc<DirNames>),
    /// They went; the last that it was given.
    Behind(Option<OsString>),
}

impl Reading {
    fn place(&self, offset: u64) -> usize {
        let by = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
        self.first.saturating_add(by)
    }

    fn held(&self) -> Option<&Arc<DirNames>> {
        match &self.names {
            Names::Held(names) => Some(names),
            Names::Behind(_) => None,
        }
    }

    fn let_go(&mut self) {
        if let Names::Held(names) = &self.names {
            let last = self.place(self.next).checked_sub(1);
            let last = last.and_then(|last| names.names.get(last)).map(ToOwned::to_owned);
            self.names = Names::Behind(last);
        }
    }
}

impl Listings {
    /// Those of all handles together take so many bytes.
    pub fn new(limit: usize) -> Listings {
        Listings { next: AtomicU64::new(0), limit, open: Mutex::default() }
    }

    pub fn open(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The names of a directory that is read on, and the place of an offset among them; nothing if it is read from
    /// its start, or the names went.
    fn resume(&self, handle: u64, offset: u64) -> Option<(Arc<DirNames>, usize)> {
        let mut open = lock(&self.open);
        open.clock += 1;
        let used = open.clock;
        let reading = open.handles.get_mut(&handle).filter(|_| offset > 0)?;
        reading.used = used;
        Some((Arc::clone(reading.held()?), reading.place(offset)))
    }

    /// The same, of names that were read just now.
    fn begin(
        &self,
        handle: u64,
        number: u64,
        offset: u64,
        new: DirNames,
    ) -> (Arc<DirNames>, usize) {
        let mut open = lock(&self.open);
        let Open { handles, directories, clock } = &mut *open;
        *clock += 1;
        let directory = directories.entry(number).or_default();
        let same = directory.latest.upgrade().filter(|latest| **latest == new);
        let names = same.unwrap_or_else(|| Arc::new(new));
        directory.latest = Arc::downgrade(&names);
        directory.handles += usize::from(!handles.contains_key(&handle));
        let start = offset.max(DOTS);
        let first = match handles.get(&handle).filter(|_| offset > 0) {
            // Behind the last name that was given, wherever that is by now.
            Some(Reading { names: Names::Behind(Some(last)), next, .. }) if *next == offset => {
                names.names.find(last).map_or_else(|behind| behind, |place| place + 1)
            }
            _ => usize::try_from(start - DOTS).unwrap_or(usize::MAX),
        };
        let held = Names::Held(Arc::clone(&names));
        let used = *clock;
        let reading = Reading { directory: number, names: held, first, start, next: offset, used };
        handles.insert(handle, reading);
        open.make_room(self.limit, handle);
        (names, first)
    }

    /// A handle was given names up to this offset.
    fn given(&self, handle: u64, next: u64) {
        if let Some(reading) = lock(&self.open).handles.get_mut(&handle) {
            reading.next = next;
        }
    }

    pub fn close(&self, handle: u64) {
        let mut open = lock(&self.open);
        let Some(gone) = open.handles.remove(&handle) else { return };
        if let Entry::Occupied(mut directory) = open.directories.entry(gone.directory) {
            directory.get_mut().handles -= 1;
            if directory.get().handles == 0 {
                directory.remove();
            }
        }
        drop(open);
        drop(gone);
    }
}

impl Open {
    /// Lets go of names until those that are left take no more than the limit, least lately read first.
    fn make_room(&mut self, limit: usize, but: u64) {
        // How many handles have each, for what several have is held once.
        let mut shared: HashMap<*const DirNames, usize> = HashMap::new();
        let mut total = 0;
        for names in self.handles.values().filter_map(Reading::held) {
            let handles = shared.entry(Arc::as_ptr(names)).or_default();
            *handles += 1;
            if *handles == 1 {
                total += names.names.weight();
            }
        }
        if total <= limit {
            return;
        }
        let mut others: Vec<&mut Reading> = (self.handles.iter_mut())
            .filter(|(handle, _)| **handle != but)
            .map(|(_, reading)| reading)
            .collect();
        others.sort_by_key(|reading| reading.used);
        for reading in others {
            if total <= limit {
                return;
            }
            let Some(names) = reading.held() else { continue };
            let weight = names.names.weight();
            let handles = shared.entry(Arc::as_ptr(names)).or_default();
            *handles -= 1;
            if *handles == 0 {
                total -= weight;
            }
            reading.let_go();
        }
    }
}

/// A reply that takes one name after another.
pub trait DirSink {
    /// Adds a name; whether there was no room for it.
    fn add(&mut self, inner: &Inner, next: u64, entry: ListedName<'_>) -> bool;
    /// Adds `.` or `..`; the kernel knows both, and asks for neither.
    fn add_dots(&mut self, inner: &Inner, next: u64, number: u64, own: &Node, name: &str) -> bool;
}

/// A name, and what it stands for.
pub struct ListedName<'a> {
    name: &'a std::ffi::OsStr,
    node: Node,
    attributes: Attributes,
    /// How long the kernel may believe what is said of it.
    ttl: Duration,
}

/// Gives the names of a directory from an offset on, as many as there is room for; from the start, as they are now.
pub fn give(
    inner: &Inner,
    (number, handle): (u64, u64),
    own: &Node,
    offset: u64,
    reply: &mut impl DirSink,
) -> Result<(), Errno> {
    let dir = own.path.to_path();
    let (names, mut place) = match inner.listings.resume(handle, offset) {
        Some(found) => found,
        None => {
            let names = inner.names(number, &dir)?;
            let names = DirNames { dir: (*dir).into(), names };
            inner.listings.begin(handle, number, offset, names)
        }
    };
    let mut next = offset;
    for name in [".", ".."].into_iter().skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
        if reply.add_dots(inner, next + 1, number, own, name) {
            return Ok(());
        }
        next += 1;
    }
    'full: while place < names.names.len() {
        let end = names.names.len().min(place + BATCH);
        let batch = (place..end).filter_map(|place| names.names.get(place));
        let listed = inner.view.listed(&names.dir, batch).map_err(|e| inner.refuse(&e))?;
        for listed in listed {
            let path = NodePath::of(&names, place);
            if let Some(entry) = named(&names, place, path, listed, own)
                && reply.add(inner, next + 1, entry)
            {
                break 'full;
            }
            (place, next) = (place + 1, next + 1);
        }
    }
    inner.listings.given(handle, next);
    Ok(())
}

/// What a name of a listing stands for; nothing if it is gone.
fn named<'a>(
    names: &'a DirNames,
    place: usize,
    path: NodePath,
    listed: crate::view::Listed,
    own: &Node,
) -> Option<ListedName<'a>> {
    let name = names.names.get(place)?;
    match listed {
        Ok(entry) => {
            let entry = entry?;
            let attributes = *entry.attributes();
            // What another filesystem was not asked for is asked for by name.
            let is_elsewhere = attributes.kind == Kind::Directory && attributes.dev != own.last.dev;
            let ttl = if is_elsewhere { Duration::ZERO } else { TTL };
            Some(ListedName { name, node: Node::new(path, &entry), attributes, ttl })
        }
        // What cannot be looked at has a name all the same; a program that asks about it is told why.
        Err((kind, error)) => {
            tracing::debug!(%error, "listed by its name alone");
            let attributes = Attributes::unknown(kind, own.last.dev, place as u64);
            let last = LastSeen::from(&attributes);
            let node = Node { path, what: What::Source, last };
            Some(ListedName { name, node, attributes, ttl: Duration::ZERO })
        }
    }
}

impl DirSink for ReplyDirectory {
    fn add(&mut self, inner: &Inner, next: u64, entry: ListedName<'_>) -> bool {
        let number = INodeNo(inner.nodes.number(&entry.node));
        ReplyDirectory::add(self, number, next, kind(entry.node.last.kind), entry.name)
    }

    fn add_dots(&mut self, _: &Inner, next: u64, number: u64, _: &Node, name: &str) -> bool {
        ReplyDirectory::add(self, INodeNo(number), next, FileType::Directory, name)
    }
}

impl DirSink for ReplyDirectoryPlus {
    fn add(&mut self, inner: &Inner, next: u64, entry: ListedName<'_>) -> bool {
        let ListedName { name, node, attributes, ttl } = entry;
        let number = inner.nodes.learn(node);
        let attr = inner.attr(number, &attributes);
        let ino = INodeNo(number);
        let is_full = ReplyDirectoryPlus::add(self, ino, next, name, &ttl, &attr, GENERATION);
        if is_full {
            // The kernel does not learn what did not fit.
            inner.nodes.forget(number, 1);
        }
        is_full
    }

    fn add_dots(&mut self, inner: &Inner, next: u64, number: u64, own: &Node, name: &str) -> bool {
        let attr = inner.last_attr(number, own);
        ReplyDirectoryPlus::add(self, INodeNo(number), next, name, &TTL, &attr, GENERATION)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::Path;

    use super::*;
    use crate::view::Names as Sorted;

    fn names(of: &[&str]) -> DirNames {
        DirNames { dir: Path::new("dir").into(), names: Sorted::of(of.iter().map(OsStr::new)) }
    }

    #[test]
    fn handles_of_one_directory_share_its_names() {
        let listings = Listings::new(1 << 20);
        let (first, _) = listings.begin(1, 7, 0, names(&["a", "b"]));
        let (second, _) = listings.begin(2, 7, 0, names(&["a", "b"]));
        assert!(Arc::ptr_eq(&first, &second));
        let (other, _) = listings.begin(3, 7, 0, names(&["a", "b", "c"]));
        assert!(!Arc::ptr_eq(&first, &other));
        assert!(Arc::ptr_eq(&listings.resume(1, 3).unwrap().0, &first), "its reading goes on");
        assert!(listings.resume(1, 0).is_none(), "from the start it is read anew");
    }

    #[test]
    fn a_handle_whose_names_went_goes_on_behind_the_last() {
        let all = ["a", "b", "c", "d"];
        let room = names(&all).names.weight();
        let listings = Listings::new(room);
        listings.begin(1, 7, 0, names(&all));
        // It was given `.`, `..`, `a` and `b`.
        listings.given(1, 4);
        listings.begin(2, 8, 0, names(&all));
        assert!(listings.resume(1, 4).is_none(), "there is room for one");
        let (_, place) = listings.begin(1, 7, 4, names(&["a", "aa", "b", "bb", "d"]));
        assert_eq!(place, 3);
        assert_eq!(listings.resume(1, 5).unwrap().1, 4);
        // The name itself may be gone.
        listings.given(1, 5);
        listings.begin(2, 8, 0, names(&all));
        let (_, place) = listings.begin(1, 7, 5, names(&["a", "d"]));
        assert_eq!(place, 1);
    }

    #[test]
    fn names_of_handles_that_are_closed_are_gone() {
        let listings = Listings::new(1 << 20);
        let handle = listings.open();
        let (held, _) = listings.begin(handle, 7, 0, names(&["a"]));
        listings.close(handle);
        assert_eq!(Arc::strong_count(&held), 1);
        assert!(lock(&listings.open).directories.is_empty());
    }
}
