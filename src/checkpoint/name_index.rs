//! A hash index over the names in a list, by their positions in it.
//!
//! It takes four bytes for each name. So it stays in the processor's cache where a map of 100,000 names does not.
//! Its hash has a random seed, and is many times as fast as the standard library's.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// Positions by name. The `name` of a position must be the same in each call.
#[derive(Debug, Default)]
pub struct NameIndex {
    table: HashTable<u32>,
    hasher: RandomState,
}

impl NameIndex {
    /// Indexes a list. The error is the first position whose name occurs before it.
    pub fn build<'a>(len: usize, name: impl Fn(usize) -> &'a str) -> Result<NameIndex, usize> {
        let mut table = HashTable::with_capacity(len);
        let hasher = RandomState::default();
        for position in 0..len {
            let is_equal = |&other: &u32| name(other as usize) == name(position);
            let hash_of = |&other: &u32| hasher.hash_one(name(other as usize));
            match table.entry(hasher.hash_one(name(position)), is_equal, hash_of) {
                Entry::Occupied(_) => return Err(position),
                Entry::Vacant(slot) => drop(slot.insert(position as u32)),
            }
        }
        Ok(NameIndex { table, hasher })
    }

    /// The position of a name.
    pub fn find<'a>(&self, target: &str, name: impl Fn(usize) -> &'a str) -> Option<usize> {
        let is_equal = |&position: &u32| name(position as usize) == target;
        let found = self.table.find(self.hasher.hash_one(target), is_equal);
        found.map(|&position| position as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_found_at_its_position_and_no_other_is() {
        let names: Vec<String> = (0..1000).map(|n| format!("layer.{n}")).collect();
        let name = |position: usize| &*names[position];
        let index = NameIndex::build(names.len(), name).unwrap();
        assert!(names.iter().enumerate().all(|(n, one)| index.find(one, name) == Some(n)));
        assert_eq!(index.find("layer.1000", name), None);
    }

    #[test]
    fn the_second_of_two_equal_names_is_the_error() {
        let names = ["a", "b", "a", "b"];
        assert_eq!(NameIndex::build(names.len(), |position| names[position]).unwrap_err(), 2);
    }
}
