//! The table of a folder of torch.distributed.checkpoint (`.metadata`): which tensors there are, how they are cut, and
//! where each piece lies.
//!
//! It is a pickle of dataclasses. Only the attributes that are named here are read. Newer ones are ignored, and those
//! that older versions lack count as empty.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use smallvec::SmallVec;

use crate::checkpoint::tensor::{Dtype, Shape};
use crate::checkpoint::torch::pickle::{Arena, NodeId};
use crate::checkpoint::torch::{as_count, attribute, class_of, entry, torch_dtype};
use crate::checkpoint::training_error::TrainingError;

use super::locations::{PieceLocation, PieceLocations, find_location};
use super::part_budget::PartBudget;

/// torch's class of a table, and Megatron's.
const TABLE_CLASSES: [&str; 2] = ["Metadata", "MCoreMetadata"];

/// The tables of a folder, joined: one for the folder, or one of each rank.
#[derive(Debug, Default)]
pub struct DcpTable {
    pub tensors: Vec<TableTensor>,
    /// The names of entries that are not tensors.
    pub others: Vec<String>,
    /// The files that hold the pieces, each once.
    pub files: Vec<DataFile>,
    file_numbers: HashMap<String, u32>,
    /// What the tables of several ranks have in common; `None` for a single table.
    shared: Option<SharedTensors>,
}

/// A file that holds pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    pub name: String,
    /// The end of the last entry that a table places in it, be it of a tensor or not.
    pub recorded_bytes: u64,
}

/// Tensors that the tables of several ranks may have in common.
#[derive(Debug, Default)]
struct SharedTensors {
    numbers: HashMap<String, usize>,
    /// The places of the pieces of each tensor, to find replicas.
    places: Vec<HashSet<PiecePlace>>,
}

/// The first step of a piece and its number of steps, on each axis.
type PiecePlace = (Shape, Shape);

/// The ends of keys in a name.
pub type KeyEnds = SmallVec<[u32; 4]>;

/// A tensor, and its pieces.
#[derive(Debug)]
pub struct TableTensor {
    pub name: String,
    /// The ends in the name of the keys that led to it; empty if that is not recorded.
    pub key_ends: KeyEnds,
    pub dtype: Dtype,
    pub shape: Shape,
    pub pieces: Vec<TablePiece>,
}

/// A piece of a tensor: an archive of torch inside a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePiece {
    pub start: Shape,
    pub counts: Shape,
    /// The index of its file in the list of files.
    pub file: u32,
    pub range: Range<u64>,
}

impl DcpTable {
    /// An empty table, to which this number of tables will be added.
    pub fn with_table_count(count: usize) -> DcpTable {
        DcpTable { shared: (count > 1).then(SharedTensors::default), ..DcpTable::default() }
    }

    /// Adds the table in a file of this number of bytes. Of pieces that several ranks name, the first is kept.
    pub fn add(
        &mut self,
        arena: &Arena,
        top: NodeId,
        file: &str,
        bytes: u64,
    ) -> Result<(), TrainingError> {
        let malformed = |what| TrainingError::MalformedTable { name: file.to_owned(), what };
        match class_of(arena, top) {
            Some((_, class)) if TABLE_CLASSES.contains(&class) => {}
            _ => return Err(malformed("its class is not Metadata")),
        }
        let mut budget = PartBudget::new(bytes);
        let locations =
            PieceLocations::read(arena, top, &mut budget, |file, end| self.number_file(file, end))
                .map_err(malformed)?;
        let keys = attribute(arena, top, "planner_data");
        let keys = keys.and_then(|keys| arena.entries(keys)).unwrap_or_default();
        let keys: HashMap<&str, NodeId> =
            keys.iter().filter_map(|(name, keys)| Some((arena.text(*name)?, *keys))).collect();
        let entries = attribute(arena, top, "state_dict_metadata");
        let entries = entries
            .and_then(|entries| arena.entries(entries))
            .ok_or(malformed("it has no state_dict_metadata"))?;
        let mut names = HashSet::with_capacity(entries.len());
        for &(name, entry) in entries {
            let name = arena.text(name).ok_or(malformed("a name is not text"))?;
            if !names.insert(name) {
                return Err(malformed("state_dict_metadata has a name twice"));
            }
            match class_of(arena, entry) {
                Some((_, "TensorStorageMetadata")) => {
                    let wrong_keys = || {
                        let (name, tensor) = (file.to_owned(), name.to_owned());
                        TrainingError::WrongKeys { name, tensor }
                    };
                    // Without planner_data, names are all that is known.
                    let key_ends = match (keys.get(name), keys.is_empty()) {
                        (Some(&keys), _) => key_ends(arena, keys, name).ok_or_else(wrong_keys)?,
                        (None, true) => KeyEnds::new(),
                        (None, false) => return Err(wrong_keys()),
                    };
                    let locations = locations.of_tensor(name);
                    let tensor = self.tensor_entry(arena, entry, name, key_ends, &mut budget);
                    let number = tensor.map_err(|e| e.into_error(malformed))?;
                    self.add_pieces(arena, entry, number, locations, &mut budget)
                        .map_err(|e| e.into_error(malformed))?;
                }
                Some((_, "BytesStorageMetadata")) => self.others.push(name.to_owned()),
                _ => return Err(malformed("an entry is neither a tensor nor bytes")),
            }
        }
        Ok(())
    }

