//! Listings of a store's directories, and the listings that a store remembers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use object_store::{ListResult, path::Path as ObjectPath};

use super::error::RemoteError;
use super::failure::StoreFailure;
use super::version::ObjectVersion;

/// Maximum names of one directory. No model has more.
pub const MAX_NAME_COUNT: usize = 100_000;

/// Pages of one listing. A store sends 1,000 names a page, and a few pages with fewer.
const MAX_PAGE_COUNT: usize = 1000;

/// Memory of the listings that a store remembers, and of one listing: [`MAX_NAME_COUNT`] names of usual length.
pub const MAX_LISTING_BYTES: usize = 32 << 20;

/// Memory of an entry beside its name and ETag, in a tree that is three quarters full.
const ENTRY_BYTES: usize = 160;

/// The object or directory of a name.
#[derive(Clone, Debug)]
pub enum StoreEntry {
    Object(ObjectVersion),
    Directory,
}

/// The names in a directory with their versions, and the time of the request.
#[derive(Debug)]
pub struct StoreListing {
    pub taken_at: Instant,
    pub entries: BTreeMap<String, StoreEntry>,
    bytes: usize,
    page_count: usize,
}

impl StoreListing {
    /// A listing that is requested now, without names yet.
    pub fn new() -> StoreListing {
        StoreListing { taken_at: Instant::now(), entries: BTreeMap::new(), bytes: 0, page_count: 0 }
    }

    /// Adds a page of the listing of a directory. Fails if the listing becomes too long.
    pub fn add_page(&mut self, directory: &str, page: ListResult) -> Result<(), StoreFailure> {
        self.page_count += 1;
        if self.page_count > MAX_PAGE_COUNT {
            return Err(StoreFailure::Permanent(RemoteError::TooManyNames));
        }
        for path in page.common_prefixes {
            let Some(name) = name_inside(directory, &path) else { continue };
            self.add(name, StoreEntry::Directory)?;
        }
        let mut unversioned = Vec::new();
        for meta in &page.objects {
            let Some(name) = name_inside(directory, &meta.location) else { continue };
            match ObjectVersion::new(meta) {
                Ok(version) => self.add(name, StoreEntry::Object(version))?,
                Err(_) => unversioned.push(name),
            }
        }
        if let Some(name) = unversioned.first() {
            tracing::warn!(
                count = unversioned.len(),
                name,
                "objects in {directory:?} are not shown: the store states neither an ETag nor a time for them"
            );
        }
        Ok(())
    }

    /// Adds a name. An object of a directory's name counts, unless it is empty and so marks the directory.
    pub fn add(&mut self, name: &str, entry: StoreEntry) -> Result<(), StoreFailure> {
        let size = |entry: &StoreEntry| match entry {
            StoreEntry::Object(version) => version.size,
            StoreEntry::Directory => 0,
        };
        match self.entries.get_mut(name) {
            Some(known) if size(known) > 0 => {}
            Some(known) if size(&entry) > 0 => *known = entry,
            Some(known) => *known = StoreEntry::Directory,
            None => {
                let etag_len = match &entry {
                    StoreEntry::Object(version) => version.etag_len(),
                    StoreEntry::Directory => 0,
                };
                self.bytes += ENTRY_BYTES + name.len() + etag_len;
                self.entries.insert(name.to_owned(), entry);
            }
        }
        match self.entries.len() > MAX_NAME_COUNT || self.bytes > MAX_LISTING_BYTES {
            true => Err(StoreFailure::Permanent(RemoteError::TooManyNames)),
            false => Ok(()),
        }
    }
}

/// The name of a path directly in a directory; `None` if it lies elsewhere, whatever the server states.
fn name_inside<'a>(directory: &str, path: &'a ObjectPath) -> Option<&'a str> {
    let rest = path.as_ref().strip_prefix(directory)?;
    let name = if directory.is_empty() { rest } else { rest.strip_prefix('/')? };
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

/// The listings of a store that were used last, bounded by their memory.
#[derive(Debug)]
pub struct ListingCache {
    listings: LruCache<String, Arc<StoreListing>>,
    bytes: usize,
}

impl Default for ListingCache {
    fn default() -> ListingCache {
        ListingCache { listings: LruCache::unbounded(), bytes: 0 }
    }
}

