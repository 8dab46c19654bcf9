//! Reads a torch file: envelope, pickle, state dict, places of the tensors.

use crate::checkpoint::contents::FileContents;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::refusal::{RefusedEntry, TensorError};
use crate::checkpoint::tensor::{Tensor, TensorName};
use crate::source::ReadAt;

use super::error::TorchError;
use super::interpret::{PickleValue, interpret};
use super::pickle::Arena;
use super::state_dict::{SelectError, Selection, select_state_dict};
use super::tensor_view::TensorView;
use super::values::TorchValues;

/// Maximum bytes that tensors of one file may have by repeating bytes, all together. What training saves
/// expanded is a mask or a table of positions, of some megabytes. A file of some bytes must not become a
/// virtual petabyte.
const MAX_EXPANDED_BYTES: u64 = 4 << 30;

/// Reads a file of the zip form.
pub fn read_zip(file: &dyn ReadAt, options: &ParseOptions) -> Result<FileContents, TorchError> {
    let TorchValues { arena, top, pickle_bytes, mut storages } = TorchValues::read_zip(file)?;
    let selection = select_state_dict(&arena, top, pickle_bytes, options.root_key.as_deref())?;
    let mut contents = locate_tensors(&arena, selection, |name, view| storages.locate(name, view))?;
    if storages.is_swapped {
        contents
            .notes
            .push("written on a big-endian machine: bytes are swapped as they are read".to_owned());
    }
    contents.unpacked = storages.into_unpacked();
    if !contents.unpacked.is_empty() {
        let n = contents.unpacked.len();
        contents.notes.push(format!("{n} compressed storages are held unpacked in memory"));
    }
    Ok(contents)
}

/// Reads a file of the older form.
pub fn read_legacy(file: &dyn ReadAt, options: &ParseOptions) -> Result<FileContents, TorchError> {
    let TorchValues { arena, top, pickle_bytes, mut storages } = TorchValues::read_legacy(file)?;
    let selection = select_state_dict(&arena, top, pickle_bytes, options.root_key.as_deref())?;
    locate_tensors(&arena, selection, |name, view| storages.locate(name, view))
}

/// Turns the selected entries into tensors with the places of their bytes.
fn locate_tensors(
    arena: &Arena,
    selection: Selection,
    mut locate: impl FnMut(TensorName, &TensorView<'_>) -> Result<Tensor, TensorError>,
) -> Result<FileContents, TorchError> {
    let Selection { entries, rank_pieces, mut refused, obvious_choices, mut notes } = selection;
    if let Some(piece) = rank_pieces.into_iter().next() {
        return Err(SelectError::RankPieces { name: piece.name, kind: piece.class }.into());
    }
    let mut tensors = Vec::with_capacity(entries.len());
    // The number of tensors of a class that is not torch's, and the first of them.
    let mut foreign: (usize, Option<String>) = (0, None);
    let mut expanded_bytes = 0u64;
    let names: Vec<TensorName> =
        TensorName::pack(entries.iter().map(|(name, _)| &**name)).collect();
    for ((name, id), packed_name) in entries.into_iter().zip(names) {
        let PickleValue::Tensor(view) = interpret(arena, id) else { continue };
        let tensor = view.and_then(|view| {
            if let Some(class) = &view.class {
                foreign.0 += 1;
                foreign.1.get_or_insert_with(|| format!("`{name}`, {class}"));
            }
            let tensor = locate(packed_name, &view)?;
            if tensor.bytes.has_repeats() {
                let bytes = expanded_bytes.saturating_add(tensor.bytes.len());
                if bytes > MAX_EXPANDED_BYTES {
                    return Err(TensorError::Expansion { bytes, limit: MAX_EXPANDED_BYTES });
                }
                expanded_bytes = bytes;
            }
            Ok(tensor)
        });
        match tensor {
            Ok(tensor) => tensors.push(tensor),
            Err(error) => refused.push(RefusedEntry { name, error }),
        }
    }
    if let (n, Some(first)) = foreign {
        notes.push(format!(
            "{n} of a class that a library adds to torch (the first: {first}): their values are shown, their attributes are not"
        ));
    }
    Ok(FileContents {
        tensors,
        unpacked: Vec::new(),
        metadata: None,
        header: None,
        obvious_choices,
        notes,
        refused,
    })
}
