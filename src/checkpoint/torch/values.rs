//! The values of a torch file, and the places of the tensors among them.

use std::collections::HashMap;

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::{Origin, Tensor, TensorName};
use crate::source::ReadAt;

use super::error::TorchError;
use super::gate::{self, ParsePermit};
use super::interpret::{PickleValue, interpret};
use super::legacy;
use super::names::shorten_name;
use super::pickle::{self, Arena, MAX_PICKLE_BYTES, NodeId, PickleError};
use super::storage_bounds::{StorageLocation, locate_tensor};
use super::storage_finder::StorageFinder;
use super::tensor_view::TensorView;
use super::zip::{self, PackedRecord, ZipError};

/// Maximum bytes of the record that states the byte order.
const MAX_BYTE_ORDER_BYTES: u64 = 16;

/// The first byte of a file of the older form, which begins with a pickle. A zip archive begins with another.
const PICKLE_START: u8 = 0x80;

/// The values in the pickle of a torch file, and the storages in the file.
pub struct TorchValues<'a> {
    pub arena: Arena,
    /// The value that the pickle stands for.
    pub top: NodeId,
    /// Bytes of the pickle in the file.
    pub pickle_bytes: u64,
    /// The storages of its tensors.
    pub storages: TorchStorages<'a>,
}

/// The storages of a torch file.
pub struct TorchStorages<'a> {
    /// Whether their bytes are in the other byte order.
    pub is_swapped: bool,
    places: StoragePlaces<'a>,
}

/// Where the storages of a file are.
enum StoragePlaces<'a> {
    Zip(StorageFinder<'a>),
    /// By key. The permit bounds the memory of the values.
    Legacy {
        storages: HashMap<String, StorageLocation>,
        _permit: ParsePermit,
    },
}

impl<'a> TorchValues<'a> {
    /// Reads the values of a file of either form.
    pub fn read(file: &'a dyn ReadAt) -> Result<TorchValues<'a>, TorchError> {
        let mut first = [0];
        if file.size() > 0 {
            file.read_exact_at(&mut first, 0)?;
        }
        match first {
            [PICKLE_START] => TorchValues::read_legacy(file),
            _ => TorchValues::read_zip(file),
        }
    }

    /// Reads the values of a file of the older form.
    pub fn read_legacy(file: &dyn ReadAt) -> Result<TorchValues<'a>, TorchError> {
        let file = legacy::read_legacy_file(file)?;
        let permit = gate::acquire(file.pickle_bytes, file.pickle_bytes);
        let legacy::LegacyFile { arena, top, storages, pickle_bytes } = file;
        let places = StoragePlaces::Legacy { storages, _permit: permit };
        let storages = TorchStorages { is_swapped: false, places };
        Ok(TorchValues { arena, top, pickle_bytes, storages })
    }

    /// Reads the values of a file of the zip form.
    pub fn read_zip(file: &'a dyn ReadAt) -> Result<TorchValues<'a>, TorchError> {
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
        let places = StoragePlaces::Zip(StorageFinder::new(file, archive, permit));
        let storages = TorchStorages { is_swapped, places };
        Ok(TorchValues { arena, top, pickle_bytes: record.packed_bytes, storages })
    }
}

impl TorchStorages<'_> {
    /// The tensor that a value is. Origin 0 is the file.
    pub fn tensor(
        &mut self,
        arena: &Arena,
        name: TensorName,
        id: NodeId,
    ) -> Result<Tensor, TensorError> {
        match interpret(arena, id) {
            PickleValue::Tensor(view) => self.locate(name, &view?),
            _ => Err(TensorError::Malformed { what: "it is not a tensor" }),
        }
    }

    /// The tensor of a view of a storage. Origin 0 is the file.
    pub fn locate(
        &mut self,
        name: TensorName,
        view: &TensorView<'_>,
    ) -> Result<Tensor, TensorError> {
        let key = view.storage.key;
        let missing = || TensorError::MissingStorage { storage: shorten_name(key) };
        let storage = match &mut self.places {
            StoragePlaces::Zip(finder) => finder.find(key)?,
            StoragePlaces::Legacy { storages, .. } => {
                storages.get(key).copied().ok_or_else(missing)?
            }
        };
        locate_tensor(name, view, storage, self.is_swapped)
    }

    /// The storages that were unpacked into memory: origin 1 and on.
    pub fn into_unpacked(self) -> Vec<Origin> {
        match self.places {
            StoragePlaces::Zip(finder) => finder.into_unpacked(),
            StoragePlaces::Legacy { .. } => Vec::new(),
        }
    }
}