    /// The number of a file, which is an index into the files, for an entry that ends at a byte of it.
    fn number_file(&mut self, name: &str, end: u64) -> u32 {
        let number = match self.file_numbers.get(name) {
            Some(&number) => number,
            None => {
                let number = self.files.len() as u32;
                self.file_numbers.insert(name.to_owned(), number);
                self.files.push(DataFile { name: name.to_owned(), recorded_bytes: 0 });
                number
            }
        };
        let file = &mut self.files[number as usize];
        file.recorded_bytes = file.recorded_bytes.max(end);
        number
    }

    /// Takes the tensors of these indexes, and the files that hold their pieces. The file of a piece is then an index
    /// into these files.
    pub fn take_tensors(
        self,
        numbers: impl Iterator<Item = usize>,
    ) -> (Vec<TableTensor>, Vec<DataFile>) {
        let mut all: Vec<Option<TableTensor>> = self.tensors.into_iter().map(Some).collect();
        let mut tensors: Vec<TableTensor> = numbers.filter_map(|n| all[n].take()).collect();
        let mut used: Vec<u32> = tensors
            .iter()
            .flat_map(|tensor| tensor.pieces.iter().map(|piece| piece.file))
            .collect();
        used.sort_unstable();
        used.dedup();
        for piece in tensors.iter_mut().flat_map(|tensor| &mut tensor.pieces) {
            piece.file = used.partition_point(|&file| file < piece.file) as u32;
        }
        let files = used.iter().map(|&file| self.files[file as usize].clone()).collect();
        (tensors, files)
    }

    /// The number of the tensor of an entry, which is added unless another rank's table has it.
    fn tensor_entry(
        &mut self,
        arena: &Arena,
        entry: NodeId,
        name: &str,
        key_ends: KeyEnds,
        budget: &mut PartBudget,
    ) -> Result<usize, EntryError> {
        let size = attribute(arena, entry, "size").ok_or("a tensor has no size")?;
        let shape = budget.shape(arena, size)?.ok_or("a tensor has no size")?;
        let dtype = dtype_of(arena, entry).ok_or("a tensor has no dtype")?;
        let dtype = torch_dtype(arena, dtype).map_err(|error| {
            EntryError::Tensor(TrainingError::Tensor { tensor: name.to_owned(), error })
        })?;
        let number = self.tensors.len();
        if let Some(shared) = &mut self.shared {
            if let Some(&number) = shared.numbers.get(name) {
                let tensor = &self.tensors[number];
                return match (tensor.dtype, &tensor.shape) == (dtype, &shape) {
                    true => Ok(number),
                    false => {
                        Err("a tensor has another shape or type than in another rank's table"
                            .into())
                    }
                };
            }
            shared.numbers.insert(name.to_owned(), number);
            shared.places.push(HashSet::new());
        }
        let (name, pieces) = (name.to_owned(), Vec::new());
        self.tensors.push(TableTensor { name, key_ends, dtype, shape, pieces });
        Ok(number)
    }

    /// Adds the pieces of an entry to its tensor.
    fn add_pieces(
        &mut self,
        arena: &Arena,
        entry: NodeId,
        number: usize,
        locations: &[PieceLocation],
        budget: &mut PartBudget,
    ) -> Result<(), EntryError> {
        let chunks = attribute(arena, entry, "chunks").and_then(|chunks| arena.items(chunks));
        let chunks = chunks.ok_or("a tensor has no chunks")?;
        budget.take(chunks.len())?;
        let tensor = &mut self.tensors[number];
        let mut places = self.shared.as_mut().map(|shared| &mut shared.places[number]);
        let known = tensor.pieces.len();
        // Most tensors have one piece, for which a list that grows would reserve four.
        tensor.pieces.reserve_exact(chunks.len().min(locations.len()));
        for &chunk in chunks {
            let mut shape = |what| {
                let invalid = "a chunk has no valid offsets and sizes";
                let id = attribute(arena, chunk, what).ok_or(invalid)?;
                budget.shape(arena, id)?.ok_or(invalid)
            };
            let (start, counts) = (shape("offsets")?, shape("sizes")?);
            if counts.contains(&0) {
                continue;
            }
            let place = (start, counts);
            if places.as_ref().is_some_and(|places| places.contains(&place)) {
                // A replica of an earlier rank.
                continue;
            }
            let (start, counts) = place;
            // If there are more chunks than places, a chunk has no place.
            let is_excess = tensor.pieces.len() - known == locations.len();
            let location =
                Some(locations).filter(|_| !is_excess).and_then(|all| find_location(all, &start));
            let Some(PieceLocation { file, range, transform, .. }) = location else {
                let (tensor, start) = (tensor.name.clone(), start.to_vec());
                return Err(EntryError::Tensor(TrainingError::UnplacedPiece { tensor, start }));
            };
            if let Some(transform) = transform {
                let transform = arena.text(*transform).unwrap_or("an unnamed form").to_owned();
                let tensor = tensor.name.clone();
                return Err(EntryError::Tensor(TrainingError::Transform { tensor, transform }));
            }
            let (file, range) = (*file, range.clone());
            tensor.pieces.push(TablePiece { start, counts, file, range });
        }
        if let Some(places) = &mut places {
            let added = tensor.pieces[known..].iter();
            places.extend(added.map(|piece| (piece.start.clone(), piece.counts.clone())));
        }
        Ok(())
    }
}

