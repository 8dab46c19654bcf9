//! The table of a folder of torch.distributed.checkpoint (`.metadata`): which tensors there are, how they are cut, and
//! where each piece lies.
//!
//! It is a pickle of dataclasses. Only the attributes that are named here are read. Newer ones are ignored, and those
//! that older versions lack count as empty.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::checkpoint::tensor::{Dtype, Shape};
use crate::checkpoint::torch::pickle::{Arena, NodeId};
use crate::checkpoint::torch::{as_count, as_counts, attribute, class_of, entry, torch_dtype};
use crate::checkpoint::training_error::TrainingError;

/// torch's class of a table, and Megatron's.
const TABLE_CLASSES: [&str; 2] = ["Metadata", "MCoreMetadata"];

/// The tables of a folder, joined: one for the folder, or one of each rank.
#[derive(Debug, Default)]
pub struct DcpTable {
    pub tensors: Vec<TableTensor>,
    /// The names of entries that are not tensors.
    pub others: Vec<String>,
    /// The names of the files that hold the pieces, each once.
    pub files: Vec<String>,
    file_numbers: HashMap<String, u32>,
    tensor_numbers: HashMap<String, usize>,
    /// The places of the pieces of each tensor, to find replicas; `None` for a single table.
    places: Option<Vec<HashSet<PiecePlace>>>,
}

/// The first step of a piece and its number of steps, on each axis.
type PiecePlace = (Shape, Shape);

/// A tensor, and its pieces.
#[derive(Debug)]
pub struct TableTensor {
    pub name: String,
    /// The keys that led to it; empty if that is not recorded.
    pub keys: Vec<String>,
    pub dtype: Dtype,
    pub shape: Shape,
    pub pieces: Vec<TablePiece>,
}

/// A piece of a tensor: an archive of torch inside a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePiece {
    pub start: Shape,
    pub counts: Shape,
    /// The index of its file in the list of file names.
    pub file: u32,
    pub range: Range<u64>,
}

/// Where a piece lies, and how its bytes were changed when they were written.
struct PieceLocation {
    file: u32,
    range: Range<u64>,
    transform: Option<String>,
}

/// The locations of pieces, by the names of tensors and the first steps of the pieces.
type LocationsByName<'a> = HashMap<&'a str, HashMap<Shape, PieceLocation>>;

impl DcpTable {
    /// An empty table, to which this number of tables will be added.
    pub fn with_table_count(count: usize) -> DcpTable {
        DcpTable { places: (count > 1).then(Vec::new), ..DcpTable::default() }
    }

    /// Adds the table in a file. Of pieces that several ranks name, the first is kept.
    pub fn add(&mut self, arena: &Arena, top: NodeId, file: &str) -> Result<(), TrainingError> {
        let malformed = |what| TrainingError::MalformedTable { name: file.to_owned(), what };
        match class_of(arena, top) {
            Some((_, class)) if TABLE_CLASSES.contains(&class) => {}
            _ => return Err(malformed("its class is not Metadata")),
        }
        let locations = self.locations(arena, top).map_err(malformed)?;
        let keys = attribute(arena, top, "planner_data");
        let keys = keys.and_then(|keys| arena.entries(keys)).unwrap_or_default();
        let keys: HashMap<&str, NodeId> =
            keys.iter().filter_map(|(name, keys)| Some((arena.text(*name)?, *keys))).collect();
        let entries = attribute(arena, top, "state_dict_metadata");
        let entries = entries
            .and_then(|entries| arena.entries(entries))
            .ok_or(malformed("it has no state_dict_metadata"))?;
        let mut names = HashSet::new();
        for &(name, entry) in entries {
            let name = arena.text(name).ok_or(malformed("a name is not text"))?;
            if !names.insert(name) {
                return Err(malformed("state_dict_metadata has a name twice"));
            }
            match class_of(arena, entry) {
                Some((_, "TensorStorageMetadata")) => {
                    let keys =
                        keys.get(name).map(|&keys| key_texts(arena, keys)).unwrap_or_default();
                    self.add_tensor(arena, entry, name, keys, locations.get(name), &malformed)?;
                }
                Some((_, "BytesStorageMetadata")) => self.others.push(name.to_owned()),
                _ => return Err(malformed("an entry is neither a tensor nor bytes")),
            }
        }
        Ok(())
    }

    /// Takes the tensors of these indexes, and the names of the files that hold their pieces. The file of a piece is
    /// then an index into these names.
    pub fn take_tensors(
        self,
        numbers: impl Iterator<Item = usize>,
    ) -> (Vec<TableTensor>, Vec<String>) {
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
        let names = used.iter().map(|&file| self.files[file as usize].clone()).collect();
        (tensors, names)
    }

