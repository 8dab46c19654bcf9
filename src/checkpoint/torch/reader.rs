//! Puts the parts together: envelope, nodes, chosen dictionary, places.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use miniz_oxide::inflate::decompress_to_vec_with_limit;

use crate::checkpoint::{
    CheckpointError, Origin, OriginId, ParseOptions, RefusedEntry, Tensor, TensorError, TensorName,
};
use crate::source::ReadAt;

use super::flatten_names::Selection;
use super::gate::{self, ParsePermit};
use super::interpret::{self, PickleValue, shorten_name};
use super::legacy;
use super::pickle::{self, Arena, MAX_PICKLE_BYTES};
use super::select_state_dict;
use super::storage_bounds::{StorageLocation, locate_tensor};
use super::zip::{self, ZipArchive, ZipRecord};

/// The most bytes of compressed storages that are unpacked into memory. torch never compresses;
/// what comes compressed was packed again by hand, and is small or has to be unpacked by hand.
const MAX_UNPACKED_BYTES: u64 = 64 << 20;

/// The most that the tensors of a file may take, all together, by repeating bytes. What gets saved
/// expanded is a mask or a table of positions, of some megabytes; a file of some bytes must not
/// become a virtual petabyte.
const MAX_EXPANDED_BYTES: u64 = 4 << 30;

/// What one torch file holds, all of it seen from this file: origin 0 is the file.
#[derive(Debug)]
pub struct FileContents {
    /// The tensors.
    pub tensors: Vec<Tensor>,
    /// Storages that had to be unpacked: origin 1 and on.
    pub unpacked: Vec<Origin>,
    /// What was chosen and left out.
    pub notes: Vec<String>,
    /// What cannot be shown.
    pub refused: Vec<RefusedEntry>,
}

/// Reads the zip form.
pub fn read_zip(
    file: &dyn ReadAt,
    path: &Path,
    options: &ParseOptions,
) -> Result<FileContents, CheckpointError> {
    let archive = zip::read_archive(file).map_err(|fault| zip_error(path, fault))?;
    if archive.is_torchscript() {
        return Err(zip_error(path, zip::ZipError::TorchScript));
    }
    let record =
        archive.get(zip::PICKLE).ok_or_else(|| zip_error(path, zip::ZipError::NoPickle))?;
    let too_large = || zip_error(path, zip::ZipError::Compressed(zip::PICKLE.to_owned()));
    // Its values take more memory than its unpacked bytes, so a larger one would exceed their allowance too.
    let limit = MAX_PICKLE_BYTES.min(pickle::memory_allowance(record.packed_bytes));
    let packed = PackedRecord::read(file, record, limit)?.ok_or_else(too_large)?;
    let swapped = match archive.get("byteorder") {
        None => false,
        Some(record) => match require_record(file, path, "byteorder", record, 16)?.as_slice() {
            b"little" => false,
            b"big" => true,
            _ => return Err(zip_error(path, zip::ZipError::ByteOrder)),
        },
    };
    // From here on only compressed storages are read.
    let turn = gate::acquire(record.unpacked_bytes, record.packed_bytes);
    let bytes = packed.unpack().ok_or_else(too_large)?;
    let (arena, top, used) = pickle::read_pickle(&bytes, record.packed_bytes)
        .map_err(|fault| pickle_error(path, fault))?;
    if used != bytes.len() {
        return Err(pickle_error(path, pickle::PickleError::TrailingBytes(bytes.len() - used)));
    }
    drop(bytes);
    let chosen = select(&arena, top, record.packed_bytes, path, options)?;
    let mut records = StorageFinder {
        file,
        archive: &archive,
        unpacked: Vec::new(),
        unpacked_bytes: 0,
        unpacked_storages: BTreeMap::new(),
        permit: Some(turn),
    };
    let mut contents = locate_tensors(&arena, chosen, swapped, |key| records.storage(key));
    if swapped {
        contents.notes.push(
            "written on a big-endian machine: bytes are turned round as they are read".to_owned(),
        );
    }
    if !records.unpacked.is_empty() {
        let n = records.unpacked.len();
        contents.notes.push(format!("{n} compressed storages are held unpacked in memory"));
    }
    contents.unpacked = records.unpacked;
    Ok(contents)
}

/// Reads the older form.
pub fn read_legacy(
    file: &dyn ReadAt,
    path: &Path,
    options: &ParseOptions,
) -> Result<FileContents, CheckpointError> {
    let legacy = legacy::read_legacy_file(file).map_err(|fault| match fault {
        legacy::LegacyError::Source(error) => CheckpointError::Source(error),
        fault => CheckpointError::Legacy { path: path.to_path_buf(), fault },
    })?;
    let _turn = gate::acquire(legacy.pickle_bytes, legacy.pickle_bytes);
    let chosen = select(&legacy.arena, legacy.top, legacy.pickle_bytes, path, options)?;
    Ok(locate_tensors(&legacy.arena, chosen, false, |key| {
        legacy
            .storages
            .get(key)
            .copied()
            .ok_or_else(|| TensorError::MissingStorage { storage: shorten_name(key) })
    }))
}

fn select(
    arena: &Arena,
    top: pickle::NodeId,
    stored: u64,
    path: &Path,
    options: &ParseOptions,
) -> Result<Selection, CheckpointError> {
    select_state_dict::select_state_dict(arena, top, stored, options.root_key.as_deref())
        .map_err(|fault| CheckpointError::Selection { path: path.to_path_buf(), fault })
}