impl ListingCache {
    /// The listing of a directory, if it is not older.
    pub fn get(&mut self, key: &str, max_age: Duration) -> Option<Arc<StoreListing>> {
        let known = self.listings.get(key).cloned();
        known.filter(|listing| listing.taken_at.elapsed() < max_age)
    }

    pub fn remove(&mut self, key: &str) {
        if let Some(listing) = self.listings.pop(key) {
            self.bytes -= memory(key, &listing);
        }
    }

    /// Keeps a listing, and evicts the least recently used ones.
    pub fn insert(&mut self, key: String, listing: Arc<StoreListing>) {
        self.remove(&key);
        self.bytes += memory(&key, &listing);
        self.listings.put(key, listing);
        // The new one stays: its names are looked up next.
        while self.bytes > MAX_LISTING_BYTES && self.listings.len() > 1 {
            if let Some((key, listing)) = self.listings.pop_lru() {
                self.bytes -= memory(&key, &listing);
            }
        }
    }
}

fn memory(key: &str, listing: &StoreListing) -> usize {
    ENTRY_BYTES + key.len() + listing.bytes
}

#[cfg(test)]
mod tests {
    use chrono::{DateTime, Utc};
    use object_store::ObjectMeta;

    use super::*;

    fn object(path: &str, size: u64) -> ObjectMeta {
        let last_modified = DateTime::<Utc>::from_timestamp(7, 0).unwrap();
        let location = ObjectPath::parse(path).unwrap();
        ObjectMeta { location, last_modified, size, e_tag: Some("\"a\"".into()), version: None }
    }

    fn page(objects: Vec<ObjectMeta>, directories: &[&str]) -> ListResult {
        let common_prefixes =
            directories.iter().map(|path| ObjectPath::parse(path).unwrap()).collect();
        ListResult { common_prefixes, objects, extensions: Default::default() }
    }

    #[test]
    fn a_listing_has_the_names_directly_inside_and_no_markers() {
        let mut listing = StoreListing::new();
        let objects =
            ["m", "m/a", "m/b/c", "mm/d", "e", "m/inner", "m/both"].map(|key| object(key, 5));
        listing.add_page("m", page(objects.into(), &["m/x", "m", "x"])).unwrap();
        listing.add_page("m", page(vec![object("m/x", 0)], &["m/inner", "m/y"])).unwrap();
        listing.add_page("m", page(vec![object("m/y", 0), object("m/empty", 0)], &[])).unwrap();
        let names: Vec<_> = listing
            .entries
            .iter()
            .map(|(name, entry)| (&**name, matches!(entry, StoreEntry::Directory)))
            .collect();
        let expected = [
            ("a", false),
            ("both", false),
            ("empty", false),
            ("inner", false),
            ("x", true),
            ("y", true),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn a_listing_without_end_is_refused() {
        let mut listing = StoreListing::new();
        let endless = (0..).try_for_each(|_| listing.add_page("", page(Vec::new(), &["again"])));
        assert!(matches!(endless, Err(StoreFailure::Permanent(RemoteError::TooManyNames))));
        let mut listing = StoreListing::new();
        let long = "x".repeat(1000);
        let added =
            (0..).take_while(|n| listing.add(&format!("{long}{n}"), StoreEntry::Directory).is_ok());
        let expected = |len| MAX_LISTING_BYTES / (ENTRY_BYTES + len);
        assert!((expected(1005) - 1..expected(1001)).contains(&added.count()));
    }

    #[test]
    fn remembered_listings_are_bounded_by_their_memory() {
        let mut cache = ListingCache::default();
        let listing = |count| {
            let mut listing = StoreListing::new();
            (0..count)
                .for_each(|n| listing.add(&format!("{n:08}"), StoreEntry::Directory).unwrap());
            Arc::new(listing)
        };
        cache.insert("first".into(), listing(10));
        for n in 0..20 {
            cache.insert(format!("{n}"), listing(20_000));
            assert!(cache.get("first", Duration::MAX).is_some(), "it was used last");
        }
        assert!(cache.bytes <= MAX_LISTING_BYTES);
        assert!(
            cache.get("0", Duration::MAX).is_none() && cache.get("19", Duration::MAX).is_some()
        );
        for key in ["first".to_owned()].into_iter().chain((0..20).map(|n| n.to_string())) {
            cache.remove(&key);
        }
        assert_eq!(cache.bytes, 0);
    }
}
