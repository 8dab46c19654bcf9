//! The file of one block: a header of one page, then the bytes of a range of an object.
//!
//! The header states the object, the range, and a checksum for each 64 KiB. Every read compares it. A file that lost
//! bytes in a crash, or whose disk changed them, is a miss, never a wrong tensor.
//! Files are not synchronised: the checksums make that unnecessary.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use crc_fast::{CrcAlgorithm, Digest};
use memmap2::MmapMut;
use rustix::fs::{Advice, CWD, Mode, OFlags, Timespec, Timestamps, fadvise, futimens, openat};

use crate::source::page_cache::count_cached_pages;
use crate::source::scatter::{copy_to_targets, has_targets};
use crate::temp_file::TempFile;

use super::ObjectId;

/// The first bytes of a block's file; another layout gets another number.
const MAGIC: [u8; 8] = *b"ckptfs 1";

/// Bytes of the header: a page, so that the bytes of the block lie aligned for direct reads.
const HEADER_BYTES: usize = 4096;

/// Bytes with a checksum of their own: what a small read costs at least.
const CHECKED_BYTES: usize = 64 << 10;

/// Bytes of one block at most. The checksums of 60 MiB would fit in the header; a lost block is fetched anew whole.
pub const MAX_BLOCK_BYTES: u64 = 8 << 20;

/// Bytes that are read and compared at a time. A block in memory has 1 MiB; with the rest of its first and last
/// checksum's bytes, it needs one read.
const READ_BYTES: usize = 2 << 20;

/// The place of the checksums in the header, and of the header's own.
const CHECKSUMS_AT: usize = 40;
const HEADER_CHECKSUM_AT: usize = HEADER_BYTES - 4;

/// How often a block that is read is marked as used: the eviction of the least recently used needs no finer times.
const USE_INTERVAL: Duration = Duration::from_secs(600);

thread_local! {
    /// Memory for direct reads.
    static SCRATCH: std::cell::RefCell<Option<MmapMut>> = const { std::cell::RefCell::new(None) };
}

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

/// An open block.
#[derive(Debug)]
pub struct BlockReader {
    file: File,
    /// The same file for reads past the page cache; `None` inside if its filesystem has none.
    direct: OnceLock<Option<File>>,
    range: Range<u64>,
    checksums: Box<[u32]>,
}

