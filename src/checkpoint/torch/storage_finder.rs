//! Finds the storages of a zip archive as tensors ask for them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::{Origin, OriginId};
use crate::source::ReadAt;

use super::gate::ParsePermit;
use super::names::shorten_name;
use super::storage_bounds::StorageLocation;
use super::zip::{ZipArchive, read_record};

/// Maximum bytes of compressed storages that are unpacked into memory. torch never compresses. A storage that
/// is compressed was packed again by hand, and is small or has to be unpacked by hand.
const MAX_UNPACKED_BYTES: u64 = 64 << 20;

/// The storages of one archive.
pub struct StorageFinder<'a> {
    file: &'a dyn ReadAt,
    archive: ZipArchive,
    unpacked: Vec<Origin>,
    unpacked_bytes: u64,
    /// Places of unpacked storages by key, so that tensors which share one go on sharing it.
    unpacked_storages: BTreeMap<String, StorageLocation>,
    /// The permit to parse, released before a read of the source.
    permit: Option<ParsePermit>,
}

impl<'a> StorageFinder<'a> {
    pub fn new(
        file: &'a dyn ReadAt,
        archive: ZipArchive,
        permit: ParsePermit,
    ) -> StorageFinder<'a> {
        StorageFinder {
            file,
            archive,
            unpacked: Vec::new(),
            unpacked_bytes: 0,
            unpacked_storages: BTreeMap::new(),
            permit: Some(permit),
        }
    }

    /// Finds a storage by its key, and unpacks it if it is compressed.
    pub fn find(&mut self, key: &str) -> Result<StorageLocation, TensorError> {
        let missing = || TensorError::MissingStorage { storage: shorten_name(key) };
        let record = self.archive.get(&format!("data/{key}")).ok_or_else(missing)?;
        if !record.is_deflated {
            let (start, len) = (record.offset, record.packed_bytes);
            return Ok(StorageLocation { origin: OriginId(0), start, len });
        }
        if let Some(&storage) = self.unpacked_storages.get(key) {
            return Ok(storage);
        }
        self.permit = None;
        let compressed = |why| TensorError::Compressed { storage: shorten_name(key), why };
        let limit = MAX_UNPACKED_BYTES - self.unpacked_bytes;
        let bytes = read_record(self.file, record, limit)
            .map_err(|_| compressed("and cannot be read"))?
            .ok_or_else(|| compressed("and too large to hold unpacked, or damaged"))?;
        let (origin, len) = (OriginId(1 + self.unpacked.len() as u32), bytes.len() as u64);
        self.unpacked_bytes += len;
        let storage = StorageLocation { origin, start: 0, len };
        self.unpacked.push(Origin::Memory(Arc::from(bytes)));
        self.unpacked_storages.insert(key.to_owned(), storage);
        Ok(storage)
    }

    /// The unpacked storages, in the order of their origins.
    pub fn into_unpacked(self) -> Vec<Origin> {
        self.unpacked
    }
}
