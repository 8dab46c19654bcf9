//! Finds the records of a torch zip archive, strictly.
//!
//! In: any [`ReadAt`]. Out: an [`Archive`]: the records by name, each with where its bytes lie.
//!
//! General zip readers are made to find an archive inside whatever surrounds it, and forgive counts
//! and names that disagree. Readers that forgive differently see different archives in one file,
//! which is how malware scanners were fooled. So this reads only what is written in one way: the end
//! record at the very end, the directory right before it, every number equal in both its places.

use std::collections::{HashMap, HashSet};

use crate::source::{self, ReadAt};

/// The record with the state.
pub const PICKLE: &str = "data.pkl";

/// The largest directory that is read: 2,000,000 records of 100 bytes.
const MAX_DIRECTORY_BYTES: u64 = 256 << 20;

const LOCAL_SIGNATURE: u32 = 0x0403_4b50;
const CENTRAL_SIGNATURE: u32 = 0x0201_4b50;
const END_SIGNATURE: u32 = 0x0605_4b50;
const END64_SIGNATURE: u32 = 0x0606_4b50;
const LOCATOR64_SIGNATURE: u32 = 0x0706_4b50;

const LOCAL_BYTES: u64 = 30;
const CENTRAL_BYTES: usize = 46;
const END_BYTES: u64 = 22;
const END64_BYTES: u64 = 56;
const LOCATOR64_BYTES: u64 = 20;

/// The tag of the field that holds what does not fit 32 bits.
const ZIP64_TAG: u16 = 1;

/// What a number is where it does not fit 32 bits and stands in that field.
const ZIP64_MARKER: u64 = 0xffff_ffff;

/// Flags that change nothing here: sizes follow the data (3), names are UTF-8 (11), and the
/// compressor's effort (1 and 2).
const KNOWN_FLAGS: u16 = 1 << 3 | 1 << 11 | 1 << 1 | 1 << 2;
const ENCRYPTION_FLAGS: u16 = 1 | 1 << 6 | 1 << 13;

/// What is wrong with an archive.
#[allow(missing_docs)] // The messages say it.
#[derive(Debug, thiserror::Error)]
pub enum ZipError {
    #[error(transparent)]
    Source(#[from] source::SourceError),
    #[error("it does not end as a zip archive does: it is cut off, or something follows it")]
    NoEnd,
    #[error("its end record states {stated} records and there are {found}")]
    CountMismatch { stated: u64, found: u64 },
    #[error("its directory is not where the end record says, or is damaged")]
    Directory,
    #[error("its directory would take {0} bytes, more than any checkpoint's")]
    DirectoryTooLarge(u64),
    #[error("it spans several disks")]
    SeveralDisks,
    #[error("record `{0}` is there twice")]
    DuplicateRecord(String),
    #[error("record `{0}` lies outside the folder that the others share")]
    OutsideFolder(String),
    #[error("record `{0}` is encrypted")]
    Encrypted(String),
    #[error("record `{0}` uses features that torch does not write")]
    UnknownFlags(String),
    #[error(
        "record `{0}` has another name, size or method in its own header than in the directory"
    )]
    HeaderMismatch(String),
    #[error("record `{0}` overlaps another")]
    Overlap(String),
    #[error("a record has a name that is not UTF-8")]
    InvalidName,
    #[error("bytes before the first record")]
    LeadingBytes,
    #[error("it has no `{PICKLE}`")]
    NoPickle,
    #[error("record `{0}` is compressed in a way that is not read, or too large to unpack")]
    Compressed(String),
    #[error("its byte order is stated as neither little nor big")]
    ByteOrder,
    #[error("it is a TorchScript program, not a checkpoint")]
    TorchScript,
}

impl ZipError {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            ZipError::TorchScript => {
                "load it with torch.jit.load where you trust it, and save its state_dict()"
            }
            ZipError::NoPickle => "give a checkpoint: this is a zip archive of another kind",
            ZipError::NoEnd => "fetch it again: most often it is a download that was cut off",
            ZipError::Encrypted(_) | ZipError::Compressed(_) => {
                "save it again with torch.save, which neither encrypts nor compresses"
            }
            _ => "fetch it again, and do not trust it: programs could disagree on what it holds",
        }
    }
}