    fn add_tensor(
        &mut self,
        arena: &Arena,
        entry: NodeId,
        name: &str,
        keys: Vec<String>,
        locations: Option<&HashMap<Shape, PieceLocation>>,
        malformed: &impl Fn(&'static str) -> TrainingError,
    ) -> Result<(), TrainingError> {
        let shape = attribute(arena, entry, "size").and_then(|size| as_counts(arena, size));
        let shape: Shape = shape.ok_or(malformed("a tensor has no size"))?.into();
        let dtype = dtype_of(arena, entry).ok_or(malformed("a tensor has no dtype"))?;
        let dtype = torch_dtype(arena, dtype)
            .map_err(|error| TrainingError::Tensor { tensor: name.to_owned(), error })?;
        let chunks = attribute(arena, entry, "chunks").and_then(|chunks| arena.items(chunks));
        let chunks = chunks.ok_or(malformed("a tensor has no chunks"))?;
        let number = match self.tensor_numbers.get(name) {
            Some(&number) => number,
            None => {
                self.tensor_numbers.insert(name.to_owned(), self.tensors.len());
                let (name, shape) = (name.to_owned(), shape.clone());
                self.tensors.push(TableTensor { name, keys, dtype, shape, pieces: Vec::new() });
                if let Some(places) = &mut self.places {
                    places.push(HashSet::new());
                }
                self.tensors.len() - 1
            }
        };
        let tensor = &mut self.tensors[number];
        if (tensor.dtype, &tensor.shape) != (dtype, &shape) {
            return Err(malformed(
                "a tensor has another shape or type than in another rank's table",
            ));
        }
        let mut places = self.places.as_mut().map(|places| &mut places[number]);
        let known = tensor.pieces.len();
        for &chunk in chunks {
            let counts = |what| attribute(arena, chunk, what).and_then(|n| as_counts(arena, n));
            let (start, counts) = counts("offsets")
                .zip(counts("sizes"))
                .ok_or(malformed("a chunk has no valid offsets and sizes"))?;
            let (start, counts) = (Shape::from(start), Shape::from(counts));
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
            let unplaced =
                || TrainingError::UnplacedPiece { tensor: name.to_owned(), start: start.to_vec() };
            let is_excess = tensor.pieces.len() - known == locations.map_or(0, HashMap::len);
            let location = locations.filter(|_| !is_excess).and_then(|places| places.get(&start));
            let PieceLocation { file, range, transform } = location.ok_or_else(unplaced)?;
            if let Some(transform) = transform {
                return Err(TrainingError::Transform {
                    tensor: name.to_owned(),
                    transform: transform.clone(),
                });
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

    /// The locations of all pieces.
    fn locations<'a>(
        &mut self,
        arena: &'a Arena,
        top: NodeId,
    ) -> Result<LocationsByName<'a>, &'static str> {
        let entries = attribute(arena, top, "storage_data").and_then(|data| arena.entries(data));
        let mut locations = LocationsByName::new();
        for &(index, info) in entries.ok_or("it has no storage_data")? {
            let text = |object, name| attribute(arena, object, name).and_then(|id| arena.text(id));
            let count = |name| attribute(arena, info, name).and_then(|id| as_count(arena, id));
            let name = text(index, "fqn").ok_or("an entry of storage_data has no name")?;
            // Entries that are not tensors have no first steps.
            let Some(start) = attribute(arena, index, "offset").and_then(|id| as_counts(arena, id))
            else {
                continue;
            };
            let file = text(info, "relative_path").ok_or("an entry of storage_data has no file")?;
            let (offset, len) = count("offset")
                .zip(count("length"))
                .ok_or("an entry of storage_data has no range")?;
            let end = offset.checked_add(len).ok_or("an entry of storage_data has no range")?;
            let file = match self.file_numbers.get(file) {
                Some(&number) => number,
                None => {
                    let number = self.files.len() as u32;
                    self.file_numbers.insert(file.to_owned(), number);
                    self.files.push(file.to_owned());
                    number
                }
            };
            let transforms = attribute(arena, info, "transform_descriptors");
            let transform = transforms
                .and_then(|names| arena.items(names))
                .filter(|names| !names.is_empty())
                .map(|names| arena.text(names[0]).unwrap_or("an unnamed form").to_owned());
            let location = PieceLocation { file, range: offset..end, transform };
            let pieces = locations.entry(name).or_default();
            if pieces.insert(start.into(), location).is_some() {
                return Err("storage_data has a piece twice");
            }
        }
        Ok(locations)
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

/// The keys that lead to a name. Whole numbers are positions in lists.
fn key_texts(arena: &Arena, keys: NodeId) -> Vec<String> {
    let keys = arena.items(keys).unwrap_or_default();
    let text = |&key: &NodeId| match arena.text(key) {
        Some(text) => text.to_owned(),
        None => as_count(arena, key).map(|n| n.to_string()).unwrap_or_default(),
    };
    keys.iter().map(text).collect()
}
