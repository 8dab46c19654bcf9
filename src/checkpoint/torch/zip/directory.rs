//! The directory of a zip archive.

use super::end_record::EndRecord;
use super::error::ZipError;
use super::fields::FieldReader;
use super::zip64::{ZIP64_MARKER, resolve_zip64};

const CENTRAL_SIGNATURE: u32 = 0x0201_4b50;

const CENTRAL_BYTES: usize = 46;

/// Flags that change nothing here: sizes follow the data, names are UTF-8 (11), and the level of compression
/// (1 and 2).
const KNOWN_FLAGS: u16 = SIZES_FOLLOW_FLAG | 1 << 11 | 1 << 1 | 1 << 2;
const ENCRYPTION_FLAGS: u16 = 1 | 1 << 6 | 1 << 13;

/// The flag of a record whose sizes follow the data.
const SIZES_FOLLOW_FLAG: u16 = 1 << 3;

/// The entry of one record in the directory.
#[derive(Debug)]
pub struct CentralEntry {
    pub name: String,
    pub flags: u16,
    pub method: u16,
    pub crc: u32,
    pub packed_bytes: u64,
    pub unpacked_bytes: u64,
    pub header_offset: u64,
}

impl CentralEntry {
    /// Whether the sizes follow the data, because they were unknown when the header was written.
    pub fn sizes_follow(&self) -> bool {
        self.flags & SIZES_FOLLOW_FLAG != 0
    }
}

/// Parses the central directory; its entries must be as many as the end record says.
pub fn parse_directory(directory: &[u8], end: &EndRecord) -> Result<Vec<CentralEntry>, ZipError> {
    let mut entries = Vec::new();
    let mut rest = directory;
    while !rest.is_empty() {
        let fixed = rest.get(..CENTRAL_BYTES).ok_or(ZipError::Directory)?;
        let mut fields = FieldReader(fixed);
        if fields.u32() != CENTRAL_SIGNATURE {
            return Err(ZipError::Directory);
        }
        fields.u32(); // Versions.
        let (flags, method) = (fields.u16(), fields.u16());
        fields.u32(); // Time and date.
        let crc = fields.u32();
        let (mut stored, mut size) = (u64::from(fields.u32()), u64::from(fields.u32()));
        let (name_len, extra_len, comment_len) =
            (fields.u16() as usize, fields.u16() as usize, fields.u16() as usize);
        let disk = fields.u16();
        fields.u16(); // Attributes.
        fields.u32();
        let mut header = u64::from(fields.u32());
        let (name_end, extra_end) =
            (CENTRAL_BYTES + name_len, CENTRAL_BYTES + name_len + extra_len);
        let raw_name = rest.get(CENTRAL_BYTES..name_end).ok_or(ZipError::Directory)?;
        let extra = rest.get(name_end..extra_end).ok_or(ZipError::Directory)?;
        rest = rest.get(extra_end + comment_len..).ok_or(ZipError::Directory)?;
        let name = std::str::from_utf8(raw_name).map_err(|_| ZipError::InvalidName)?.to_owned();
        if name.contains('\0') {
            return Err(ZipError::InvalidName);
        }
        if disk != 0 {
            return Err(ZipError::SeveralDisks);
        }
        if flags & ENCRYPTION_FLAGS != 0 {
            return Err(ZipError::Encrypted(name));
        }
        if flags & !KNOWN_FLAGS != 0 {
            return Err(ZipError::UnknownFlags(name));
        }
        let wide = [&mut size, &mut stored, &mut header];
        resolve_zip64(extra, wide.into_iter().filter(|n| **n == ZIP64_MARKER))
            .ok_or(ZipError::Directory)?;
        entries.push(CentralEntry {
            name,
            flags,
            method,
            crc,
            packed_bytes: stored,
            unpacked_bytes: size,
            header_offset: header,
        });
        if entries.len() as u64 > end.count {
            return Err(ZipError::CountMismatch { stated: end.count, found: entries.len() as u64 });
        }
    }
    if entries.len() as u64 != end.count {
        return Err(ZipError::CountMismatch { stated: end.count, found: entries.len() as u64 });
    }
    Ok(entries)
}
