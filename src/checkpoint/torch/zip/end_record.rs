//! The end record of a zip archive, which states where its directory is.

use crate::source::ReadAt;

use super::error::ZipError;
use super::fields::FieldReader;
use super::zip64::ZIP64_MARKER;

/// The largest directory that is read: 2,000,000 records of 100 bytes.
const MAX_DIRECTORY_BYTES: u64 = 256 << 20;

const END_SIGNATURE: u32 = 0x0605_4b50;
const END64_SIGNATURE: u32 = 0x0606_4b50;
const LOCATOR64_SIGNATURE: u32 = 0x0706_4b50;

const END_BYTES: u64 = 22;
const END64_BYTES: u64 = 56;
const LOCATOR64_BYTES: u64 = 20;

/// What the end record states.
pub struct EndRecord {
    /// The offset of the directory.
    pub directory: u64,
    pub directory_len: u64,
    /// The number of records.
    pub count: u64,
}

/// Reads the end record, which must end the file.
pub fn find_end(file: &dyn ReadAt) -> Result<EndRecord, ZipError> {
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

/// The zip64 end record and its offset, if there is one right before the end record.
fn find_end64(file: &dyn ReadAt, end: u64) -> Result<Option<(EndRecord, u64)>, ZipError> {
    let Some(at) = end.checked_sub(LOCATOR64_BYTES + END64_BYTES) else {
        return Ok(None);
    };
    let mut raw = [0; (END64_BYTES + LOCATOR64_BYTES) as usize];
    file.read_exact_at(&mut raw, at)?;
    let mut locator = FieldReader(&raw[END64_BYTES as usize..]);
    let (signature, disk, offset, disks) =
        (locator.u32(), locator.u32(), locator.u64(), locator.u32());
    if signature != LOCATOR64_SIGNATURE {
        return Ok(None);
    }
    let mut fields = FieldReader(&raw);
    let (signature, len) = (fields.u32(), fields.u64());
    fields.u32(); // Versions of the writer and of the required reader.
    let (this_disk, directory_disk) = (fields.u32(), fields.u32());
    let (on_disk, count, directory_len, directory) =
        (fields.u64(), fields.u64(), fields.u64(), fields.u64());
    let as_written = signature == END64_SIGNATURE
        && len == END64_BYTES - 12
        && offset == at
        && (disk, this_disk, directory_disk) == (0, 0, 0)
        && disks <= 1
        && on_disk == count;
    if !as_written {
        return Err(ZipError::Directory);
    }
    Ok(Some((EndRecord { directory, directory_len, count }, at)))
}
