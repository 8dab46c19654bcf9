//! Names the entries of the selected dictionary. Nested names are joined with dots.

use crate::checkpoint::contents::MAX_TENSOR_COUNT;
use crate::checkpoint::refusal::{RESERVED_NAME, RefusedEntry, TensorError};
use crate::checkpoint::safetensors::MAX_HEADER_BYTES;
use crate::checkpoint::torch::interpret::{PickleValue, interpret};
use crate::checkpoint::torch::names::key_text;
use crate::checkpoint::torch::pickle::{Arena, NodeId};
use crate::checkpoint::truncated_list::TruncatedList;

use super::error::{FLAT_PARAMETER, SelectError};
use super::reachability::Reachability;

/// Maximum number of values that are visited to name entries. A dictionary that is used in many places is visited in
/// each. Without this limit and the limits of bytes, a small pickle could have more names than memory can hold.
const MAX_VISIT_COUNT: usize = 4 * MAX_TENSOR_COUNT;

/// Minimum bytes of an entry in a header beside its name:
/// `:{"dtype":"F32","shape":[],"data_offsets":[0,0]},` and the quotes of the name.
const MIN_ENTRY_BYTES: usize = 50;

/// Bytes that names may take in a header, however small the pickle is in its file.
const MIN_NAMES_BYTES: u64 = 1 << 20;

/// Bytes that names may take for each byte of the pickle in its file. Training checkpoints need less than 1, or 5 if
/// compressed. A tensor that appears in thousands of places needs 50 for each place.
const MAX_NAME_BYTES_PER_PICKLE_BYTE: u64 = 16;

/// The entries of the selected dictionary.
#[derive(Debug, Default)]
pub struct Selection {
    /// The tensors: name and value.
    pub entries: Vec<(String, NodeId)>,
    /// Pieces of tensors in one rank's file.
    pub rank_pieces: Vec<RankPieceEntry>,
    /// Entries that cannot be shown.
    pub refused: Vec<RefusedEntry>,
    /// Choices that need no note, in words: only training state is left out.
    pub obvious_choices: Vec<String>,
    /// Other choices, and what was left out, in words.
    pub notes: Vec<String>,
}

/// An entry that is a piece of a tensor in one rank's file.
#[derive(Debug)]
pub struct RankPieceEntry {
    pub name: String,
    pub value: NodeId,
    /// torch's class for it, or [`FLAT_PARAMETER`].
    pub class: &'static str,
}

/// Gives every entry its dotted name.
pub struct NameFlattener<'a> {
    arena: &'a Arena,
    reachability: &'a Reachability,
    selection: Selection,
    left_out: TruncatedList,
    visits: usize,
    /// Bytes that further names may take in a header.
    free_bytes: u64,
}

impl<'a> NameFlattener<'a> {
    /// Adds to a selection. The pickle takes `stored_len` bytes in its file.
    pub fn new(
        arena: &'a Arena,
        reachability: &'a Reachability,
        selection: Selection,
        stored_len: u64,
    ) -> Self {
        let for_pickle = stored_len.saturating_mul(MAX_NAME_BYTES_PER_PICKLE_BYTE);
        let free_bytes = MAX_HEADER_BYTES.min(MIN_NAMES_BYTES.saturating_add(for_pickle));
        let left_out = TruncatedList::default();
        NameFlattener { arena, reachability, selection, left_out, visits: 0, free_bytes }
    }

    /// The selection, and the names that are left out.
    pub fn finish(self) -> (Selection, TruncatedList) {
        (self.selection, self.left_out)
    }

    /// Names the entries of a dictionary, list or tuple, and the values inside them.
    pub fn flatten(&mut self, prefix: &str, id: NodeId, depth: usize) -> Result<(), SelectError> {
        let depth = depth.checked_sub(1).ok_or(SelectError::TooDeep)?;
        if let Some(entries) = self.arena.entries(id) {
            for (index, &(key, value)) in entries.iter().enumerate() {
                match key_text(self.arena, key) {
                    Some(key) => self.flatten_entry(prefix, &key, value, depth)?,
                    None if self.reachability.is_plain(value) => {
                        self.left_out.add(|| format!("{prefix}?"))
                    }
                    None => {
                        self.add(format!("{prefix}?{index}"), value, Some(TensorError::InvalidKey))?
                    }
                }
            }
        } else {
            for (index, &value) in self.arena.items(id).unwrap_or_default().iter().enumerate() {
                self.flatten_entry(prefix, &index.to_string(), value, depth)?;
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
        match interpret(self.arena, id) {
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

    /// Charges for a name. Without the charge, a small pickle could have names without end.
    fn take_bytes(&mut self, bytes: usize) -> Result<(), SelectError> {
        self.free_bytes = self.free_bytes.checked_sub(bytes as u64).ok_or(SelectError::TooLong)?;
        Ok(())
    }

    /// Adds a tensor, or a refused entry.
    pub fn add(
        &mut self,
        name: String,
        id: NodeId,
        error: Option<TensorError>,
    ) -> Result<(), SelectError> {
        self.take_bytes(MIN_ENTRY_BYTES + name.len())?;
        let error = if name == RESERVED_NAME { Some(TensorError::ReservedName) } else { error };
        match error {
            None if is_flat_parameter(&name) => {
                let class = FLAT_PARAMETER;
                self.selection.rank_pieces.push(RankPieceEntry { name, value: id, class });
            }
            None => self.selection.entries.push((name, id)),
            Some(TensorError::RankPiece { class }) => {
                let class = if is_flat_parameter(&name) { FLAT_PARAMETER } else { class };
                self.selection.rank_pieces.push(RankPieceEntry { name, value: id, class });
            }
            Some(error) => self.selection.refused.push(RefusedEntry { name, error }),
        }
        Ok(())
    }
}

fn is_flat_parameter(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("_flat_param" | "flat_param"))
}
