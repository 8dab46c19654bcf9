//! The header in front of a record, which must say the same as the directory.

use crate::source::{ReadAt, SourceError};

use super::directory::CentralEntry;
use super::error::ZipError;
use super::fields::FieldReader;
use super::zip64::{ZIP64_MARKER, resolve_zip64};

const LOCAL_SIGNATURE: u32 = 0x0403_4b50;

/// Bytes of a header before the name.
pub const LOCAL_BYTES: u64 = 30;

/// A record: the place of its bytes, and their size.
#[derive(Clone, Copy, Debug)]
pub struct ZipRecord {
    pub offset: u64,
    /// The size in the file.
    pub packed_bytes: u64,
    /// The size when unpacked.
    pub unpacked_bytes: u64,
    pub is_deflated: bool,
}

/// The range of the part of a header that has a known length: up to the end of the name. `directory` is the offset of
/// the directory.
pub fn fixed_range(entry: &CentralEntry, directory: u64) -> Result<std::ops::Range<u64>, ZipError> {
    let end = entry.header_offset.checked_add(LOCAL_BYTES + entry.name.len() as u64);
    match end {
        Some(end) if end <= directory => Ok(entry.header_offset..end),
        _ => Err(mismatch(entry)),
    }
}

/// Parses the header of a record, and checks it against the directory, which starts at `directory`. `fixed` has the
/// bytes of [`fixed_range`]; `read` reads those after it.
pub fn parse_local_header(
    fixed: &[u8],
    entry: &CentralEntry,
    directory: u64,
    read: impl FnOnce(&mut [u8], u64) -> Result<(), SourceError>,
) -> Result<ZipRecord, ZipError> {
    let disagrees = || Err(mismatch(entry));
    let name_start = LOCAL_BYTES as usize;
    if fixed.len() != name_start + entry.name.len() {
        return disagrees();
    }
    let mut fields = FieldReader(fixed);
    let signature = fields.u32();
    fields.u16(); // Version.
    let (flags, method) = (fields.u16(), fields.u16());
    fields.u32(); // Time and date.
    let (crc, mut stored, mut size) =
        (fields.u32(), u64::from(fields.u32()), u64::from(fields.u32()));
    let (name_len, extra_len) = (fields.u16() as usize, u64::from(fields.u16()));
    if signature != LOCAL_SIGNATURE
        || method != entry.method
        || flags != entry.flags
        || name_len != entry.name.len()
        || fixed[name_start..] != *entry.name.as_bytes()
    {
        return disagrees();
    }
    let extra_start = entry.header_offset + fixed.len() as u64;
    let offset = extra_start + extra_len;
    if offset > directory {
        return disagrees();
    }
    if stored == ZIP64_MARKER || size == ZIP64_MARKER {
        let mut extra = vec![0; extra_len as usize];
        read(&mut extra, extra_start)?;
        let wide = [&mut size, &mut stored].into_iter().filter(|n| **n == ZIP64_MARKER);
        if resolve_zip64(&extra, wide).is_none() {
            return disagrees();
        }
    }
    let same = |here: u64, there: u64| here == there || entry.sizes_follow() && here == 0;
    if !same(stored, entry.packed_bytes)
        || !same(size, entry.unpacked_bytes)
        || !same(u64::from(crc), u64::from(entry.crc))
    {
        return disagrees();
    }
    let is_deflated = match entry.method {
        0 if entry.packed_bytes == entry.unpacked_bytes => false,
        8 => true,
        0 => return disagrees(),
        _ => return Err(ZipError::Compressed(entry.name.clone())),
    };
    if offset.checked_add(entry.packed_bytes).is_none_or(|end| end > directory) {
        return disagrees();
    }
    Ok(ZipRecord {
        offset,
        packed_bytes: entry.packed_bytes,
        unpacked_bytes: entry.unpacked_bytes,
        is_deflated,
    })
}

/// Reads the header of a record, and checks it against the directory, which starts at `directory`.
pub fn read_local_header(
    file: &dyn ReadAt,
    entry: &CentralEntry,
    directory: u64,
) -> Result<ZipRecord, ZipError> {
    let range = fixed_range(entry, directory)?;
    let mut fixed = vec![0; (range.end - range.start) as usize];
    file.read_exact_at(&mut fixed, range.start)?;
    parse_local_header(&fixed, entry, directory, |extra, at| file.read_exact_at(extra, at))
}

pub fn mismatch(entry: &CentralEntry) -> ZipError {
    ZipError::HeaderMismatch(entry.name.clone())
}
