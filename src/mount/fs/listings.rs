//! Listings of open directories. A read from the start takes the names as they are, and reads at later offsets of the
//! handle continue in them.
//!
//! Handles that read the same names share them. Above the limit, names are evicted, of the least recently read handle
//! first. The next read of such a handle continues behind the last name that was returned to it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::OsString;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::threads::lock;
use crate::view::SortedNames;

/// The entries `.` and `..`, which have the first offsets.
const DOT_ENTRIES_COUNT: u64 = 2;

/// The names of one directory.
#[derive(Debug, PartialEq, Eq)]
pub struct DirNames {
    /// The directory's path in the view.
    pub directory: Arc<Path>,
    pub names: SortedNames,
}

/// The listings of open directories.
#[derive(Debug)]
pub struct Listings {
    next: AtomicU64,
    limit_bytes: usize,
    open: Mutex<DirHandles>,
}

#[derive(Debug, Default)]
struct DirHandles {
    handles: HashMap<u64, DirCursor>,
    /// By the inode number of each directory that has handles in `handles`.
    directories: HashMap<u64, OpenDirectory>,
    clock: u64,
}

/// A directory that is being read.
#[derive(Debug, Default)]
struct OpenDirectory {
    latest: Weak<DirNames>,
    handles: usize,
}

/// The position of a handle in its listing.
#[derive(Debug)]
struct DirCursor {
    /// The inode number of the directory.
    directory: u64,
    snapshot: ListingSnapshot,
    /// The index of the name at the offset `start`.
    start_index: usize,
    start: u64,
    /// The offsets of the last reply: of its first name, and behind its last.
    reply: Range<u64>,
    /// When it was last read, on the clock of all handles.
    last_read: u64,
}

#[derive(Debug)]
enum ListingSnapshot {
    Cached(Arc<DirNames>),
    /// Evicted, but for the names of the last reply and the one before them. A program with a small buffer takes only
    /// some of a reply, and reads on in the middle of it.
    Evicted {
        recent: Vec<OsString>,
        /// The offset behind the first of them.
        first: u64,
    },
}

impl DirCursor {
    fn index(&self, offset: u64) -> usize {
        let by = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
        self.start_index.saturating_add(by)
    }

    fn cached(&self) -> Option<&Arc<DirNames>> {
        match &self.snapshot {
            ListingSnapshot::Cached(names) => Some(names),
            ListingSnapshot::Evicted { .. } => None,
        }
    }

    fn evict(&mut self) {
        if let ListingSnapshot::Cached(names) = &self.snapshot {
            let (start, end) = (self.index(self.reply.start), self.index(self.reply.end));
            let first_index = start.saturating_sub(1);
            let recent = (first_index..end).filter_map(|index| names.names.get(index));
            let recent = recent.map(ToOwned::to_owned).collect();
            let first = self.start + 1 + first_index as u64 - self.start_index as u64;
            self.snapshot = ListingSnapshot::Evicted { recent, first };
        }
    }

    /// The name before an offset, if it is one of those that outlast an eviction.
    fn recent_before(&self, offset: u64) -> Option<&OsString> {
        let ListingSnapshot::Evicted { recent, first } = &self.snapshot else { return None };
        recent.get(usize::try_from(offset.checked_sub(*first)?).ok()?)
    }
}

impl Listings {
    /// `limit` is in bytes, for the names of all handles together.
    pub fn new(limit: usize) -> Listings {
        Listings { next: AtomicU64::new(0), limit_bytes: limit, open: Mutex::default() }
    }

