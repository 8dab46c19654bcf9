//! Reads values that are cast or byte-swapped, and lie in one run of a file, past the page cache.

use crate::checkpoint::tensor::{ByteRun, OriginId, TensorBytes};
use crate::source::{DIRECT_ALIGNMENT_BYTES, FileReader, ReadAt, ReadMode, SourceError};

use super::tensor_read::read_from;

/// A shorter run is read through the page cache, which has the next ones then.
const MIN_RUN_BYTES: u64 = 64 << 10;

/// A range of a tensor, and the run of a file that its values are made from.
pub struct ConvertedRun<'a> {
    file: &'a FileReader,
    bytes: &'a TensorBytes,
    offset: u64,
    run: ByteRun,
}

impl<'a> ConvertedRun<'a> {
    /// The run for `len` bytes of a tensor from `offset` on. `None` if they are not made from one run of a file, or should
    /// be read through the page cache. `file` returns the reader of an origin that is a file.
    pub fn find(
        bytes: &'a TensorBytes,
        offset: u64,
        len: u64,
        file: impl FnOnce(OriginId) -> Option<&'a FileReader>,
    ) -> Option<ConvertedRun<'a>> {
        let run = bytes.source_run(offset, len).filter(|run| run.len > MIN_RUN_BYTES)?;
        let file = file(run.origin).filter(|file| file.is_direct())?;
        let range = run.offset..run.offset + run.len;
        // What is known to be cached may have been evicted since.
        let is_cached = file.is_cached(&range) && file.read_cached(&mut [0], range.end - 1);
        (!is_cached).then_some(ConvertedRun { file, bytes, offset, run })
    }

    /// Fills `out` with the range, by direct reads into `scratch`: aligned memory of at least 64 KiB. The file is
    /// checked to be unchanged. Returns the bytes of the run.
    pub fn read(&self, out: &mut [u8], scratch: &mut [u8]) -> Result<u64, SourceError> {
        const ALIGNMENT_BYTES: u64 = DIRECT_ALIGNMENT_BYTES as u64;
        // A part takes with it what lies around it, for alignment and for values that its ends cut.
        let max_run_bytes = scratch.len() as u64 - 3 * ALIGNMENT_BYTES;
        let max_part_bytes = out.len() as u64 * max_run_bytes / self.run.len;
        let max_part_bytes = (max_part_bytes / ALIGNMENT_BYTES).max(1) * ALIGNMENT_BYTES;
        let part_count = (out.len() as u64).div_ceil(max_part_bytes);
        let part_bytes = (out.len() as u64).div_ceil(part_count).next_multiple_of(ALIGNMENT_BYTES);
        let part_bytes = part_bytes as usize;
        for (part, at) in out.chunks_mut(part_bytes).zip((self.offset..).step_by(part_bytes)) {
            let run = self.bytes.source_run(at, part.len() as u64).unwrap_or(self.run);
            let start = run.offset / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
            let end = (run.offset + run.len).next_multiple_of(ALIGNMENT_BYTES);
            let available = (end.min(self.file.open_file().size()) - start) as usize;
            let read = &mut scratch[..(end - start) as usize];
            let _: ReadMode = self.file.read_aligned(read, available, start)?;
            let held = HeldRun { start, bytes: &read[..available] };
            read_from(self.bytes, at, part, &|_| &held)?;
        }
        Ok(self.run.len)
    }
}

/// The bytes of a run of an origin, in memory. Reads outside it fail.
struct HeldRun<'a> {
    start: u64,
    bytes: &'a [u8],
}

impl ReadAt for HeldRun<'_> {
    fn size(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        // An offset before the run is out of range, as one behind it is.
        self.bytes.read_exact_at(buf, offset.checked_sub(self.start).unwrap_or(u64::MAX))
    }

    fn borrow_at(&self, len: usize, offset: u64) -> Option<&[u8]> {
        self.bytes.borrow_at(len, offset.checked_sub(self.start)?)
    }
}
