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
const MAX_DIRECTORY: u64 = 256 << 20;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const LOCATOR64: u32 = 0x0706_4b50;

const LOCAL_LEN: u64 = 30;
const CENTRAL_LEN: usize = 46;
const END_LEN: u64 = 22;
const END64_LEN: u64 = 56;
const LOCATOR64_LEN: u64 = 20;

/// The tag of the field that holds what does not fit 32 bits.
const ZIP64_FIELD: u16 = 1;

/// What a number is where it does not fit 32 bits and stands in that field.
const ELSEWHERE: u64 = 0xffff_ffff;

/// Flags that change nothing here: sizes follow the data (3), names are UTF-8 (11), and the
/// compressor's effort (1 and 2).
const KNOWN_FLAGS: u16 = 1 << 3 | 1 << 11 | 1 << 1 | 1 << 2;
const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;

/// What is wrong with an archive.
#[allow(missing_docs)] // The messages say it.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error(transparent)]
    Read(#[from] source::Error),
    #[error("it does not end as a zip archive does: it is cut off, or something follows it")]
    NoEnd,
    #[error("its end record states {stated} records and there are {found}")]
    Count { stated: u64, found: u64 },
    #[error("its directory is not where the end record says, or is damaged")]
    Directory,
    #[error("its directory would take {0} bytes, more than any checkpoint's")]
    DirectorySize(u64),
    #[error("it spans several disks")]
    Disks,
    #[error("record `{0}` is there twice")]
    Twice(String),
    #[error("record `{0}` lies outside the folder that the others share")]
    Folder(String),
    #[error("record `{0}` is encrypted")]
    Encrypted(String),
    #[error("record `{0}` uses features that torch does not write")]
    Flags(String),
    #[error(
        "record `{0}` has another name, size or method in its own header than in the directory"
    )]
    Disagrees(String),
    #[error("record `{0}` overlaps another")]
    Overlap(String),
    #[error("a record has a name that is not UTF-8")]
    Name,
    #[error("bytes before the first record")]
    Before,
    #[error("it has no `{PICKLE}`")]
    NoPickle,
    #[error("record `{0}` is compressed in a way that is not read, or too large to unpack")]
    Compressed(String),
    #[error("its byte order is stated as neither little nor big")]
    ByteOrder,
    #[error("it is a TorchScript program, not a checkpoint")]
    TorchScript,
}

impl Fault {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Fault::TorchScript => {
                "load it with torch.jit.load where you trust it, and save its state_dict()"
            }
            Fault::NoPickle => "give a checkpoint: this is a zip archive of another kind",
            Fault::NoEnd => "fetch it again: most often it is a download that was cut off",
            Fault::Encrypted(_) | Fault::Compressed(_) => {
                "save it again with torch.save, which neither encrypts nor compresses"
            }
            _ => "fetch it again, and do not trust it: programs could disagree on what it holds",
        }
    }
}

/// A record and where its bytes lie.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    pub offset: u64,
    /// Bytes in the file.
    pub stored: u64,
    /// Bytes when unpacked.
    pub size: u64,
    pub deflated: bool,
}

/// The records of an archive by their names inside its one folder.
#[derive(Debug)]
pub struct Archive {
    records: HashMap<String, Record>,
}

impl Archive {
    /// The record of that name.
    pub fn get(&self, name: &str) -> Option<Record> {
        self.records.get(name).copied()
    }

    /// Whether it is a program rather than a checkpoint.
    pub fn is_torchscript(&self) -> bool {
        self.records.contains_key("constants.pkl")
            || self.records.keys().any(|name| name.starts_with("code/"))
    }
}

/// Reads the directory and every record's own header.
pub fn read(file: &dyn ReadAt) -> Result<Archive, Fault> {
    let end = find_end(file)?;
    let mut directory = vec![0; end.directory_len as usize];
    file.read_exact_at(&mut directory, end.directory)?;
    let entries = entries(&directory, &end)?;
    if !entries.iter().any(|entry| entry.name.ends_with(PICKLE)) {
        return Err(Fault::NoPickle);
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
            _ => return Err(Fault::Folder(entry.name)),
        };
        if !folded.insert(inner.to_ascii_lowercase()) {
            return Err(Fault::Twice(entry.name));
        }
        let record = local(file, &entry, end.directory)?;
        taken.push((entry.header, record.offset + record.stored, entry.name));
        records.insert(inner, record);
    }
    taken.sort_unstable();
    if taken.first().is_some_and(|first| first.0 != 0) {
        return Err(Fault::Before);
    }
    if let Some(pair) = taken.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        return Err(Fault::Overlap(pair[1].2.clone()));
    }
    Ok(Archive { records })
}