/// A record and where its bytes lie.
#[derive(Clone, Copy, Debug)]
pub struct ZipRecord {
    pub offset: u64,
    /// Bytes in the file.
    pub packed_bytes: u64,
    /// Bytes when unpacked.
    pub unpacked_bytes: u64,
    pub deflated: bool,
}

/// The records of an archive by their names inside its one folder.
#[derive(Debug)]
pub struct ZipArchive {
    records: HashMap<String, ZipRecord>,
}

impl ZipArchive {
    /// The record of that name.
    pub fn get(&self, name: &str) -> Option<ZipRecord> {
        self.records.get(name).copied()
    }

    /// Whether it is a program rather than a checkpoint.
    pub fn is_torchscript(&self) -> bool {
        self.records.contains_key("constants.pkl")
            || self.records.keys().any(|name| name.starts_with("code/"))
    }
}

/// Reads the directory and every record's own header.
pub fn read_archive(file: &dyn ReadAt) -> Result<ZipArchive, ZipError> {
    let end = find_end(file)?;
    let mut directory = vec![0; end.directory_len as usize];
    file.read_exact_at(&mut directory, end.directory)?;
    let entries = parse_directory(&directory, &end)?;
    if !entries.iter().any(|entry| entry.name.ends_with(PICKLE)) {
        return Err(ZipError::NoPickle);
    }
    let mut records = HashMap::with_capacity(entries.len());
    // Readers that fold case would see `Data.pkl` where others see `data.pkl`.
    let mut folded = HashSet::with_capacity(entries.len());
    let mut taken: Vec<(u64, u64, String)> = Vec::with_capacity(entries.len());
    let folder =
        entries.first().and_then(|e| e.name.split_once('/')).map(|(folder, _)| folder.to_owned());
    for entry in entries {
        let inner = match (&folder, entry.name.split_once('/')) {
            (Some(shared), Some((folder, inner))) if folder == shared => inner.to_owned(),
            _ => return Err(ZipError::OutsideFolder(entry.name)),
        };
        if !folded.insert(inner.to_ascii_lowercase()) {
            return Err(ZipError::DuplicateRecord(entry.name));
        }
        let record = read_local_header(file, &entry, end.directory)?;
        taken.push((entry.header_offset, record.offset + record.packed_bytes, entry.name));
        records.insert(inner, record);
    }
    taken.sort_unstable();
    if taken.first().is_some_and(|first| first.0 != 0) {
        return Err(ZipError::LeadingBytes);
    }
    if let Some(pair) = taken.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        return Err(ZipError::Overlap(pair[1].2.clone()));
    }
    Ok(ZipArchive { records })
}

struct EndRecord {
    directory: u64,
    directory_len: u64,
    count: u64,
}

/// Finds the directory through the end record, which must be the last thing in the file.
fn find_end(file: &dyn ReadAt) -> Result<EndRecord, ZipError> {
    let Some(at) = file.size().checked_sub(END_BYTES) else {
        return Err(ZipError::NoEnd);
    };
    let mut raw = [0; END_BYTES as usize];
    file.read_exact_at(&mut raw, at)?;
    let mut fields = FieldReader(&raw);
    let (signature, disk, directory_disk) = (fields.u32(), fields.u16(), fields.u16());
    let (on_disk, count) = (u64::from(fields.u16()), u64::from(fields.u16()));
    let (directory_len, directory) = (u64::from(fields.u32()), u64::from(fields.u32()));
    if signature != END_SIGNATURE || fields.u16() != 0 {
        return Err(ZipError::NoEnd);
    }
    if disk != 0 || directory_disk != 0 {
        return Err(ZipError::SeveralDisks);
    }
    let short = EndRecord { directory, directory_len, count };
    let (end, directory_end) = match find_end64(file, at)? {
        Some((end, at64)) => {
            let agrees = |short: u64, long: u64, full: u64| short == long || short == full;
            if !agrees(short.count, end.count, 0xffff)
                || !agrees(on_disk, end.count, 0xffff)
                || !agrees(short.directory, end.directory, ZIP64_MARKER)
                || !agrees(short.directory_len, end.directory_len, ZIP64_MARKER)
            {
                return Err(ZipError::Directory);
            }
            (end, at64)
        }
        None if on_disk != short.count => {
            return Err(ZipError::CountMismatch { stated: on_disk, found: short.count });
        }
        None => (short, at),
    };
    if end.directory.checked_add(end.directory_len) != Some(directory_end) {
        return Err(ZipError::Directory);
    }
    if end.directory_len > MAX_DIRECTORY_BYTES {
        return Err(ZipError::DirectoryTooLarge(end.directory_len));
    }
    Ok(end)
}

