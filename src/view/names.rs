//! The names of a directory, in order, in one piece of memory: a directory may have 100,000 of them, and text of
//! its own would cost each four times its length.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Sorted names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    text: Box<[u8]>,
    /// Where in the text each ends.
    ends: Box<[usize]>,
}

impl Names {
    /// Of sorted names.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a OsStr>) -> Names {
        let (mut text, mut ends) = (Vec::new(), Vec::new());
        for name in names {
            text.extend_from_slice(name.as_bytes());
            ends.push(text.len());
        }
        let names = Names { text: text.into(), ends: ends.into() };
        debug_assert!(names.iter().is_sorted(), "names in order");
        names
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// A name by its place.
    pub fn get(&self, place: usize) -> Option<&OsStr> {
        let end = *self.ends.get(place)?;
        let start = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(OsStr::from_bytes(&self.text[start..end]))
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &OsStr> + Clone {
        (0..self.len()).filter_map(|place| self.get(place))
    }

    /// The place of a name; where it is not there, the place of the next.
    pub fn find(&self, name: &OsStr) -> Result<usize, usize> {
        let (mut least, mut most) = (0, self.len());
        while least < most {
            let middle = least + (most - least) / 2;
            match self.get(middle).cmp(&Some(name)) {
                std::cmp::Ordering::Less => least = middle + 1,
                std::cmp::Ordering::Equal => return Ok(middle),
                std::cmp::Ordering::Greater => most = middle,
            }
        }
        Err(least)
    }

    /// Bytes of memory.
    pub fn weight(&self) -> usize {
        self.text.len() + size_of_val(&*self.ends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_by_place_and_by_name() {
        let given = ["", "a", "ab", "b", "ä"].map(OsStr::new);
        let names = Names::of(given);
        assert!(names.iter().eq(given));
        for (place, name) in given.into_iter().enumerate() {
            assert_eq!(names.find(name), Ok(place));
            assert_eq!(names.get(place), Some(name));
        }
        assert_eq!(names.get(5), None);
        assert_eq!(names.find(OsStr::new("aa")), Err(2));
        assert_eq!(names.find(OsStr::new("ö")), Err(5));
        assert_eq!(Names::default().find(OsStr::new("a")), Err(0));
    }
}
