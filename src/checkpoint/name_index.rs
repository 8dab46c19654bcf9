//! Finds things by name, where they are in a list that has the names.
//!
//! In: places in the list. Out: the place of a name. So it is four bytes for each, and stays at hand where
//! a map of the names themselves does not: what 100,000 names are looked up in once takes its time for
//! being fetched, and for hashing, which is seeded by chance and many times as fast as the standard library's.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// Places by name. What gives the name of a place must give the same each time.
#[derive(Debug, Default)]
pub struct NameIndex {
    table: HashTable<u32>,
    hasher: RandomState,
}

impl NameIndex {
    /// With the places of a whole list. The first that has the name of one before it is the error.
    pub fn build<'a>(len: usize, name: impl Fn(usize) -> &'a str) -> Result<NameIndex, usize> {
        let mut places =
            NameIndex { table: HashTable::with_capacity(len), hasher: Default::default() };
        let NameIndex { table, hasher: hash } = &mut places;
        for place in 0..len {
            let is_it = |&other: &u32| name(other as usize) == name(place);
            let hash_of = |&other: &u32| hash.hash_one(name(other as usize));
            match table.entry(hash.hash_one(name(place)), is_it, hash_of) {
                Entry::Occupied(_) => return Err(place),
                Entry::Vacant(new) => drop(new.insert(place as u32)),
            }
        }
        Ok(places)
    }

    /// The place of a name.
    pub fn find<'a>(&self, target: &str, name: impl Fn(usize) -> &'a str) -> Option<usize> {
        let is_it = |&place: &u32| name(place as usize) == target;
        self.table.find(self.hasher.hash_one(target), is_it).map(|&place| place as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_found_at_its_place_and_no_other_is() {
        let names: Vec<String> = (0..1000).map(|n| format!("layer.{n}")).collect();
        let name = |place: usize| &*names[place];
        let places = NameIndex::build(names.len(), name).unwrap();
        assert!(names.iter().enumerate().all(|(n, one)| places.find(one, name) == Some(n)));
        assert_eq!(places.find("layer.1000", name), None);
    }

    #[test]
    fn the_second_of_two_equal_names_is_told() {
        let names = ["a", "b", "a", "b"];
        assert_eq!(NameIndex::build(names.len(), |place| names[place]).unwrap_err(), 2);
    }
}