struct End {
    directory: u64,
    directory_len: u64,
    count: u64,
}

/// Finds the directory through the end record, which must be the last thing in the file.
fn find_end(file: &dyn ReadAt) -> Result<End, Fault> {
    let Some(at) = file.size().checked_sub(END_LEN) else {
        return Err(Fault::NoEnd);
    };
    let mut raw = [0; END_LEN as usize];
    file.read_exact_at(&mut raw, at)?;
    let mut fields = Fields(&raw);
    let (signature, disk, directory_disk) = (fields.u32(), fields.u16(), fields.u16());
    let (on_disk, count) = (u64::from(fields.u16()), u64::from(fields.u16()));
    let (directory_len, directory) = (u64::from(fields.u32()), u64::from(fields.u32()));
    if signature != END || fields.u16() != 0 {
        return Err(Fault::NoEnd);
    }
    if disk != 0 || directory_disk != 0 {
        return Err(Fault::Disks);
    }
    let short = End { directory, directory_len, count };
    let (end, directory_end) = match end64(file, at)? {
        Some((end, at64)) => {
            let agrees = |short: u64, long: u64, full: u64| short == long || short == full;
            if !agrees(short.count, end.count, 0xffff)
                || !agrees(on_disk, end.count, 0xffff)
                || !agrees(short.directory, end.directory, ELSEWHERE)
                || !agrees(short.directory_len, end.directory_len, ELSEWHERE)
            {
                return Err(Fault::Directory);
            }
            (end, at64)
        }
        None if on_disk != short.count => {
            return Err(Fault::Count { stated: on_disk, found: short.count });
        }
        None => (short, at),
    };
    if end.directory.checked_add(end.directory_len) != Some(directory_end) {
        return Err(Fault::Directory);
    }
    if end.directory_len > MAX_DIRECTORY {
        return Err(Fault::DirectorySize(end.directory_len));
    }
    Ok(end)
}

/// The wide end record and its place, if there is one right before the end record.
fn end64(file: &dyn ReadAt, end: u64) -> Result<Option<(End, u64)>, Fault> {
    let Some(at) = end.checked_sub(LOCATOR64_LEN + END64_LEN) else {
        return Ok(None);
    };
    let mut raw = [0; (END64_LEN + LOCATOR64_LEN) as usize];
    file.read_exact_at(&mut raw, at)?;
    let mut locator = Fields(&raw[END64_LEN as usize..]);
    let (signature, disk, place, disks) =
        (locator.u32(), locator.u32(), locator.u64(), locator.u32());
    if signature != LOCATOR64 {
        return Ok(None);
    }
    let mut fields = Fields(&raw);
    let (signature, len) = (fields.u32(), fields.u64());
    fields.u32(); // Versions of the writer and of the reader it wants.
    let (this_disk, directory_disk) = (fields.u32(), fields.u32());
    let (on_disk, count, directory_len, directory) =
        (fields.u64(), fields.u64(), fields.u64(), fields.u64());
    let as_written = signature == END64
        && len == END64_LEN - 12
        && place == at
        && (disk, this_disk, directory_disk) == (0, 0, 0)
        && disks <= 1
        && on_disk == count;
    if !as_written {
        return Err(Fault::Directory);
    }
    Ok(Some((End { directory, directory_len, count }, at)))
}

struct CentralEntry {
    name: String,
    raw_name: Vec<u8>,
    flags: u16,
    method: u16,
    crc: u32,
    stored: u64,
    size: u64,
    header: u64,
}

