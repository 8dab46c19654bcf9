//! The bytes of a record, which may be compressed.

use miniz_oxide::inflate::decompress_to_vec_with_limit;

use crate::source::{ReadAt, SourceError};

use super::local_header::ZipRecord;

/// Reads and unpacks a record; `None` if it is larger than the limit or does not unpack to its stated size.
pub fn read_record(
    file: &dyn ReadAt,
    record: ZipRecord,
    max_bytes: u64,
) -> Result<Option<Vec<u8>>, SourceError> {
    Ok(PackedRecord::read(file, record, max_bytes)?.and_then(PackedRecord::unpack))
}

/// The bytes of a record as they are in the file.
pub struct PackedRecord {
    bytes: Vec<u8>,
    record: ZipRecord,
}

impl PackedRecord {
    /// Reads the bytes; `None` if the record is larger than the limit, packed or unpacked.
    pub fn read(
        file: &dyn ReadAt,
        record: ZipRecord,
        max_bytes: u64,
    ) -> Result<Option<PackedRecord>, SourceError> {
        if record.packed_bytes > max_bytes || record.unpacked_bytes > max_bytes {
            return Ok(None);
        }
        let mut bytes = vec![0; record.packed_bytes as usize];
        file.read_exact_at(&mut bytes, record.offset)?;
        Ok(Some(PackedRecord { bytes, record }))
    }

    /// Decompresses the bytes; `None` if they do not unpack to the stated size.
    pub fn unpack(self) -> Option<Vec<u8>> {
        let PackedRecord { bytes, record } = self;
        if !record.is_deflated {
            return Some(bytes);
        }
        let unpacked = decompress_to_vec_with_limit(&bytes, record.unpacked_bytes as usize).ok();
        unpacked.filter(|bytes| bytes.len() as u64 == record.unpacked_bytes)
    }
}