fn locate_tensors(
    arena: &Arena,
    chosen: Selection,
    swapped: bool,
    mut storage: impl FnMut(&str) -> Result<StorageLocation, TensorError>,
) -> FileContents {
    let Selection { entries, mut refused, mut notes } = chosen;
    let mut tensors = Vec::with_capacity(entries.len());
    // Tensors of a class that is not torch's, and the first of them.
    let mut foreign: (usize, Option<String>) = (0, None);
    let mut expanded = 0u64;
    let names: Vec<TensorName> =
        TensorName::pack(entries.iter().map(|(name, _)| &**name)).collect();
    for ((name, id), shared) in entries.into_iter().zip(names) {
        let PickleValue::Tensor(view) = interpret::value(arena, id) else { continue };
        let tensor = view.and_then(|view| {
            if let Some(class) = &view.class {
                foreign.0 += 1;
                foreign.1.get_or_insert_with(|| format!("`{name}`, {class}"));
            }
            let tensor = locate_tensor(shared, &view, storage(view.storage.key)?, swapped)?;
            if tensor.bytes.has_repeats() {
                let bytes = expanded.saturating_add(tensor.bytes.len());
                if bytes > MAX_EXPANDED_BYTES {
                    return Err(TensorError::Expansion { bytes, limit: MAX_EXPANDED_BYTES });
                }
                expanded = bytes;
            }
            Ok(tensor)
        });
        match tensor {
            Ok(tensor) => tensors.push(tensor),
            Err(fault) => refused.push(RefusedEntry { name, fault }),
        }
    }
    if let (n, Some(first)) = foreign {
        notes.push(format!(
            "{n} of a class that a library adds to torch (the first: {first}): their values are shown, their attributes are not"
        ));
    }
    FileContents { tensors, unpacked: Vec::new(), notes, refused }
}

fn zip_error(path: &Path, fault: zip::ZipError) -> CheckpointError {
    match fault {
        zip::ZipError::Source(error) => CheckpointError::Source(error),
        fault => CheckpointError::Zip { path: path.to_path_buf(), fault },
    }
}

fn pickle_error(path: &Path, fault: pickle::PickleError) -> CheckpointError {
    CheckpointError::Pickle { path: path.to_path_buf(), fault }
}

/// The bytes of a whole record, unpacked where need be.
fn require_record(
    file: &dyn ReadAt,
    path: &Path,
    name: &str,
    record: ZipRecord,
    limit: u64,
) -> Result<Vec<u8>, CheckpointError> {
    read_record(file, record, limit)?
        .ok_or_else(|| zip_error(path, zip::ZipError::Compressed(name.to_owned())))
}

/// `None` where it is larger than the limit or does not unpack to the size that it states.
fn read_record(
    file: &dyn ReadAt,
    record: ZipRecord,
    limit: u64,
) -> Result<Option<Vec<u8>>, crate::source::SourceError> {
    Ok(PackedRecord::read(file, record, limit)?.and_then(PackedRecord::unpack))
}

/// The stored bytes of a record, which may be compressed.
struct PackedRecord {
    bytes: Vec<u8>,
    record: ZipRecord,
}

impl PackedRecord {
    /// Reads the bytes; `None` if the record is larger than the limit.
    fn read(
        file: &dyn ReadAt,
        record: ZipRecord,
        limit: u64,
    ) -> Result<Option<PackedRecord>, crate::source::SourceError> {
        if record.packed_bytes > limit || record.unpacked_bytes > limit {
            return Ok(None);
        }
        let mut bytes = vec![0; record.packed_bytes as usize];
        file.read_exact_at(&mut bytes, record.offset)?;
        Ok(Some(PackedRecord { bytes, record }))
    }

    /// Decompresses the bytes; `None` if their size is not the stated one.
    fn unpack(self) -> Option<Vec<u8>> {
        let PackedRecord { bytes, record } = self;
        if !record.deflated {
            return Some(bytes);
        }
        let unpacked = decompress_to_vec_with_limit(&bytes, record.unpacked_bytes as usize).ok();
        unpacked.filter(|bytes| bytes.len() as u64 == record.unpacked_bytes)
    }
}

/// The storages of an archive, found as tensors ask for them.
struct StorageFinder<'a> {
    file: &'a dyn ReadAt,
    archive: &'a ZipArchive,
    unpacked: Vec<Origin>,
    unpacked_bytes: u64,
    /// Those that were unpacked, so that tensors that share one go on sharing it.
    unpacked_storages: BTreeMap<String, StorageLocation>,
    /// The turn to parse, released before a read of the source.
    permit: Option<ParsePermit>,
}

impl StorageFinder<'_> {
    fn storage(&mut self, key: &str) -> Result<StorageLocation, TensorError> {
        let missing = || TensorError::MissingStorage { storage: shorten_name(key) };
        let record = self.archive.get(&format!("data/{key}")).ok_or_else(missing)?;
        if !record.deflated {
            return Ok(StorageLocation {
                origin: OriginId(0),
                start: record.offset,
                len: record.packed_bytes,
            });
        }
        if let Some(&stored) = self.unpacked_storages.get(key) {
            return Ok(stored);
        }
        self.permit = None;
        let compressed = |why| TensorError::Compressed { storage: shorten_name(key), why };
        let limit = MAX_UNPACKED_BYTES - self.unpacked_bytes;
        let bytes = read_record(self.file, record, limit)
            .map_err(|_| compressed("and cannot be read"))?
            .ok_or_else(|| compressed("and too large to hold unpacked, or damaged"))?;
        self.unpacked_bytes += bytes.len() as u64;
        let stored = StorageLocation {
            origin: OriginId(1 + self.unpacked.len() as u32),
            start: 0,
            len: bytes.len() as u64,
        };
        self.unpacked.push(Origin::Memory(Arc::from(bytes)));
        self.unpacked_storages.insert(key.to_owned(), stored);
        Ok(stored)
    }
}
