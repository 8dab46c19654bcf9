//! Reads a torch file: envelope, pickle, state dict, places of the tensors.

use crate::checkpoint::contents::FileContents;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::refusal::{RefusedEntry, TensorError};
use crate::checkpoint::tensor::TensorName;
use crate::source::ReadAt;

use super::error::TorchError;
use super::gate;
use super::interpret::{PickleValue, interpret};
use super::legacy;
use super::names::shorten_name;
use super::pickle::{self, Arena, MAX_PICKLE_BYTES, PickleError};
use super::state_dict::{Selection, select_state_dict};
use super::storage_bounds::{StorageLocation, locate_tensor};
use super::storage_finder::StorageFinder;
use super::zip::{self, PackedRecord, ZipError};

/// Maximum bytes that tensors of one file may have by repeating bytes, all together. What training saves
/// expanded is a mask or a table of positions, of some megabytes. A file of some bytes must not become a
/// virtual petabyte.
const MAX_EXPANDED_BYTES: u64 = 4 << 30;

/// Maximum bytes of the record that states the byte order.
const MAX_BYTE_ORDER_BYTES: u64 = 16;

/// Reads a file of the zip form.
pub fn read_zip(file: &dyn ReadAt, options: &ParseOptions) -> Result<FileContents, TorchError> {
    let archive = zip::read_archive(file)?;
    if archive.is_torchscript() {
        return Err(TorchError::TorchScript);
    }
    let record = archive.get(zip::PICKLE).ok_or(ZipError::NoPickle { has_arrays: false })?;
    let too_large = || ZipError::Compressed(zip::PICKLE.to_owned());
    // Its values take more memory than its unpacked bytes, so a larger pickle would exceed their allowance too.
    let limit = MAX_PICKLE_BYTES.min(pickle::memory_allowance(record.packed_bytes));
    let packed = PackedRecord::read(file, record, limit)?.ok_or_else(too_large)?;
    let is_swapped = match archive.get("byteorder") {
        None => false,
        Some(record) => {
            let bytes = zip::read_record(file, record, MAX_BYTE_ORDER_BYTES)?
                .ok_or_else(|| ZipError::Compressed("byteorder".to_owned()))?;
            match bytes.as_slice() {
                b"little" => false,
                b"big" => true,
                _ => return Err(ZipError::ByteOrder.into()),
            }
        }
    };
    // From here on, the source is read for compressed storages only.
    let permit = gate::acquire(record.unpacked_bytes, record.packed_bytes);
    let bytes = packed.unpack().ok_or_else(too_large)?;
    let (arena, top, used) = pickle::read_pickle(&bytes, record.packed_bytes)?;
    if used != bytes.len() {
        return Err(PickleError::TrailingBytes(bytes.len() - used).into());
    }
    drop(bytes);
    let selection =
        select_state_dict(&arena, top, record.packed_bytes, options.root_key.as_deref())?;
    let mut finder = StorageFinder::new(file, &archive, permit);
    let mut contents = locate_tensors(&arena, selection, is_swapped, |key| finder.find(key));
    if is_swapped {
        contents
            .notes
            .push("written on a big-endian machine: bytes are swapped as they are read".to_owned());
    }
    contents.unpacked = finder.into_unpacked();
    if !contents.unpacked.is_empty() {
        let n = contents.unpacked.len();
        contents.notes.push(format!("{n} compressed storages are held unpacked in memory"));
    }
    Ok(contents)
}

/// Reads a file of the older form.
pub fn read_legacy(file: &dyn ReadAt, options: &ParseOptions) -> Result<FileContents, TorchError> {
    let legacy = legacy::read_legacy_file(file)?;
    let _permit = gate::acquire(legacy.pickle_bytes, legacy.pickle_bytes);
    let root_key = options.root_key.as_deref();
    let selection = select_state_dict(&legacy.arena, legacy.top, legacy.pickle_bytes, root_key)?;
    Ok(locate_tensors(&legacy.arena, selection, false, |key| {
        let missing = || TensorError::MissingStorage { storage: shorten_name(key) };
        legacy.storages.get(key).copied().ok_or_else(missing)
    }))
}

/// Turns the selected entries into tensors with the places of their bytes.
fn locate_tensors(
    arena: &Arena,
    selection: Selection,
    is_swapped: bool,
    mut find_storage: impl FnMut(&str) -> Result<StorageLocation, TensorError>,
) -> FileContents {
    let Selection { entries, mut refused, obvious_choices, mut notes } = selection;
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
            let storage = find_storage(view.storage.key)?;
            let tensor = locate_tensor(packed_name, &view, storage, is_swapped)?;
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
    FileContents { tensors, unpacked: Vec::new(), metadata: None, obvious_choices, notes, refused }
}
