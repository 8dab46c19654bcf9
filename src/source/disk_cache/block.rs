//! The file of one block: a header of one page, then the bytes of a range of an object.
//!
//! The header states the object, the range, and a checksum for each 16 KiB. Every read compares it. A file that lost
//! bytes in a crash, or whose disk changed them, is a miss, never a wrong tensor.
//! Files are not synchronised: the checksums make that unnecessary.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::Mode;
use xxhash_rust::xxh3::Xxh3;

use crate::temp_file::TempFile;

use super::ObjectId;

/// The first bytes of a block's file; another layout gets another number.
const MAGIC: [u8; 8] = *b"ckptfs 4";

/// Bytes of the header: a page.
pub const HEADER_BYTES: usize = 4096;

/// Bytes that the file of a block takes in addition to the block: its header, and the rest of its first and last page.
pub const BLOCK_OVERHEAD_BYTES: u64 = 3 * HEADER_BYTES as u64;

/// Bytes that one checksum covers, and so the least that a read compares. They begin at multiples of this in the object.
pub const CHECKED_BYTES: u64 = 16 << 10;

/// Maximum bytes of a block. The header has room for the checksums of 15 MiB, but a corrupt block is fetched again whole.
pub const MAX_BLOCK_BYTES: u64 = 8 << 20;

/// Size and alignment of each write to a block's file. The kernel took 1.8 s of processor time for 2.1 GB in unaligned pieces
/// of 16 KiB. In aligned pieces of 64 KiB it took 1.1 s, of 256 KiB 0.8 s, and of 2 MiB 3.7 s.
const WRITE_BYTES: usize = 128 << 10;

/// Offsets in the header: of the checksums of the bytes, and of its own checksum.
const CHECKSUMS_AT: usize = 40;
const HEADER_CHECKSUM_AT: usize = HEADER_BYTES - 4;

/// The reason that a block gives no bytes.
#[derive(Debug)]
pub enum BlockError {
    /// It differs from the bytes that were written, and must be removed.
    Corrupt,
    /// It cannot be read now.
    Io(io::Error),
}

impl From<io::Error> for BlockError {
    fn from(error: io::Error) -> BlockError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => BlockError::Corrupt,
            _ => BlockError::Io(error),
        }
    }
}

/// The name of the file of a range.
pub fn block_name(range: &Range<u64>) -> String {
    format!("{:012x}-{:x}", range.start, range.end - range.start)
}

/// The range that a file name states; `None` if it is no block's.
pub fn parse_block_name(name: &str) -> Option<Range<u64>> {
    let (start, len) = name.split_once('-')?;
    let (start, len) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(len, 16).ok()?);
    let range = start..start.checked_add(len)?;
    (len > 0 && len <= MAX_BLOCK_BYTES && block_name(&range) == name).then_some(range)
}

/// The offset in the file of a byte of the block. Its offset in a page is the same as in the object, so that direct
/// reads can fill aligned memory.
pub fn file_offset(range: &Range<u64>, at: u64) -> u64 {
    let page = HEADER_BYTES as u64;
    page + range.start % page + (at - range.start)
}

fn checksum_count(range: &Range<u64>) -> usize {
    (range.end.div_ceil(CHECKED_BYTES) - range.start / CHECKED_BYTES) as usize
}

/// Computes the checksum of bytes that arrive in pieces: the low 32 bits of XXH3-64.
#[derive(Default)]
pub struct ChecksumHasher(Xxh3);

impl ChecksumHasher {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of the bytes so far. The next bytes begin another.
    pub fn take(&mut self) -> u32 {
        let checksum = self.0.digest() as u32;
        self.0.reset();
        checksum
    }

    fn of(bytes: &[u8]) -> u32 {
        xxhash_rust::xxh3::xxh3_64(bytes) as u32
    }
}

