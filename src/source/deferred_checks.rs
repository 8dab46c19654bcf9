//! Checks of headers that a parser deduced and did not read, because each small read of a store costs a request.
//!
//! The first read of the data after a header also reads the header, and compares it. No byte of the data is returned
//! before.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::error::{HeaderMismatch, SourceError};
use super::store::FileHandle;

/// The largest distance between a header and a read of its data for which one request fetches both.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// The largest read that a store serves from pages in memory, which mostly have the headers. A longer read requests
/// its headers together with its data.
const MAX_PAGED_READ_BYTES: usize = 64 << 10;

/// A header that was not read, followed by the data that it describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadHeader {
    /// The offset of the header.
    pub start: u64,
    /// The range of the data, which follows the header.
    pub data: Range<u64>,
}

/// Compares headers with what a parser deduced.
pub trait HeaderCheck: fmt::Debug + Send + Sync {
    /// Compares the bytes of a header, by its index.
    fn check(&self, index: usize, header: &[u8]) -> Result<(), HeaderMismatch>;

    /// Approximate memory in bytes.
    fn memory_bytes(&self) -> usize;
}

/// The unread headers of a file, in its order. No two overlap.
#[derive(Debug)]
pub struct DeferredChecks {
    headers: Box<[UnreadHeader]>,
    is_checked: Box<[AtomicBool]>,
    check: Box<dyn HeaderCheck>,
}

/// The memory for a header in a read.
enum HeaderBytes {
    /// The target with this index, from this offset on.
    Target(usize, usize),
    /// A buffer in addition to the targets.
    Own(Vec<u8>),
}

impl DeferredChecks {
    /// The checks of unread headers, which are in the order of the file.
    pub fn new(headers: Vec<UnreadHeader>, check: Box<dyn HeaderCheck>) -> DeferredChecks {
        let is_checked = headers.iter().map(|_| AtomicBool::new(false)).collect();
        DeferredChecks { headers: headers.into(), is_checked, check }
    }

