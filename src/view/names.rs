//! Sorted names of a directory in one allocation. A directory may have 100,000 names, and an allocation for each
//! would take four times its length.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// The sorted names of a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SortedNames {
    text: Box<[u8]>,
    /// The end of each name in `text`.
    ends: Box<[usize]>,
}

impl SortedNames {
    /// Packs names, which must be sorted.
    pub fn from_sorted<'a>(names: impl IntoIterator<Item = &'a OsStr>) -> SortedNames {
        let (mut text, mut ends) = (Vec::new(), Vec::new());
        for name in names {
            text.extend_from_slice(name.as_bytes());
            ends.push(text.len());
        }
        let names = SortedNames { text: text.into(), ends: ends.into() };
        debug_assert!(names.iter().is_sorted(), "names in order");
        names
    }

    /// The number of names.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The name at an index.
    pub fn get(&self, index: usize) -> Option<&OsStr> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(OsStr::from_bytes(&self.text[start..end]))
    }

    /// All names, in order.
    pub fn iter(&self) -> impl Iterator<Item = &OsStr> + Clone {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The index of a name; if it is absent, the index where it would be inserted.
    pub fn find(&self, name: &OsStr) -> Result<usize, usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.get(middle).cmp(&Some(name)) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Equal => return Ok(middle),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        Err(low)
    }

    /// Bytes of memory that the names take.
    pub fn memory_bytes(&self) -> usize {
        self.text.len() + size_of_val(&*self.ends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_by_index_and_by_name() {
        let sorted = ["", "a", "ab", "b", "ä"].map(OsStr::new);
        let names = SortedNames::from_sorted(sorted);
        assert!(names.iter().eq(sorted));
        for (index, name) in sorted.into_iter().enumerate() {
            assert_eq!(names.find(name), Ok(index));
            assert_eq!(names.get(index), Some(name));
        }
        assert_eq!(names.get(5), None);
        assert_eq!(names.find(OsStr::new("aa")), Err(2));
        assert_eq!(names.find(OsStr::new("ö")), Err(5));
        assert_eq!(SortedNames::default().find(OsStr::new("a")), Err(0));
    }
}