/// The checksums of a header; `None` if it is not that of this object and range.
pub fn parse_header(header: &[u8], object: &ObjectId, range: &Range<u64>) -> Option<Box<[u32]>> {
    let header: &[u8; HEADER_BYTES] = header.try_into().ok()?;
    let number = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let len = range.end - range.start;
    let is_whole = number(HEADER_CHECKSUM_AT) == ChecksumHasher::of(&header[..HEADER_CHECKSUM_AT]);
    let is_same = header[..8] == MAGIC
        && header[8..24] == object.0
        && header[24..32] == range.start.to_le_bytes()
        && header[32..40] == len.to_le_bytes();
    (is_whole && is_same && len <= MAX_BLOCK_BYTES)
        .then(|| (0..checksum_count(range)).map(|n| number(CHECKSUMS_AT + 4 * n)).collect())
}

/// A block that is being written. It has no name until it is whole, so a drop before that removes it.
pub struct BlockWriter {
    file: TempFile,
    start: u64,
    len: u64,
    /// The last bytes, which are not written yet.
    pending: Vec<u8>,
    hasher: ChecksumHasher,
    checksums: Vec<u32>,
}

impl BlockWriter {
    /// Begins a block at an offset of an object.
    pub fn create(folder: &Path, start: u64) -> io::Result<BlockWriter> {
        // For filesystems without unnamed files (O_TMPFILE). A second writer of this start gets another hidden name.
        let name = format!("{start:012x}");
        let file = TempFile::create(folder, Some(OsStr::new(&name)), Mode::RUSR | Mode::WUSR)?;
        let (pending, hasher, checksums) = Default::default();
        Ok(BlockWriter { file, start, len: 0, pending, hasher, checksums })
    }

    /// The offset of its first byte in the object.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The bytes that it has so far.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Appends bytes, at most as many as fit in a block.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let at = self.range().end;
            let room = (CHECKED_BYTES - at % CHECKED_BYTES) as usize;
            let (piece, behind) = rest.split_at(room.min(rest.len()));
            self.hasher.update(piece);
            self.buffer(piece)?;
            rest = behind;
            if piece.len() == room {
                self.checksums.push(self.hasher.take());
            }
        }
        Ok(())
    }

    /// Adds bytes to those that are not written yet, and writes them at each multiple of [`WRITE_BYTES`].
    fn buffer(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let end = file_offset(&self.range(), self.range().end);
            let room = WRITE_BYTES - end as usize % WRITE_BYTES;
            let (piece, behind) = bytes.split_at(room.min(bytes.len()));
            self.pending.extend_from_slice(piece);
            self.len += piece.len() as u64;
            bytes = behind;
            if piece.len() == room {
                self.write_pending()?;
            }
        }
        Ok(())
    }

    fn write_pending(&mut self) -> io::Result<()> {
        let end = file_offset(&self.range(), self.range().end);
        self.file.file().write_all_at(&self.pending, end - self.pending.len() as u64)?;
        self.pending.clear();
        Ok(())
    }

    fn range(&self) -> Range<u64> {
        self.start..self.start + self.len
    }

    /// Gives the block its name, unless another process has written the same block. Returns its range.
    pub fn finish(mut self, folder: &Path, object: &ObjectId) -> io::Result<Range<u64>> {
        self.write_pending()?;
        let range = self.range();
        if !range.end.is_multiple_of(CHECKED_BYTES) {
            self.checksums.push(self.hasher.take());
        }
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..24].copy_from_slice(&object.0);
        header[24..32].copy_from_slice(&self.start.to_le_bytes());
        header[32..40].copy_from_slice(&self.len.to_le_bytes());
        for (n, checksum) in self.checksums.iter().enumerate() {
            let at = CHECKSUMS_AT + 4 * n;
            header[at..at + 4].copy_from_slice(&checksum.to_le_bytes());
        }
        let own = ChecksumHasher::of(&header[..HEADER_CHECKSUM_AT]);
        header[HEADER_CHECKSUM_AT..].copy_from_slice(&own.to_le_bytes());
        self.file.file().write_all_at(&header, 0)?;
        match self.file.take(&folder.join(block_name(&range)), false) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(range),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_names_are_no_blocks() {
        for name in ["", "object.json", "000000000000-0", "0-10", "000000000000-800001", "zz-1"] {
            assert_eq!(parse_block_name(name), None, "{name}");
        }
    }
}