impl BlockReader {
    /// Opens the block of a range, and compares its header.
    pub fn open(
        path: &Path,
        object: &ObjectId,
        range: &Range<u64>,
    ) -> Result<BlockReader, BlockError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(CWD, path, flags, Mode::empty()).map_err(io::Error::from)?);
        // Each read states what it needs.
        let _ = fadvise(&file, 0, None, Advice::Random);
        let mut header = [0; HEADER_BYTES];
        file.read_exact_at(&mut header, 0)?;
        let metadata = file.metadata()?;
        let len = range.end - range.start;
        let is_whole = metadata.is_file() && metadata.len() == HEADER_BYTES as u64 + len;
        let checksums = parse_header(&header, object, range).filter(|_| is_whole);
        let checksums = checksums.ok_or(BlockError::Corrupt)?;
        mark_used(&file, metadata.atime());
        Ok(BlockReader { file, direct: OnceLock::new(), range: range.clone(), checksums })
    }

    /// Fills the parts of the targets that lie in a range of the block.
    pub fn read(
        &self,
        range: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
    ) -> Result<(), BlockError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let scratch = match scratch {
                Some(scratch) => scratch,
                empty => empty.insert(MmapMut::map_anon(READ_BYTES)?),
            };
            let checked = CHECKED_BYTES as u64;
            let mut at = self.range.start + (range.start - self.range.start) / checked * checked;
            while at < range.end {
                // No further than needed, in whole checked pieces.
                let needed = (range.end - at).next_multiple_of(checked);
                let end = (at + needed.min(READ_BYTES as u64)).min(self.range.end);
                let next = at..end;
                at = end;
                if has_targets(&next, targets) {
                    copy_to_targets(self.read_checked(scratch, &next)?, next.start, targets);
                }
            }
            Ok(())
        })
    }

    /// Compares all checksums.
    pub fn verify(&self) -> Result<(), BlockError> {
        let mut scratch = MmapMut::map_anon(READ_BYTES)?;
        let starts = (self.range.start..self.range.end).step_by(READ_BYTES);
        for start in starts {
            let end = (start + READ_BYTES as u64).min(self.range.end);
            self.read_checked(&mut scratch, &(start..end))?;
        }
        Ok(())
    }

    /// Reads whole checked pieces, and compares them.
    fn read_checked<'a>(
        &self,
        scratch: &'a mut MmapMut,
        range: &Range<u64>,
    ) -> Result<&'a [u8], BlockError> {
        let len = (range.end - range.start) as usize;
        let offset = range.start - self.range.start;
        let file_range = HEADER_BYTES as u64 + offset..HEADER_BYTES as u64 + offset + len as u64;
        self.read_file(scratch, &file_range)?;
        let bytes = &scratch[..len];
        let first = (offset / CHECKED_BYTES as u64) as usize;
        for (bytes, expected) in bytes.chunks(CHECKED_BYTES).zip(&self.checksums[first..]) {
            if checksum(bytes) != *expected {
                return Err(BlockError::Corrupt);
            }
        }
        Ok(bytes)
    }

    /// Reads cached pages from the page cache, and others past it: blocks take no memory twice.
    fn read_file(&self, out: &mut [u8], range: &Range<u64>) -> io::Result<()> {
        let len = (range.end - range.start) as usize;
        let pages = range.start / 4096..range.end.div_ceil(4096);
        let cached = count_cached_pages(self.file.as_fd(), range).unwrap_or(0);
        let direct = if cached >= pages.end - pages.start { None } else { self.direct_file() };
        let Some(direct) = direct else {
            return self.file.read_exact_at(&mut out[..len], range.start);
        };
        let mut done = 0;
        while done < len {
            // Whole pages, also at the end of the file.
            let room = (len - done).next_multiple_of(4096);
            match direct.read_at(&mut out[done..done + room], range.start + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) if done + n >= len || n.is_multiple_of(4096) => done += n,
                Ok(_) => return self.file.read_exact_at(&mut out[..len], range.start),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return self.file.read_exact_at(&mut out[..len], range.start),
            }
        }
        Ok(())
    }

    fn direct_file(&self) -> Option<&File> {
        let open = || {
            let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
            openat(CWD, path, flags, Mode::empty()).ok().map(File::from)
        };
        self.direct.get_or_init(open).as_ref()
    }
}

/// Marks a block as used now, unless it was marked lately.
fn mark_used(file: &File, used: i64) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = now.as_secs().cast_signed();
    if now.abs_diff(used) < USE_INTERVAL.as_secs() {
        return;
    }
    let omit = rustix::fs::UTIME_OMIT as _;
    let times = Timestamps {
        last_access: Timespec { tv_sec: now, tv_nsec: 0 },
        last_modification: Timespec { tv_sec: 0, tv_nsec: omit },
    };
    // A cache that cannot be written to is not evicted from either.
    let _ = futimens(file, &times);
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The checksums of a header that is the one of an object and a range.
fn parse_header(
    header: &[u8; HEADER_BYTES],
    object: &ObjectId,
    range: &Range<u64>,
) -> Option<Box<[u32]>> {
    let len = range.end - range.start;
    let number = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let is_whole = number(HEADER_CHECKSUM_AT) == checksum(&header[..HEADER_CHECKSUM_AT]);
    let is_same = header[..8] == MAGIC
        && header[8..24] == object.0
        && header[24..32] == range.start.to_le_bytes()
        && header[32..40] == len.to_le_bytes();
    let count = len.div_ceil(CHECKED_BYTES as u64) as usize;
    (is_whole && is_same && len <= MAX_BLOCK_BYTES)
        .then(|| (0..count).map(|n| number(CHECKSUMS_AT + 4 * n)).collect())
}

/// A block that is being written. It has no name until it is whole; dropped before, it is gone.
pub struct BlockWriter {
    file: TempFile,
    start: u64,
    len: u64,
    digest: Digest,
    checksums: Vec<u32>,
}

