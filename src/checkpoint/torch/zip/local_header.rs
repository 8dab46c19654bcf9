//! The header in front of a record, which must say the same as the directory.

use crate::source::ReadAt;

use super::directory::CentralEntry;
use super::error::ZipError;
use super::fields::FieldReader;
use super::zip64::{ZIP64_MARKER, resolve_zip64};

const LOCAL_SIGNATURE: u32 = 0x0403_4b50;

const LOCAL_BYTES: u64 = 30;

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

/// Reads the header of a record, and checks it against the directory, which starts at `directory`.
pub fn read_local_header(
    file: &dyn ReadAt,
    entry: &CentralEntry,
    directory: u64,
) -> Result<ZipRecord, ZipError> {
    let disagrees = || Err(ZipError::HeaderMismatch(entry.name.clone()));
    let fixed_end = entry.header_offset.checked_add(LOCAL_BYTES + entry.raw_name.len() as u64);
    if fixed_end.is_none_or(|end| end > directory) {
        return disagrees();
    }
    let mut raw = vec![0; LOCAL_BYTES as usize + entry.raw_name.len()];
    file.read_exact_at(&mut raw, entry.header_offset)?;
    let mut fields = FieldReader(&raw);
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
        || name_len != entry.raw_name.len()
        || raw[LOCAL_BYTES as usize..] != entry.raw_name
    {
        return disagrees();
    }
    let extra_start = entry.header_offset + LOCAL_BYTES + entry.raw_name.len() as u64;
    let offset = extra_start + extra_len;
    if offset > directory {
        return disagrees();
    }
    if stored == ZIP64_MARKER || size == ZIP64_MARKER {
        let mut extra = vec![0; extra_len as usize];
        file.read_exact_at(&mut extra, extra_start)?;
        let wide = [&mut size, &mut stored].into_iter().filter(|n| **n == ZIP64_MARKER);
        if resolve_zip64(&extra, wide).is_none() {
            return disagrees();
        }
    }
    // Sizes that are unknown when the header is written follow the data (bit 3).
    let sizes_follow = flags & 1 << 3 != 0;
    let same = |here: u64, there: u64| here == there || sizes_follow && here == 0;
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
