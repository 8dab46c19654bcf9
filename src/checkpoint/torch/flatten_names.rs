//! Gives the entries of the chosen dictionary their names, nested ones joined with dots.

use crate::checkpoint::truncated_list::TruncatedList;
use crate::checkpoint::{MAX_HEADER_BYTES, MAX_TENSOR_COUNT, RefusedEntry, TensorError};

use super::interpret::{self, PickleValue, key_text};
use super::pickle::{Arena, NodeId};
use super::reachability::Reachability;
use super::select_error::SelectError;

/// Values looked at while naming entries. A dictionary that is used in many places is looked at
/// in each, and only this and the next keep a small pickle from having more names than memory can hold.
const MAX_VISIT_COUNT: usize = 4 * MAX_TENSOR_COUNT;

/// Bytes that an entry takes in a header beside its name, at the least:
/// `:{"dtype":"F32","shape":[],"data_offsets":[0,0]},` and the quotes of the name.
const MIN_ENTRY_BYTES: usize = 50;

/// Bytes that names may take in a header, whatever the size of the pickle in its file.
const MIN_NAMES_BYTES: u64 = 1 << 20;

/// Bytes that names may take for each byte that the pickle takes in its file. Training checkpoints need less than 1,
/// or 5 if compressed. A tensor that appears in thousands of places needs 50 for each place.
const MAX_NAME_BYTES_PER_PICKLE_BYTE: u64 = 16;

/// The entries of the chosen dictionary.
#[derive(Debug, Default)]
pub struct Selection {
    /// Those that are tensors: name and value.
    pub entries: Vec<(String, NodeId)>,
    pub refused: Vec<RefusedEntry>,
    pub notes: Vec<String>,
}

/// Gives every entry its dotted name.
pub struct NameFlattener<'a> {
    arena: &'a Arena,
    reachability: &'a Reachability,
    selection: Selection,
    left_out: TruncatedList,
    visits: usize,
    /// Bytes of a header that the names so far leave.
    free_bytes: u64,
}

impl<'a> NameFlattener<'a> {
    pub fn new(arena: &'a Arena, census: &'a Reachability, chosen: Selection, stored: u64) -> Self {
        let room = MAX_HEADER_BYTES.min(
            MIN_NAMES_BYTES.saturating_add(stored.saturating_mul(MAX_NAME_BYTES_PER_PICKLE_BYTE)),
        );
        NameFlattener {
            arena,
            reachability: census,
            selection: chosen,
            left_out: TruncatedList::default(),
            visits: 0,
            free_bytes: room,
        }
    }

    /// What was named, and what was left out.
    pub fn finish(self) -> (Selection, TruncatedList) {
        (self.selection, self.left_out)
    }

    /// Names the entries of a dictionary, list or tuple, and what is inside them.
    pub fn flatten(&mut self, prefix: &str, at: NodeId, depth: usize) -> Result<(), SelectError> {
        let depth = depth.checked_sub(1).ok_or(SelectError::TooDeep)?;
        if let Some(entries) = self.arena.entries(at) {
            for (place, &(key, value)) in entries.iter().enumerate() {
                match key_text(self.arena, key) {
                    Some(key) => self.flatten_entry(prefix, &key, value, depth)?,
                    None if self.reachability.is_plain(value) => {
                        self.left_out.add(|| format!("{prefix}?"))
                    }
                    None => {
                        self.add(format!("{prefix}?{place}"), value, Some(TensorError::InvalidKey))?
                    }
                }
            }
        } else {
            for (place, &value) in self.arena.items(at).unwrap_or_default().iter().enumerate() {
                self.flatten_entry(prefix, &place.to_string(), value, depth)?;
            }
        }
        Ok(())
    }

    fn flatten_entry(
        &mut self,
        prefix: &str,
        key: &str,
        id: NodeId,
        depth: usize,
    ) -> Result<(), SelectError> {
        self.visits += 1;
        if self.visits > MAX_VISIT_COUNT {
            return Err(SelectError::TooDeep);
        }
        let name = || format!("{prefix}{key}");
        match interpret::value(self.arena, id) {
            PickleValue::Tensor(tensor) => self.add(name(), id, tensor.err()),
            PickleValue::Object(class) => self.add(name(), id, Some(TensorError::Object { class })),
            _ if self.reachability.is_plain(id) => {
                self.left_out.add(name);
                Ok(())
            }
            _ => {
                let prefix = name() + ".";
                self.take_bytes(prefix.len())?;
                self.flatten(&prefix, id, depth)
            }
        }
    }

    /// Every name that is put together takes room, or a small pickle could ask for endless ones.
    fn take_bytes(&mut self, bytes: usize) -> Result<(), SelectError> {
        self.free_bytes = self.free_bytes.checked_sub(bytes as u64).ok_or(SelectError::TooLong)?;
        Ok(())
    }

    /// Adds a tensor, or what is refused.
    pub fn add(
        &mut self,
        name: String,
        id: NodeId,
        fault: Option<TensorError>,
    ) -> Result<(), SelectError> {
        self.take_bytes(MIN_ENTRY_BYTES + name.len())?;
        let fault = if name == "__metadata__" { Some(TensorError::ReservedName) } else { fault };
        match fault {
            None => self.selection.entries.push((name, id)),
            Some(fault) => self.selection.refused.push(RefusedEntry { name, fault }),
        }
        Ok(())
    }
}
