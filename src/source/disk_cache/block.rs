//! The file of one block: the bytes of a range of an object, behind the first bytes of their page.
//!
//! The object has a checksum for each 16 KiB (a piece), in a file beside its blocks. Those of a block's first and last piece are
//! in the block's name, if it has a part of the piece alone. Every read compares them. A file that lost bytes in a
//! crash, or whose disk changed them, is a miss, never a wrong tensor.
//! Files are not synchronised: the checksums make that unnecessary.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::Mode;

use crate::source::read_spans::PAGE_BYTES;
use crate::temp_file::TempFile;

use super::ObjectId;
use super::checksums::{CHECKED_BYTES, ChecksumHasher, ObjectChecksums, pieces_of};

/// Bytes that a block takes in addition to its own: the rest of its first and last page, and checksums.
pub const BLOCK_OVERHEAD_BYTES: u64 = 3 * PAGE_BYTES as u64;

/// Maximum bytes of an object, as of a file.
const MAX_OBJECT_BYTES: u64 = i64::MAX as u64;

/// Maximum bytes of a block: a corrupt one is fetched again whole.
pub const MAX_BLOCK_BYTES: u64 = 8 << 20;

/// Size and alignment of each write to a block's file. The kernel took 1.8 s of processor time for 2.1 GB in unaligned pieces
/// of 16 KiB. In aligned pieces of 64 KiB it took 1.1 s, of 256 KiB 0.8 s, and of 2 MiB 3.7 s.
const WRITE_BYTES: usize = 128 << 10;

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

/// What the name of a block's file states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockName {
    /// The range of the object that it has.
    pub range: Range<u64>,
    /// The checksums of its first and its last piece, each 0 if the block has that piece whole. Of a block that begins and ends
    /// inside of one piece, the first.
    partial_checksums: [u32; 2],
}

impl BlockName {
    /// Parses the name of a file; `None` if it is no block's.
    pub fn parse(name: &str) -> Option<BlockName> {
        let mut numbers = name.split('-').map(|number| u64::from_str_radix(number, 16).ok());
        let (start, len, partial) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let range = start..start.checked_add(len)?;
        let partial_checksums = [(partial >> 32) as u32, partial as u32];
        let is_valid = len > 0 && len <= MAX_BLOCK_BYTES && range.end <= MAX_OBJECT_BYTES;
        let block = BlockName { range, partial_checksums };
        (is_valid && block.to_string() == name).then_some(block)
    }

    /// The offset in the file of a byte of the block. Its offset in a page is the same as in the object, so that direct
    /// reads can fill aligned memory.
    pub fn file_offset(&self, at: u64) -> u64 {
        file_offset(self.range.start, at)
    }

    /// The checksums of all pieces that a part of the block lies in.
    pub fn checksums(
        &self,
        part: &Range<u64>,
        of_object: &ObjectChecksums,
    ) -> Result<Vec<u32>, BlockError> {
        let (pieces, of_block) = (pieces_of(part), pieces_of(&self.range));
        let mut checksums = of_object.read(pieces.clone())?;
        let [first, last] = self.partial_checksums;
        let begins_inside = !self.range.start.is_multiple_of(CHECKED_BYTES);
        let ends_inside = !self.range.end.is_multiple_of(CHECKED_BYTES);
        if let Some(checksum) = checksums.last_mut()
            && ends_inside
            && pieces.end == of_block.end
        {
            *checksum = last;
        }
        if let Some(checksum) = checksums.first_mut()
            && begins_inside
            && pieces.start == of_block.start
        {
            *checksum = first;
        }
        Ok(checksums)
    }
}

impl fmt::Display for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BlockName { range, partial_checksums: [first, last] } = self;
        write!(f, "{:012x}-{:x}-{first:08x}{last:08x}", range.start, range.end - range.start)
    }
}

fn file_offset(start: u64, at: u64) -> u64 {
    start % PAGE_BYTES as u64 + (at - start)
}

/// A block that is being written. It has no name until it is whole, so a drop before that removes it.
pub struct BlockWriter {
    file: TempFile,
    start: u64,
    len: u64,
    /// The last bytes, which are not written yet.
    pending: Vec<u8>,
    hasher: ChecksumHasher,
    /// The checksums of the pieces that have ended.
    checksums: Vec<u32>,
}

impl BlockWriter {
    /// Begins a block at an offset of an object.
    pub fn create(folder: &Path, object: &ObjectId, start: u64) -> io::Result<BlockWriter> {
        // For filesystems without unnamed files (O_TMPFILE). A second writer of this start gets another hidden name.
        let name = format!("{start:012x}");
        let file = TempFile::create(folder, Some(OsStr::new(&name)), Mode::RUSR | Mode::WUSR)?;
        let hasher = ChecksumHasher::new(object);
        let (pending, checksums) = Default::default();
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
            let at = self.start + self.len;
            let room = (CHECKED_BYTES - at % CHECKED_BYTES) as usize;
            let (piece, behind) = rest.split_at(room.min(rest.len()));
            self.hasher.update(piece);
            self.buffer(piece)?;
            rest = behind;
            if piece.len() == room {
                self.checksums.push(self.hasher.take(at + room as u64));
            }
        }
        Ok(())
    }

    /// Adds bytes to those that are not written yet, and writes them at each multiple of [`WRITE_BYTES`].
    fn buffer(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let end = file_offset(self.start, self.start + self.len);
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
        let end = file_offset(self.start, self.start + self.len);
        self.file.file().write_all_at(&self.pending, end - self.pending.len() as u64)?;
        self.pending.clear();
        Ok(())
    }

    /// Gives the block its name, unless another process has written the same block. Returns the name.
    pub fn finish(mut self, folder: &Path, of_object: &ObjectChecksums) -> io::Result<BlockName> {
        self.write_pending()?;
        let range = self.start..self.start + self.len;
        let mut partial_checksums = [0; 2];
        if !range.end.is_multiple_of(CHECKED_BYTES) {
            partial_checksums[1] = self.hasher.take(range.end);
        }
        let mut pieces = pieces_of(&range);
        let mut checksums = &self.checksums[..];
        if !range.start.is_multiple_of(CHECKED_BYTES) {
            match checksums.split_first() {
                Some((&first, others)) => (partial_checksums[0], checksums) = (first, others),
                None => partial_checksums.swap(0, 1),
            }
            pieces.start += 1;
        }
        of_object.write(pieces.start, checksums)?;
        let block = BlockName { range, partial_checksums };
        match self.file.take(&folder.join(block.to_string()), false) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(block),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_names_are_no_blocks() {
        let partial = "0123456789abcdef";
        for name in [
            "",
            "object.json",
            "checksums",
            "000000000000-10",
            "000000000000-0-0000000000000000",
            "0-10-0000000000000000",
            "000000000000-10-0",
            "000000000000-800001-0000000000000000",
            "000000000000-10-0000000000000000-0",
            "zz-1-0000000000000000",
            "ffffffffffffe000-1fff-0000000000000000",
            "7fffffffffffffff-1-0000000000000000",
        ] {
            assert_eq!(BlockName::parse(name), None, "{name}");
        }
        let name = format!("000000000064-10-{partial}");
        let block = BlockName::parse(&name).unwrap();
        assert_eq!((block.range.clone(), block.to_string()), (100..116, name));
    }
}