/// Why the entry of a tensor is refused.
enum EntryError {
    Malformed(&'static str),
    Tensor(TrainingError),
}

impl From<&'static str> for EntryError {
    fn from(what: &'static str) -> EntryError {
        EntryError::Malformed(what)
    }
}

impl EntryError {
    fn into_error(self, malformed: impl Fn(&'static str) -> TrainingError) -> TrainingError {
        match self {
            EntryError::Malformed(what) => malformed(what),
            EntryError::Tensor(error) => error,
        }
    }
}

/// The type of a tensor: the first of its properties, which are attributes or a tuple of them.
fn dtype_of(arena: &Arena, tensor: NodeId) -> Option<NodeId> {
    let properties = attribute(arena, tensor, "properties")?;
    let state = arena.state(properties)?;
    match arena.items(state) {
        Some(items) => items.first().copied(),
        None => entry(arena, state, "dtype"),
    }
}

/// The ends of the keys that lead to a name, in the name: torch joins them with dots. `None` if it is not so joined.
fn key_ends(arena: &Arena, keys: NodeId, name: &str) -> Option<KeyEnds> {
    let mut ends = KeyEnds::new();
    let mut rest = name;
    // A list of a million keys ends with the name: each key takes a part of it, or at least a dot.
    for &key in arena.items(keys)? {
        if !ends.is_empty() {
            rest = rest.strip_prefix('.')?;
        }
        rest = match arena.text(key) {
            Some(text) => rest.strip_prefix(text)?,
            // Whole numbers are positions in lists.
            None => rest.strip_prefix(&*as_count(arena, key)?.to_string())?,
        };
        ends.push((name.len() - rest.len()) as u32);
    }
    (rest.is_empty() && !ends.is_empty()).then_some(ends)
}

#[cfg(test)]
mod tests {
    use crate::checkpoint::torch::pickle::read_pickle;

    use super::*;

    /// The ends of the keys in a pickled tuple.
    fn ends(pickle: &[u8], name: &str) -> Option<Vec<u32>> {
        let (arena, top, _) = read_pickle(pickle, pickle.len() as u64).unwrap();
        key_ends(&arena, top, name).map(|ends| ends.to_vec())
    }

    #[test]
    fn keys_are_kept_only_if_they_make_the_name() {
        let keys = b"\x80\x04(\x8c\x05modelK\x0b\x8c\x03a.wt.";
        assert_eq!(ends(keys, "model.11.a.w"), Some(vec![5, 8, 12]));
        for other in ["model.11.a.w2", "model.11.a", "model.1.a.w", "model11.a.w", "", "x"] {
            assert_eq!(ends(keys, other), None, "{other}");
        }
        // An empty key is one, no key is none, and a number is no path.
        assert_eq!(ends(b"\x80\x04\x8c\x00\x8c\x01w\x86.", ".w"), Some(vec![0, 2]));
        assert_eq!(ends(b"\x80\x04).", ""), None);
        assert_eq!(ends(b"\x80\x04K\x01.", "1"), None);
    }

    #[test]
    fn a_long_path_that_tensors_share_takes_no_more_than_their_names() {
        let mut pickle = b"\x80\x04(".to_vec();
        pickle.extend(b"\x8c\x00".repeat(1_000_000));
        pickle.extend(b"t.");
        let started = std::time::Instant::now();
        let (arena, top, _) = read_pickle(&pickle, pickle.len() as u64).unwrap();
        for _ in 0..10_000 {
            assert!(key_ends(&arena, top, "..........").is_none());
        }
        assert!(started.elapsed().as_secs() < 10);
    }
}
