//! Where the pieces of tensors lie, as a table records it (`storage_data`).

use std::collections::HashMap;
use std::ops::Range;

use crate::checkpoint::tensor::Shape;
use crate::checkpoint::torch::pickle::{Arena, NodeId};
use crate::checkpoint::torch::{as_count, attribute};

use super::part_budget::PartBudget;

/// Where a piece lies, and how its bytes were changed when they were written.
#[derive(Debug)]
pub struct PieceLocation {
    /// The number of its tensor's name.
    name: u32,
    start: Shape,
    pub file: u32,
    pub range: Range<u64>,
    /// The name of the change of its bytes.
    pub transform: Option<NodeId>,
}

/// The locations of pieces, by the names of tensors and the first steps of the pieces.
#[derive(Debug, Default)]
pub struct PieceLocations<'a> {
    name_numbers: HashMap<&'a str, u32>,
    /// Ordered by name number and first steps. A map for each tensor would take more memory than all else of a table.
    pieces: Vec<PieceLocation>,
    /// The index of the first piece of each name, by its number, and the number of pieces.
    starts: Vec<u32>,
}

impl<'a> PieceLocations<'a> {
    /// Reads the locations in a table. `number_file` gives each file a number, and learns where its entries
    /// end: those that are not tensors too.
    pub fn read(
        arena: &'a Arena,
        table: NodeId,
        budget: &mut PartBudget,
        mut number_file: impl FnMut(&str, u64) -> u32,
    ) -> Result<PieceLocations<'a>, &'static str> {
        let entries = attribute(arena, table, "storage_data").and_then(|data| arena.entries(data));
        let entries = entries.ok_or("it has no storage_data")?;
        let mut locations = PieceLocations::default();
        for &(index, info) in entries {
            let text = |object, name| attribute(arena, object, name).and_then(|id| arena.text(id));
            let count = |name| attribute(arena, info, name).and_then(|id| as_count(arena, id));
            let name = text(index, "fqn").ok_or("an entry of storage_data has no name")?;
            let file = text(info, "relative_path").ok_or("an entry of storage_data has no file")?;
            let (offset, len) = count("offset")
                .zip(count("length"))
                .ok_or("an entry of storage_data has no range")?;
            let end = offset.checked_add(len).ok_or("an entry of storage_data has no range")?;
            let file = number_file(file, end);
            // Entries that are not tensors have no first steps.
            let offsets = attribute(arena, index, "offset");
            let Some(start) = offsets.and_then(|id| budget.shape(arena, id).transpose()) else {
                continue;
            };
            let transform = attribute(arena, info, "transform_descriptors")
                .and_then(|names| arena.items(names)?.first().copied());
            let next = locations.name_numbers.len() as u32;
            let name = *locations.name_numbers.entry(name).or_insert(next);
            let location =
                PieceLocation { name, start: start?, file, range: offset..end, transform };
            locations.pieces.push(location);
        }
        let key = |piece: &PieceLocation| (piece.name, piece.start.clone());
        locations.pieces.sort_unstable_by(|a, b| (a.name, &a.start).cmp(&(b.name, &b.start)));
        if locations.pieces.windows(2).any(|pair| key(&pair[0]) == key(&pair[1])) {
            return Err("storage_data has a piece twice");
        }
        for (n, piece) in locations.pieces.iter().enumerate() {
            if piece.name as usize == locations.starts.len() {
                locations.starts.push(n as u32);
            }
        }
        locations.starts.push(locations.pieces.len() as u32);
        Ok(locations)
    }

    /// The locations of a tensor's pieces, by their first steps.
    pub fn of_tensor(&self, name: &str) -> &[PieceLocation] {
        let Some(&number) = self.name_numbers.get(name) else { return &[] };
        let bounds = &self.starts[number as usize..][..2];
        &self.pieces[bounds[0] as usize..bounds[1] as usize]
    }
}

/// The location of the piece with these first steps, among those of its tensor.
pub fn find_location<'a>(all: &'a [PieceLocation], start: &Shape) -> Option<&'a PieceLocation> {
    all.binary_search_by(|piece| piece.start.cmp(start)).ok().map(|n| &all[n])
}
