//! Puts the parts together: envelope, nodes, chosen dictionary, places.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use miniz_oxide::inflate::decompress_to_vec_with_limit;

use crate::checkpoint::{Error, Name, Options, Origin, OriginId, Refused, Tensor, TensorFault};
use crate::source::ReadAt;

use super::flatten_names::Chosen;
use super::gate::{self, Turn};
use super::interpret::{self, Value, shown};
use super::legacy;
use super::pickle::{self, Arena, MAX_PICKLE};
use super::select_state_dict;
use super::storage_bounds::{Stored, place};
use super::zip::{self, Archive, Record};

/// The most bytes of compressed storages that are unpacked into memory. torch never compresses;
/// what comes compressed was packed again by hand, and is small or has to be unpacked by hand.
const MAX_UNPACKED: u64 = 64 << 20;

/// The most that the tensors of a file may take, all together, by repeating bytes. What gets saved
/// expanded is a mask or a table of positions, of some megabytes; a file of some bytes must not
/// become a virtual petabyte.
const MAX_EXPANDED: u64 = 4 << 30;

/// What one torch file holds, all of it seen from this file: origin 0 is the file.
#[derive(Debug)]
pub struct Contents {
    /// The tensors.
    pub tensors: Vec<Tensor>,
    /// Storages that had to be unpacked: origin 1 and on.
    pub unpacked: Vec<Origin>,
    /// What was chosen and left out.
    pub notes: Vec<String>,
    /// What cannot be shown.
    pub refused: Vec<Refused>,
}