    /// Approximate memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        let header_bytes = size_of::<UnreadHeader>() + size_of::<AtomicBool>();
        size_of::<DeferredChecks>() + self.headers.len() * header_bytes + self.check.memory_bytes()
    }

    /// The indices of the headers whose data overlaps a range.
    fn headers_in(&self, range: Range<u64>) -> impl Iterator<Item = usize> {
        let first = self.headers.partition_point(|header| header.data.end <= range.start);
        let indices = (first..self.headers.len())
            .take_while(move |&n| self.headers[n].data.start < range.end);
        indices.filter(|&n| !self.headers[n].data.is_empty())
    }

    fn unchecked_in(&self, range: Range<u64>) -> impl Iterator<Item = usize> {
        self.headers_in(range).filter(|&n| !self.is_checked[n].load(Relaxed))
    }

    /// Extends a range to the header of its first bytes, unless that is far away.
    pub fn with_header(&self, range: Range<u64>) -> Range<u64> {
        let first = self.headers_in(range.clone()).next().map(|n| self.headers[n].start);
        let near = first.filter(|&start| start.saturating_add(MAX_GAP_BYTES) >= range.start);
        near.map_or(range.start, |start| start.min(range.start))..range.end
    }

    /// The headers that describe bytes of a range and are not in `kept`.
    pub fn headers_outside(
        &self,
        range: Range<u64>,
        kept: &Range<u64>,
    ) -> impl Iterator<Item = Range<u64>> {
        let headers = self.headers_in(range);
        let headers = headers.map(|n| self.headers[n].start..self.headers[n].data.start);
        headers.filter(|header| header.start < kept.start || header.end > kept.end)
    }

    /// Fills `buf` as `FileHandle::read_available_at` does, and checks the headers of what it returns.
    pub fn read_available_at(
        &self,
        file: &CheckedFile<'_>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize, SourceError> {
        let end = offset.saturating_add(buf.len() as u64).min(file.size);
        let available = end.saturating_sub(offset) as usize;
        if available > MAX_PAGED_READ_BYTES && self.unchecked_in(offset..end).next().is_some() {
            self.read_scattered(file, &mut [(offset, &mut buf[..available])])?;
            return Ok(available);
        }
        let read = file.handle.read_available_at(buf, offset)?;
        self.check_unread(file, offset..offset + read as u64)?;
        Ok(read)
    }

    /// Fills targets as `FileHandle::read_scattered` does, and checks the headers of what it returns.
    pub fn read_scattered(
        &self,
        file: &CheckedFile<'_>,
        targets: &mut [(u64, &mut [u8])],
    ) -> Result<u64, SourceError> {
        let end = targets.iter().map(|(at, target)| at + target.len() as u64).max().unwrap_or(0);
        let start = targets.first().map_or(end, |(at, _)| *at);
        let mut headers: Vec<(usize, HeaderBytes)> = self
            .unchecked_in(start..end)
            .filter_map(|n| Some((n, self.place_header(n, start, targets)?)))
            .collect();
        if headers.is_empty() {
            let cached = file.handle.read_scattered(targets)?;
            self.check_unread(file, start..end)?;
            return Ok(cached);
        }
        let own = headers.iter_mut().filter_map(|(n, bytes)| match bytes {
            HeaderBytes::Own(bytes) => Some((self.headers[*n].start, &mut bytes[..])),
            HeaderBytes::Target(..) => None,
        });
        let mut all: Vec<(u64, &mut [u8])> =
            targets.iter_mut().map(|(at, target)| (*at, &mut **target)).chain(own).collect();
        all.sort_by_key(|(at, _)| *at);
        let cached = file.handle.read_scattered(&mut all)?;
        drop(all);
        for (n, bytes) in headers {
            let header = &self.headers[n];
            let bytes = match &bytes {
                HeaderBytes::Own(bytes) => bytes,
                HeaderBytes::Target(target, from) => {
                    &targets[*target].1[*from..][..(header.data.start - header.start) as usize]
                }
            };
            self.check(file, n, bytes)?;
        }
        self.check_unread(file, start..end)?;
        Ok(cached)
    }

    /// Chooses the memory for a header in a read from `start` on. `None` if the header is far away, or partly in a
    /// target.
    fn place_header(
        &self,
        index: usize,
        start: u64,
        targets: &[(u64, &mut [u8])],
    ) -> Option<HeaderBytes> {
        let header = self.headers[index].start..self.headers[index].data.start;
        // Targets are in order. If they overlap, the header may get a buffer although a target has it.
        let next = targets.partition_point(|(at, _)| *at <= header.start);
        let is_free = targets.get(next).is_none_or(|(at, _)| *at >= header.end);
        if let Some(before) = next.checked_sub(1) {
            let (at, target) = &targets[before];
            let target_end = at + target.len() as u64;
            if target_end >= header.end {
                return Some(HeaderBytes::Target(before, (header.start - at) as usize));
            }
            if target_end > header.start {
                return None;
            }
        }
        let is_near = header.start.saturating_add(MAX_GAP_BYTES) >= start;
        let own = || HeaderBytes::Own(vec![0; (header.end - header.start) as usize]);
        (is_free && is_near).then(own)
    }

    /// Reads and compares the headers of a range that are not checked yet.
    fn check_unread(&self, file: &CheckedFile<'_>, range: Range<u64>) -> Result<(), SourceError> {
        for n in self.unchecked_in(range) {
            let header = &self.headers[n];
            let mut bytes = vec![0; (header.data.start - header.start) as usize];
            if file.handle.read_available_at(&mut bytes, header.start)? < bytes.len() {
                return Err(SourceError::Truncated { path: file.path(), offset: header.start });
            }
            self.check(file, n, &bytes)?;
        }
        Ok(())
    }

    fn check(&self, file: &CheckedFile<'_>, index: usize, bytes: &[u8]) -> Result<(), SourceError> {
        self.check.check(index, bytes).map_err(|mismatch| {
            let mismatch = Box::new(mismatch);
            SourceError::HeaderMismatch { path: file.path(), mismatch }
        })?;
        self.is_checked[index].store(true, Relaxed);
        Ok(())
    }
}

/// An open file whose headers are compared.
pub struct CheckedFile<'a> {
    pub handle: &'a dyn FileHandle,
    pub size: u64,
    /// The path for messages.
    pub path: &'a dyn Fn() -> PathBuf,
}