impl BlockWriter {
    /// Begins a block at an offset of an object.
    pub fn create(folder: &Path, start: u64) -> io::Result<BlockWriter> {
        // A hidden name, where it needs one, is of the start: a second writer of it gets one of its own.
        let name = format!("{start:012x}");
        let file = TempFile::create(folder, Some(OsStr::new(&name)), Mode::RUSR | Mode::WUSR)?;
        let digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
        Ok(BlockWriter { file, start, len: 0, digest, checksums: Vec::new() })
    }

    /// The offset of its first byte in the object.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The bytes that it has so far.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Appends bytes: no more than fit in a block.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.file().write_all_at(bytes, HEADER_BYTES as u64 + self.len)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let room = CHECKED_BYTES - (self.len % CHECKED_BYTES as u64) as usize;
            let (piece, behind) = rest.split_at(room.min(rest.len()));
            self.digest.update(piece);
            self.len += piece.len() as u64;
            rest = behind;
            if self.len.is_multiple_of(CHECKED_BYTES as u64) {
                self.checksums.push(self.digest.finalize_reset() as u32);
            }
        }
        Ok(())
    }

    /// Gives the block its name. Another process may have been faster, which is as good. Returns its range.
    pub fn finish(mut self, folder: &Path, object: &ObjectId) -> io::Result<Range<u64>> {
        if !self.len.is_multiple_of(CHECKED_BYTES as u64) {
            self.checksums.push(self.digest.finalize() as u32);
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
        let own = checksum(&header[..HEADER_CHECKSUM_AT]);
        header[HEADER_CHECKSUM_AT..].copy_from_slice(&own.to_le_bytes());
        self.file.file().write_all_at(&header, 0)?;
        let range = self.start..self.start + self.len;
        match self.file.take(&folder.join(block_name(&range)), false) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(range),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: ObjectId = ObjectId([7; 16]);

    fn write(folder: &Path, start: u64, bytes: &[u8]) -> Range<u64> {
        let mut writer = BlockWriter::create(folder, start).unwrap();
        for piece in bytes.chunks(50_000) {
            writer.append(piece).unwrap();
        }
        writer.finish(folder, &OBJECT).unwrap()
    }

    fn sample(len: usize) -> Vec<u8> {
        (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    #[test]
    fn any_part_of_a_block_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        for len in [1, 65_536, 200_001, 3 << 20] {
            let bytes = sample(len);
            let range = write(dir.path(), 1000, &bytes);
            assert_eq!(parse_block_name(&block_name(&range)), Some(range.clone()));
            let block =
                BlockReader::open(&dir.path().join(block_name(&range)), &OBJECT, &range).unwrap();
            for (from, to) in [(0, len), (len / 3, len), (len / 2, len / 2 + 1), (0, 1)] {
                let part = 1000 + from as u64..1000 + to as u64;
                let mut out = vec![0; to - from];
                block.read(&part, &mut [(part.start, &mut out)]).unwrap();
                assert_eq!(out, bytes[from..to]);
            }
            block.verify().unwrap();
        }
    }

    #[test]
    fn a_changed_byte_anywhere_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = sample(200_000);
        let range = write(dir.path(), 0, &bytes);
        let path = dir.path().join(block_name(&range));
        for at in [0, 9, 30, 50, 3000, 4095, 4096, 70_000, 204_095] {
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            let block = BlockReader::open(&path, &OBJECT, &range);
            let read = block.and_then(|block| block.verify());
            assert!(matches!(read, Err(BlockError::Corrupt)), "{at}");
            file.write_all_at(&byte, at).unwrap();
        }
        BlockReader::open(&path, &OBJECT, &range).unwrap().verify().unwrap();
        assert!(BlockReader::open(&path, &ObjectId([8; 16]), &range).is_err());
        File::options().write(true).open(&path).unwrap().set_len(100_000).unwrap();
        assert!(matches!(BlockReader::open(&path, &OBJECT, &range), Err(BlockError::Corrupt)));
    }

    #[test]
    fn other_names_are_no_blocks() {
        for name in ["", "object.json", "000000000000-0", "0-10", "000000000000-800001", "zz-1"] {
            assert_eq!(parse_block_name(name), None, "{name}");
        }
    }
}
