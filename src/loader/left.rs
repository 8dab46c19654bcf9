//! Leaves the page cache as it was found.
//!
//! In: the origins of a load, before it. Out: [`Left`], which lets go of what was not there: of a stretch
//! that was read just now, so that little is held at a time, and of all the rest when it is dropped, since
//! the system reads ahead. Where the system does not tell what was there, that is nothing.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::checkpoint::{OpenSources, OriginId};
use crate::source::{ReadAt, ReadStrategy, evict};

/// What the page cache did not have.
pub struct Left<'a> {
    sources: &'a OpenSources,
    missing: BTreeMap<OriginId, Vec<Range<u64>>>,
}

impl<'a> Left<'a> {
    /// Of these origins, as it is now.
    pub fn of(
        origins: impl Iterator<Item = OriginId>,
        sources: &'a OpenSources,
        ways: &[Option<ReadStrategy>],
    ) -> Left<'a> {
        let mut missing = BTreeMap::new();
        for origin in origins {
            let ways = ways.get(origin.0 as usize).and_then(Option::as_ref);
            if let (Some(ways), Some(file)) = (ways, sources.file(origin)) {
                let whole = 0..file.size();
                let uncached =
                    || ways.uncached_ranges(file, &whole).unwrap_or_else(|| vec![whole.clone()]);
                missing.entry(origin).or_insert_with(uncached);
            }
        }
        Left { sources, missing }
    }

    /// Lets go of a part of one.
    pub fn let_go(&self, origin: OriginId, range: &Range<u64>) {
        let Some(file) = self.sources.file(origin) else { return };
        for missing in self.missing.get(&origin).into_iter().flatten() {
            evict(file, &(missing.start.max(range.start)..missing.end.min(range.end)));
        }
    }
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        for origin in self.missing.keys() {
            self.let_go(*origin, &(0..u64::MAX));
        }
    }
}