impl CheckedFile<'_> {
    fn path(&self) -> PathBuf {
        (self.path)()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::source::metadata::FileState;

    /// A header is four bytes, equal to its index. Its data has its index plus 100 in each byte.
    const HEADER_BYTES: u64 = 4;

    /// A file in memory that records which ranges are read.
    #[derive(Debug)]
    struct RecordingFile {
        bytes: Vec<u8>,
        reads: Mutex<Vec<Range<u64>>>,
    }

    impl FileHandle for RecordingFile {
        fn state(&self) -> Result<FileState, SourceError> {
            unreachable!("reads do not ask")
        }

        fn read_available_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, SourceError> {
            let len = buf.len().min(self.bytes.len() - offset as usize);
            buf[..len].copy_from_slice(&self.bytes[offset as usize..][..len]);
            self.reads.lock().unwrap().push(offset..offset + len as u64);
            Ok(len)
        }

        fn read_scattered(&self, targets: &mut [(u64, &mut [u8])]) -> Result<u64, SourceError> {
            let end = targets.iter().map(|(at, target)| at + target.len() as u64).max().unwrap();
            self.reads.lock().unwrap().push(targets[0].0..end);
            for (at, target) in targets {
                target.copy_from_slice(&self.bytes[*at as usize..][..target.len()]);
            }
            Ok(0)
        }
    }

    #[derive(Debug)]
    struct IndexCheck;

    impl HeaderCheck for IndexCheck {
        fn check(&self, index: usize, header: &[u8]) -> Result<(), HeaderMismatch> {
            let mismatch = || HeaderMismatch { reason: format!("header {index}"), remedy: "none" };
            (*header == [index as u8; HEADER_BYTES as usize]).then_some(()).ok_or_else(mismatch)
        }

        fn memory_bytes(&self) -> usize {
            0
        }
    }

    /// Makes a file with data of these lengths, each after its header.
    fn make_file(lens: &[u64]) -> (RecordingFile, DeferredChecks) {
        let (mut bytes, mut headers) = (Vec::new(), Vec::new());
        for (n, &len) in lens.iter().enumerate() {
            let start = bytes.len() as u64;
            bytes.resize(bytes.len() + HEADER_BYTES as usize, n as u8);
            bytes.resize(bytes.len() + len as usize, n as u8 + 100);
            headers.push(UnreadHeader { start, data: start + HEADER_BYTES..bytes.len() as u64 });
        }
        let checks = DeferredChecks::new(headers, Box::new(IndexCheck));
        (RecordingFile { bytes, reads: Mutex::default() }, checks)
    }

    fn checked(file: &RecordingFile) -> CheckedFile<'_> {
        CheckedFile { handle: file, size: file.bytes.len() as u64, path: &|| "f".into() }
    }

    /// Start and end of each read since the last call.
    fn reads(file: &RecordingFile) -> Vec<(u64, u64)> {
        let reads = std::mem::take(&mut *file.reads.lock().unwrap());
        reads.into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn each_header_is_read_once_with_its_data() {
        let (file, checks) = make_file(&[10, 0, 20, 30]);
        let (mut first, mut last) = ([0; 8], [0; 30]);
        // Headers start at 0, 14, 18 and 42.
        let read = |targets: &mut [(u64, &mut [u8])]| {
            checks.read_scattered(&checked(&file), targets).unwrap();
            reads(&file)
        };
        assert_eq!(read(&mut [(6, &mut first), (46, &mut last)]), [(0, 76)]);
        assert_eq!((first, last), ([100; 8], [103; 30]));
        assert_eq!(read(&mut [(6, &mut first), (46, &mut last)]), [(6, 76)]);
        assert_eq!(read(&mut [(22, &mut first)]), [(22, 30)]);
        assert_eq!((checks.with_header(24..30), checks.with_header(42..44)), (18..30, 42..44));
    }

    #[test]
    fn a_header_that_is_far_away_or_in_a_target_is_checked_too() {
        let len = 3 * MAX_GAP_BYTES;
        let (file, checks) = make_file(&[len, len]);
        let second = HEADER_BYTES + len;
        let mut bytes = vec![0; 2 * MAX_GAP_BYTES as usize];
        let start = second - MAX_GAP_BYTES;
        let end = start + bytes.len() as u64;
        let read = checks.read_available_at(&checked(&file), &mut bytes, start).unwrap();
        assert_eq!((read, reads(&file)), (bytes.len(), vec![(start, end), (0, HEADER_BYTES)]));
        assert_eq!(bytes, file.bytes[start as usize..end as usize]);
        checks.read_available_at(&checked(&file), &mut bytes, start).unwrap();
        assert_eq!(reads(&file), [(start, end)]);
        assert_eq!(checks.with_header(start..end), start..end);
    }

    #[test]
    fn no_data_after_a_wrong_header_is_returned() {
        for (bad, at, len) in
            [(0, 4, 1), (1, 500_008, 400_000), (1, 500_004, 100_000), (1, 500_010, 4)]
        {
            let (mut file, checks) = make_file(&[500_000, 500_000]);
            file.bytes[[2, 500_006][bad]] ^= 1;
            let file_reads = |offset: u64, len: usize| {
                let mut buf = vec![0; len];
                let whole = checks.read_available_at(&checked(&file), &mut buf, offset);
                let mut parts = buf.chunks_mut(len.div_ceil(2)).collect::<Vec<_>>();
                let mut targets: Vec<(u64, &mut [u8])> = Vec::new();
                let mut at = offset;
                for part in parts.drain(..) {
                    let next = at + part.len() as u64;
                    targets.push((at, part));
                    at = next;
                }
                let scattered = checks.read_scattered(&checked(&file), &mut targets);
                (whole.is_ok(), scattered.is_ok())
            };
            assert_eq!(file_reads(at, len), (false, false), "{bad} {at} {len}");
            // The other record is read, whatever this one's header is.
            let other = if bad == 0 { 600_000 } else { 1000 };
            assert_eq!(file_reads(other, 100), (true, true));
            assert_eq!(file_reads(other, 90_000), (true, true));
        }
    }
}