    pub fn open(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The cached names of a handle and the index of an offset in them. `None` if it reads from the start, or its names
    /// were evicted.
    pub fn resume(&self, handle: u64, offset: u64) -> Option<(Arc<DirNames>, usize)> {
        let mut open = lock(&self.open);
        open.clock += 1;
        let now = open.clock;
        let cursor = open.handles.get_mut(&handle).filter(|_| offset > 0)?;
        cursor.last_read = now;
        Some((Arc::clone(cursor.cached()?), cursor.index(offset)))
    }

    /// Caches names that were just read, and returns them with the index of the offset in them.
    pub fn insert(
        &self,
        handle: u64,
        number: u64,
        offset: u64,
        new: DirNames,
    ) -> (Arc<DirNames>, usize) {
        let mut open = lock(&self.open);
        let DirHandles { handles, directories, clock } = &mut *open;
        *clock += 1;
        let directory = directories.entry(number).or_default();
        let same = directory.latest.upgrade().filter(|latest| **latest == new);
        let names = same.unwrap_or_else(|| Arc::new(new));
        directory.latest = Arc::downgrade(&names);
        directory.handles += usize::from(!handles.contains_key(&handle));
        let start = offset.max(DOT_ENTRIES_COUNT);
        let before = handles.get(&handle).and_then(|cursor| cursor.recent_before(offset));
        let start_index = match before {
            // Behind the last name that was taken, wherever that is now.
            Some(before) => names.names.find(before).map_or_else(|behind| behind, |at| at + 1),
            None => usize::try_from(start - DOT_ENTRIES_COUNT).unwrap_or(usize::MAX),
        };
        let snapshot = ListingSnapshot::Cached(Arc::clone(&names));
        let last_read = *clock;
        let reply = start..start;
        let cursor =
            DirCursor { directory: number, snapshot, start_index, start, reply, last_read };
        handles.insert(handle, cursor);
        open.make_room(self.limit_bytes, handle);
        (names, start_index)
    }

    /// Records the offsets of the names that were returned to a handle.
    pub fn advance(&self, handle: u64, reply: Range<u64>) {
        if let Some(cursor) = lock(&self.open).handles.get_mut(&handle) {
            cursor.reply = reply.start.max(cursor.start)..reply.end.max(cursor.start);
        }
    }

    pub fn close(&self, handle: u64) {
        let mut open = lock(&self.open);
        let Some(closed) = open.handles.remove(&handle) else { return };
        if let Entry::Occupied(mut directory) = open.directories.entry(closed.directory) {
            directory.get_mut().handles -= 1;
            if directory.get().handles == 0 {
                directory.remove();
            }
        }
        drop(open);
        // Dropping many names takes time, so the lock is released first.
        drop(closed);
    }
}

impl DirHandles {
    /// Evicts names until the rest fits the limit, least recently read first, but never those of `except`.
    fn make_room(&mut self, limit: usize, except: u64) {
        // Handles of each listing: names that several share count once.
        let mut shared: HashMap<*const DirNames, usize> = HashMap::new();
        let mut total = 0;
        for names in self.handles.values().filter_map(DirCursor::cached) {
            let handles = shared.entry(Arc::as_ptr(names)).or_default();
            *handles += 1;
            if *handles == 1 {
                total += names.names.memory_bytes();
            }
        }
        if total <= limit {
            return;
        }
        let mut others: Vec<&mut DirCursor> = (self.handles.iter_mut())
            .filter(|(handle, _)| **handle != except)
            .map(|(_, cursor)| cursor)
            .collect();
        others.sort_by_key(|cursor| cursor.last_read);
        for cursor in others {
            if total <= limit {
                return;
            }
            let Some(names) = cursor.cached() else { continue };
            let weight = names.names.memory_bytes();
            let handles = shared.entry(Arc::as_ptr(names)).or_default();
            *handles -= 1;
            if *handles == 0 {
                total -= weight;
            }
            cursor.evict();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    fn names(all: &[&str]) -> DirNames {
        DirNames {
            directory: Path::new("dir").into(),
            names: SortedNames::from_sorted(all.iter().map(OsStr::new)),
        }
    }

    #[test]
    fn handles_of_one_directory_share_its_names() {
        let listings = Listings::new(1 << 20);
        let (first, _) = listings.insert(1, 7, 0, names(&["a", "b"]));
        let (second, _) = listings.insert(2, 7, 0, names(&["a", "b"]));
        assert!(Arc::ptr_eq(&first, &second));
        let (other, _) = listings.insert(3, 7, 0, names(&["a", "b", "c"]));
        assert!(!Arc::ptr_eq(&first, &other));
        assert!(Arc::ptr_eq(&listings.resume(1, 3).unwrap().0, &first), "its names stay the same");
        assert!(listings.resume(1, 0).is_none(), "from the start it is read anew");
    }

    #[test]
    fn a_handle_with_evicted_names_continues_behind_the_last() {
        let all = ["a", "b", "c", "d"];
        let room = names(&all).names.memory_bytes();
        let listings = Listings::new(room);
        listings.insert(1, 7, 0, names(&all));
        // `.`, `..`, `a` and `b` were returned.
        listings.advance(1, 2..4);
        listings.insert(2, 8, 0, names(&all));
        assert!(listings.resume(1, 4).is_none(), "there is room for one");
        let (_, index) = listings.insert(1, 7, 4, names(&["a", "aa", "b", "bb", "d"]));
        assert_eq!(index, 3);
        assert_eq!(listings.resume(1, 5).unwrap().1, 4);
        // A program with a small buffer has taken only a part of that reply.
        listings.advance(1, 4..6);
        listings.insert(2, 8, 0, names(&all));
        let (_, index) = listings.insert(1, 7, 5, names(&["a", "aa", "ab", "b", "bb", "d"]));
        assert_eq!(index, 5, "behind `bb`");
        // The name itself may be gone.
        listings.advance(1, 4..5);
        listings.insert(2, 8, 0, names(&all));
        let (_, index) = listings.insert(1, 7, 5, names(&["a", "d"]));
        assert_eq!(index, 1);
    }

    #[test]
    fn closing_a_handle_drops_its_names() {
        let listings = Listings::new(1 << 20);
        let handle = listings.open();
        let (names, _) = listings.insert(handle, 7, 0, names(&["a"]));
        listings.close(handle);
        assert_eq!(Arc::strong_count(&names), 1);
        assert!(lock(&listings.open).directories.is_empty());
    }
}