/// Reads the zip form.
pub fn read_zip(file: &dyn ReadAt, path: &Path, options: &Options) -> Result<Contents, Error> {
    let archive = zip::read(file).map_err(|fault| zip_error(path, fault))?;
    if archive.is_torchscript() {
        return Err(zip_error(path, zip::Fault::TorchScript));
    }
    let record = archive.get(zip::PICKLE).ok_or_else(|| zip_error(path, zip::Fault::NoPickle))?;
    let too_large = || zip_error(path, zip::Fault::Compressed(zip::PICKLE.to_owned()));
    // Its values take more memory than its unpacked bytes, so a larger one would exceed their allowance too.
    let limit = MAX_PICKLE.min(pickle::allowance(record.stored));
    let packed = Packed::read(file, record, limit)?.ok_or_else(too_large)?;
    let swapped = match archive.get("byteorder") {
        None => false,
        Some(record) => match record_bytes(file, path, "byteorder", record, 16)?.as_slice() {
            b"little" => false,
            b"big" => true,
            _ => return Err(zip_error(path, zip::Fault::ByteOrder)),
        },
    };
    // From here on only compressed storages are read.
    let turn = gate::enter(record.size, record.stored);
    let bytes = packed.unpack().ok_or_else(too_large)?;
    let (arena, top, used) =
        pickle::read(&bytes, record.stored).map_err(|fault| pickle_error(path, fault))?;
    if used != bytes.len() {
        return Err(pickle_error(path, pickle::Fault::Trailing(bytes.len() - used)));
    }
    drop(bytes);
    let chosen = choose_in(&arena, top, record.stored, path, options)?;
    let mut records = Records {
        file,
        archive: &archive,
        unpacked: Vec::new(),
        unpacked_len: 0,
        found: BTreeMap::new(),
        turn: Some(turn),
    };
    let mut contents = placed(&arena, chosen, swapped, |key| records.storage(key));
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
pub fn read_legacy(file: &dyn ReadAt, path: &Path, options: &Options) -> Result<Contents, Error> {
    let legacy = legacy::read(file).map_err(|fault| match fault {
        legacy::Fault::Read(error) => Error::Source(error),
        fault => Error::Legacy { path: path.to_path_buf(), fault },
    })?;
    let _turn = gate::enter(legacy.len, legacy.len);
    let chosen = choose_in(&legacy.arena, legacy.top, legacy.len, path, options)?;
    Ok(placed(&legacy.arena, chosen, false, |key| {
        legacy
            .storages
            .get(key)
            .copied()
            .ok_or_else(|| TensorFault::NoStorage { storage: shown(key) })
    }))
}

fn choose_in(
    arena: &Arena,
    top: pickle::Id,
    stored: u64,
    path: &Path,
    options: &Options,
) -> Result<Chosen, Error> {
    select_state_dict::choose(arena, top, stored, options.root_key.as_deref())
        .map_err(|fault| Error::Choice { path: path.to_path_buf(), fault })
}

fn placed(
    arena: &Arena,
    chosen: Chosen,
    swapped: bool,
    mut storage: impl FnMut(&str) -> Result<Stored, TensorFault>,
) -> Contents {
    let Chosen { entries, mut refused, mut notes } = chosen;
    let mut tensors = Vec::with_capacity(entries.len());
    // Tensors of a class that is not torch's, and the first of them.
    let mut foreign: (usize, Option<String>) = (0, None);
    let mut expanded = 0u64;
    let names: Vec<Name> = Name::all(entries.iter().map(|(name, _)| &**name)).collect();
    for ((name, id), shared) in entries.into_iter().zip(names) {
        let Value::Tensor(view) = interpret::value(arena, id) else { continue };
        let tensor = view.and_then(|view| {
            if let Some(class) = &view.class {
                foreign.0 += 1;
                foreign.1.get_or_insert_with(|| format!("`{name}`, {class}"));
            }
            let tensor = place(shared, &view, storage(view.storage.key)?, swapped)?;
            if tensor.bytes.repeats() {
                let bytes = expanded.saturating_add(tensor.bytes.len());
                if bytes > MAX_EXPANDED {
                    return Err(TensorFault::Expansion { bytes, limit: MAX_EXPANDED });
                }
                expanded = bytes;
            }
            Ok(tensor)
        });
        match tensor {
            Ok(tensor) => tensors.push(tensor),
            Err(fault) => refused.push(Refused { name, fault }),
        }
    }
    if let (n, Some(first)) = foreign {
        notes.push(format!(
            "{n} of a class that a library adds to torch (the first: {first}): their values are shown, their attributes are not"
        ));
    }
    Contents { tensors, unpacked: Vec::new(), notes, refused }
}

fn zip_error(path: &Path, fault: zip::Fault) -> Error {
    match fault {
        zip::Fault::Read(error) => Error::Source(error),
        fault => Error::Zip { path: path.to_path_buf(), fault },
    }
}

fn pickle_error(path: &Path, fault: pickle::Fault) -> Error {
    Error::Pickle { path: path.to_path_buf(), fault }
}

/// The bytes of a whole record, unpacked where need be.
fn record_bytes(
    file: &dyn ReadAt,
    path: &Path,
    name: &str,
    record: Record,
    limit: u64,
) -> Result<Vec<u8>, Error> {
    unpack(file, record, limit)?
        .ok_or_else(|| zip_error(path, zip::Fault::Compressed(name.to_owned())))
}

/// `None` where it is larger than the limit or does not unpack to the size that it states.
fn unpack(
    file: &dyn ReadAt,
    record: Record,
    limit: u64,
) -> Result<Option<Vec<u8>>, crate::source::Error> {
    Ok(Packed::read(file, record, limit)?.and_then(Packed::unpack))
}

/// The stored bytes of a record, which may be compressed.
struct Packed {
    bytes: Vec<u8>,
    record: Record,
}

impl Packed {
    /// Reads the bytes; `None` if the record is larger than the limit.
    fn read(
        file: &dyn ReadAt,
        record: Record,
        limit: u64,
    ) -> Result<Option<Packed>, crate::source::Error> {
        if record.stored > limit || record.size > limit {
            return Ok(None);
        }
        let mut bytes = vec![0; record.stored as usize];
        file.read_exact_at(&mut bytes, record.offset)?;
        Ok(Some(Packed { bytes, record }))
    }

    /// Decompresses the bytes; `None` if their size is not the stated one.
    fn unpack(self) -> Option<Vec<u8>> {
        let Packed { bytes, record } = self;
        if !record.deflated {
            return Some(bytes);
        }
        let unpacked = decompress_to_vec_with_limit(&bytes, record.size as usize).ok();
        unpacked.filter(|bytes| bytes.len() as u64 == record.size)
    }
}

/// The storages of an archive, found as tensors ask for them.
struct Records<'a> {
    file: &'a dyn ReadAt,
    archive: &'a Archive,
    unpacked: Vec<Origin>,
    unpacked_len: u64,
    /// Those that were unpacked, so that tensors that share one go on sharing it.
    found: BTreeMap<String, Stored>,
    /// The turn to parse, released before a read of the source.
    turn: Option<Turn>,
}

impl Records<'_> {
    fn storage(&mut self, key: &str) -> Result<Stored, TensorFault> {
        let missing = || TensorFault::NoStorage { storage: shown(key) };
        let record = self.archive.get(&format!("data/{key}")).ok_or_else(missing)?;
        if !record.deflated {
            return Ok(Stored { origin: OriginId(0), start: record.offset, len: record.stored });
        }
        if let Some(&stored) = self.found.get(key) {
            return Ok(stored);
        }
        self.turn = None;
        let compressed = |why| TensorFault::Compressed { storage: shown(key), why };
        let limit = MAX_UNPACKED - self.unpacked_len;
        let bytes = unpack(self.file, record, limit)
            .map_err(|_| compressed("and cannot be read"))?
            .ok_or_else(|| compressed("and too large to hold unpacked, or damaged"))?;
        self.unpacked_len += bytes.len() as u64;
        let stored = Stored {
            origin: OriginId(1 + self.unpacked.len() as u32),
            start: 0,
            len: bytes.len() as u64,
        };
        self.unpacked.push(Origin::Memory(Arc::from(bytes)));
        self.found.insert(key.to_owned(), stored);
        Ok(stored)
    }
}