/// The wide end record and its place, if there is one right before the end record.
fn find_end64(file: &dyn ReadAt, end: u64) -> Result<Option<(EndRecord, u64)>, ZipError> {
    let Some(at) = end.checked_sub(LOCATOR64_BYTES + END64_BYTES) else {
        return Ok(None);
    };
    let mut raw = [0; (END64_BYTES + LOCATOR64_BYTES) as usize];
    file.read_exact_at(&mut raw, at)?;
    let mut locator = FieldReader(&raw[END64_BYTES as usize..]);
    let (signature, disk, place, disks) =
        (locator.u32(), locator.u32(), locator.u64(), locator.u32());
    if signature != LOCATOR64_SIGNATURE {
        return Ok(None);
    }
    let mut fields = FieldReader(&raw);
    let (signature, len) = (fields.u32(), fields.u64());
    fields.u32(); // Versions of the writer and of the reader it wants.
    let (this_disk, directory_disk) = (fields.u32(), fields.u32());
    let (on_disk, count, directory_len, directory) =
        (fields.u64(), fields.u64(), fields.u64(), fields.u64());
    let as_written = signature == END64_SIGNATURE
        && len == END64_BYTES - 12
        && place == at
        && (disk, this_disk, directory_disk) == (0, 0, 0)
        && disks <= 1
        && on_disk == count;
    if !as_written {
        return Err(ZipError::Directory);
    }
    Ok(Some((EndRecord { directory, directory_len, count }, at)))
}

struct CentralEntry {
    name: String,
    raw_name: Vec<u8>,
    flags: u16,
    method: u16,
    crc: u32,
    packed_bytes: u64,
    unpacked_bytes: u64,
    header_offset: u64,
}

fn parse_directory(directory: &[u8], end: &EndRecord) -> Result<Vec<CentralEntry>, ZipError> {
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
            raw_name: raw_name.to_vec(),
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

/// Replaces the numbers that did not fit 32 bits by those of the wide field, in their order.
/// `None` where the extra fields are damaged or the wide one is there twice or lacks a number.
fn resolve_zip64<'a>(extra: &[u8], numbers: impl Iterator<Item = &'a mut u64>) -> Option<()> {
    let mut wide: Option<&[u8]> = None;
    let mut rest = extra;
    // Some writers fill the rest with zeros too short to be a field.
    while rest.len() >= 4 {
        let (tag, len) = (
            u16::from_le_bytes([rest[0], rest[1]]),
            u16::from_le_bytes([rest[2], rest[3]]) as usize,
        );
        let field = rest.get(4..4 + len)?;
        if tag == ZIP64_TAG && wide.replace(field).is_some() {
            return None;
        }
        rest = &rest[4 + len..];
    }
    let mut wide = wide.unwrap_or_default();
    for number in numbers {
        let (raw, after) = wide.split_first_chunk::<8>()?;
        *number = u64::from_le_bytes(*raw);
        wide = after;
    }
    Some(())
}

/// Reads a record's own header, which must say the same as the directory.
fn read_local_header(
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
    // What is not known when the header is written follows the data (bit 3).
    let later = flags & 1 << 3 != 0;
    let same = |here: u64, there: u64| here == there || later && here == 0;
    if !same(stored, entry.packed_bytes)
        || !same(size, entry.unpacked_bytes)
        || !same(u64::from(crc), u64::from(entry.crc))
    {
        return disagrees();
    }
    let deflated = match entry.method {
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
        deflated,
    })
}

/// Little-endian fields one after the other, of a slice that is known to hold them.
struct FieldReader<'a>(&'a [u8]);

impl FieldReader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) =
            self.0.split_first_chunk::<N>().expect("the fixed part holds all its fields");
        self.0 = rest;
        *field
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