fn entries(directory: &[u8], end: &End) -> Result<Vec<CentralEntry>, Fault> {
    let mut entries = Vec::new();
    let mut rest = directory;
    while !rest.is_empty() {
        let fixed = rest.get(..CENTRAL_LEN).ok_or(Fault::Directory)?;
        let mut fields = Fields(fixed);
        if fields.u32() != CENTRAL {
            return Err(Fault::Directory);
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
        let (name_end, extra_end) = (CENTRAL_LEN + name_len, CENTRAL_LEN + name_len + extra_len);
        let raw_name = rest.get(CENTRAL_LEN..name_end).ok_or(Fault::Directory)?;
        let extra = rest.get(name_end..extra_end).ok_or(Fault::Directory)?;
        rest = rest.get(extra_end + comment_len..).ok_or(Fault::Directory)?;
        let name = std::str::from_utf8(raw_name).map_err(|_| Fault::Name)?.to_owned();
        if name.contains('\0') {
            return Err(Fault::Name);
        }
        if disk != 0 {
            return Err(Fault::Disks);
        }
        if flags & ENCRYPTED != 0 {
            return Err(Fault::Encrypted(name));
        }
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Fault::Flags(name));
        }
        let wide = [&mut size, &mut stored, &mut header];
        widen(extra, wide.into_iter().filter(|n| **n == ELSEWHERE)).ok_or(Fault::Directory)?;
        entries.push(CentralEntry {
            raw_name: raw_name.to_vec(),
            name,
            flags,
            method,
            crc,
            stored,
            size,
            header,
        });
        if entries.len() as u64 > end.count {
            return Err(Fault::Count { stated: end.count, found: entries.len() as u64 });
        }
    }
    if entries.len() as u64 != end.count {
        return Err(Fault::Count { stated: end.count, found: entries.len() as u64 });
    }
    Ok(entries)
}

/// Replaces the numbers that did not fit 32 bits by those of the wide field, in their order.
/// `None` where the extra fields are damaged or the wide one is there twice or lacks a number.
fn widen<'a>(extra: &[u8], numbers: impl Iterator<Item = &'a mut u64>) -> Option<()> {
    let mut wide: Option<&[u8]> = None;
    let mut rest = extra;
    // Some writers fill the rest with zeros too short to be a field.
    while rest.len() >= 4 {
        let (tag, len) = (
            u16::from_le_bytes([rest[0], rest[1]]),
            u16::from_le_bytes([rest[2], rest[3]]) as usize,
        );
        let field = rest.get(4..4 + len)?;
        if tag == ZIP64_FIELD && wide.replace(field).is_some() {
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
fn local(file: &dyn ReadAt, entry: &CentralEntry, directory: u64) -> Result<Record, Fault> {
    let disagrees = || Err(Fault::Disagrees(entry.name.clone()));
    let fixed_end = entry.header.checked_add(LOCAL_LEN + entry.raw_name.len() as u64);
    if fixed_end.is_none_or(|end| end > directory) {
        return disagrees();
    }
    let mut raw = vec![0; LOCAL_LEN as usize + entry.raw_name.len()];
    file.read_exact_at(&mut raw, entry.header)?;
    let mut fields = Fields(&raw);
    let signature = fields.u32();
    fields.u16(); // Version.
    let (flags, method) = (fields.u16(), fields.u16());
    fields.u32(); // Time and date.
    let (crc, mut stored, mut size) =
        (fields.u32(), u64::from(fields.u32()), u64::from(fields.u32()));
    let (name_len, extra_len) = (fields.u16() as usize, u64::from(fields.u16()));
    if signature != LOCAL
        || method != entry.method
        || flags != entry.flags
        || name_len != entry.raw_name.len()
        || raw[LOCAL_LEN as usize..] != entry.raw_name
    {
        return disagrees();
    }
    let extra_start = entry.header + LOCAL_LEN + entry.raw_name.len() as u64;
    let offset = extra_start + extra_len;
    if offset > directory {
        return disagrees();
    }
    if stored == ELSEWHERE || size == ELSEWHERE {
        let mut extra = vec![0; extra_len as usize];
        file.read_exact_at(&mut extra, extra_start)?;
        let wide = [&mut size, &mut stored].into_iter().filter(|n| **n == ELSEWHERE);
        if widen(&extra, wide).is_none() {
            return disagrees();
        }
    }
    // What is not known when the header is written follows the data (bit 3).
    let later = flags & 1 << 3 != 0;
    let same = |here: u64, there: u64| here == there || later && here == 0;
    if !same(stored, entry.stored)
        || !same(size, entry.size)
        || !same(u64::from(crc), u64::from(entry.crc))
    {
        return disagrees();
    }
    let deflated = match entry.method {
        0 if entry.stored == entry.size => false,
        8 => true,
        0 => return disagrees(),
        _ => return Err(Fault::Compressed(entry.name.clone())),
    };
    if offset.checked_add(entry.stored).is_none_or(|end| end > directory) {
        return disagrees();
    }
    Ok(Record { offset, stored: entry.stored, size: entry.size, deflated })
}

/// Little-endian fields one after the other, of a slice that is known to hold them.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
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
