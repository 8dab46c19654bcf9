//! Reads one open file: from the page cache, past it (`O_DIRECT`), or through it.
//!
//! A [`FileReader`] holds the file, and remembers which of these its filesystem supports. Every read but
//! [`FileReader::read_cached`] checks that the file is unchanged.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::error::SourceError;
use super::file::{OpenFile, SourceFile};
use super::metadata::FilesystemKind;
use super::page_cache::{LentPages, PageCacheGuard, PageLender, Residency, WholeFileGuard};
use super::read_at::ReadAt;
use super::read_spans::{Span, plan_spans};
use super::store::PreferredRequests;

/// Offsets, lengths and buffers of direct reads must be multiples of this. All disks in use require this or less.
pub const DIRECT_ALIGNMENT_BYTES: usize = 4096;

/// How bytes were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMode {
    /// Past the page cache.
    Direct,
    /// Through the page cache.
    Buffered,
}

/// An open file, and what is known about reading it.
#[derive(Debug)]
pub struct FileReader {
    file: Arc<OpenFile>,
    is_local: bool,
    is_overlay: bool,
    residency: Residency,
    lender: PageLender,
    /// Opened by the first direct read.
    direct_file: OnceLock<Option<DirectFile>>,
    is_direct_unsupported: AtomicBool,
}

impl FileReader {
    /// The reader of a file that was just opened.
    pub fn new(file: &Arc<OpenFile>) -> FileReader {
        let filesystem = FilesystemKind::of(file.descriptor());
        FileReader {
            file: Arc::clone(file),
            is_local: filesystem.is_local,
            is_overlay: filesystem.is_overlay,
            residency: Residency::new(filesystem),
            lender: PageLender::default(),
            direct_file: OnceLock::new(),
            is_direct_unsupported: AtomicBool::new(false),
        }
    }

    /// The file that it reads.
    pub fn open_file(&self) -> &OpenFile {
        &self.file
    }

    /// Whether asking its filesystem never waits for another program or machine.
    pub fn is_local(&self) -> bool {
        self.is_local
    }

    /// The requests that the file is to be read by, if each takes long whatever its size.
    pub fn preferred_requests(&self) -> Option<PreferredRequests> {
        self.file.preferred_requests()
    }

    /// Whether checking that the file is unchanged never waits for another program or machine.
    pub fn is_check_immediate(&self) -> bool {
        self.is_local || self.file.is_state_known()
    }

    /// Fills `out`, aligned memory, from an aligned offset: directly if the filesystem can, else buffered. Near the
    /// end of the file only the first `len` bytes exist.
    pub fn read_aligned(
        &self,
        out: &mut [u8],
        len: usize,
        offset: u64,
    ) -> Result<ReadMode, SourceError> {
        if self.read_direct(out, offset)? {
            return Ok(ReadMode::Direct);
        }
        self.read_buffered(&mut out[..len], offset)?;
        Ok(ReadMode::Buffered)
    }

    /// Fills targets, which are in order and lie in `range`: directly if the filesystem can, else buffered. Both ends of the
    /// range are aligned, and the second may lie behind the end of the file. Whole pages of targets that begin in
    /// memory as in the file are read into place. The rest goes through `scratch`, aligned memory as long as the range.
    pub fn read_into_place(
        &self,
        range: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
        scratch: &mut [u8],
    ) -> Result<ReadMode, SourceError> {
        let targets = targets.iter_mut().map(|(at, target)| (*at, &mut target[..]));
        let mut spans = plan_spans(range, targets, scratch);
        let mut mode = ReadMode::Buffered;
        if let Some(direct) = self.direct_file() {
            let mut slices: Vec<_> = spans.iter_mut().map(Span::as_io_slice).collect();
            match direct.read_exact_vectored_at(&mut slices, range.start)? {
                DirectReadOutcome::Complete => mode = ReadMode::Direct,
                DirectReadOutcome::Unsupported => self.disable_direct(),
                DirectReadOutcome::UnsuitableMemory => {}
            }
        }
        if mode == ReadMode::Buffered {
            let mut at = range.start;
            for span in &mut spans {
                let available = self.file.size().saturating_sub(at);
                let needed = available.min(span.bytes.len() as u64) as usize;
                self.file.read_exact_at(&mut span.bytes[..needed], at)?;
                at += needed as u64;
            }
        }
        self.file.check_unchanged()?;
        spans.iter_mut().for_each(Span::copy_out);
        Ok(mode)
    }

    /// Fills `out`, aligned memory, from an aligned offset past the page cache; false if the filesystem cannot.
    pub fn read_direct(&self, out: &mut [u8], offset: u64) -> Result<bool, SourceError> {
        let Some(direct) = self.direct_file() else { return Ok(false) };
        match direct.read_exact_at(out, offset)? {
            DirectReadOutcome::Complete => {
                self.file.check_unchanged()?;
                Ok(true)
            }
            DirectReadOutcome::Unsupported => {
                self.disable_direct();
                Ok(false)
            }
            DirectReadOutcome::UnsuitableMemory => Ok(false),
        }
    }

    /// Fills `out`, any memory, from any offset, through the page cache.
    pub fn read_buffered(&self, out: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.file.read_exact_at(out, offset)?;
        self.file.check_unchanged()
    }

    /// Fills each target from its offset with one request, of a file that is not on this machine. Targets are in order
    /// and lie close together. Returns the bytes that the cache on disk had; `None` if the file is on this machine.
    pub fn read_remote(
        &self,
        targets: &mut [(u64, &mut [u8])],
    ) -> Result<Option<u64>, SourceError> {
        if self.file.descriptor().is_some() {
            return Ok(None);
        }
        self.file.read_scattered(targets).map(Some)
    }

    /// Whether the file lies in a store, and not on a filesystem.
    pub fn is_remote(&self) -> bool {
        self.file.descriptor().is_none()
    }

    /// As [`FileReader::read_buffered`], without the kernel's readahead.
    pub fn read_without_readahead(&self, out: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let Some(fd) = self.residency.no_readahead_fd(&self.file) else {
            return self.read_buffered(out, offset);
        };
        self.file.read_exact_with(fd, out, offset)?;
        self.file.check_unchanged()
    }

    /// Whether [`FileReader::read_aligned`] reads directly, as far as is known.
    pub fn is_direct(&self) -> bool {
        self.direct_file().is_some()
    }

    /// Fills `out` if the page cache has all of it. Must be followed by [`OpenFile::check_unchanged`].
    pub fn read_cached(&self, out: &mut [u8], offset: u64) -> bool {
        self.residency.read_cached(&self.file, out, offset)
    }

    /// Lends a range of the page cache to a caller that hands it to the kernel; `None` if it must be read. Must be
    /// followed by [`OpenFile::check_unchanged`].
    pub fn lend_cached(&self, range: &Range<u64>) -> Option<LentPages<'_>> {
        let is_known = self.is_cached(range) && self.residency.is_reported();
        is_known.then(|| self.lender.lend(&self.file, range)).flatten()
    }

    /// Whether the page cache has all of a range, and enough beyond it that reading it starts no readahead.
    pub fn is_cached(&self, range: &Range<u64>) -> bool {
        self.is_local && self.residency.contains(&self.file, range)
    }

    /// A guard of the page cache for reads over a long time, among those of other programs.
    pub fn guard_reads(&self) -> PageCacheGuard {
        PageCacheGuard::new(self.is_overlay)
    }

    /// A guard of the page cache for all reads until it is dropped.
    pub fn guard_whole_file(&self) -> WholeFileGuard<'_> {
        WholeFileGuard::new(self.is_overlay, &self.file)
    }

    fn direct_file(&self) -> Option<&DirectFile> {
        if !self.is_local || self.is_direct_unsupported.load(Ordering::Relaxed) {
            return None;
        }
        self.direct_file.get_or_init(|| DirectFile::open(&self.file)).as_ref()
    }

    fn disable_direct(&self) {
        if !self.is_direct_unsupported.swap(true, Ordering::Relaxed) {
            let path = self.file.file().path();
            tracing::debug!(path = %path.display(), "its filesystem refuses direct reads of it");
        }
    }
}

/// A source file open for reads past the page cache: a second descriptor, with `O_DIRECT`.
#[derive(Debug)]
pub struct DirectFile {
    fd: OwnedFd,
    file: Arc<SourceFile>,
}

/// The outcome of a direct read without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirectReadOutcome {
    /// All bytes were read.
    Complete,
    /// The filesystem has no direct reads of this file, although it could be opened for them.
    Unsupported,
    /// The memory is of a kind that no device writes to, such as another device's.
    UnsuitableMemory,
}

impl DirectFile {
    /// Opens the file again for direct reads; `None` if its filesystem has none, or the file cannot be opened any
    /// more. Buffered reads remain possible.
    pub fn open(file: &OpenFile) -> Option<DirectFile> {
        let fd = file.reopen(OFlags::DIRECT)?;
        Some(DirectFile { fd, file: Arc::clone(file.file()) })
    }

    /// Fills `buf` from `offset`, both aligned. Near the end of the file only the bytes up to it are read; fewer
    /// are an error. Must be followed by [`OpenFile::check_unchanged`].
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<DirectReadOutcome, SourceError> {
        self.read_exact_vectored_at(&mut [IoSliceMut::new(buf)], offset)
    }

    /// As [`DirectFile::read_exact_at`], into adjacent bytes of several buffers, all aligned.
    fn read_exact_vectored_at(
        &self,
        buffers: &mut [IoSliceMut<'_>],
        offset: u64,
    ) -> Result<DirectReadOutcome, SourceError> {
        let remaining = self.file.identity().size.saturating_sub(offset);
        let len: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        let needed = remaining.min(len) as usize;
        let read = |buffers: &mut [IoSliceMut<'_>], done: usize| {
            rustix::io::preadv(&self.fd, buffers, offset + done as u64)
        };
        match fill_buffers(buffers, needed, read) {
            Ok(Some(outcome)) => Ok(outcome),
            // Shorter than its own size: it was truncated.
            Ok(None) => Err(SourceError::Truncated { path: self.file.path(), offset }),
            Err(error) => Err(SourceError::io(&self.file.path(), "read it", error)),
        }
    }
}

/// Fills buffers by several reads, if one returns less: `read` gets what is left of the buffers, and the number of bytes so
/// far. `None` if there are fewer than the needed bytes.
fn fill_buffers(
    mut buffers: &mut [IoSliceMut<'_>],
    needed: usize,
    mut read: impl FnMut(&mut [IoSliceMut<'_>], usize) -> Result<usize, Errno>,
) -> Result<Option<DirectReadOutcome>, Errno> {
    let mut done = 0;
    while done < needed {
        match read(buffers, done) {
            Ok(n) if n > 0 && (done + n >= needed || n.is_multiple_of(DIRECT_ALIGNMENT_BYTES)) => {
                done += n;
                IoSliceMut::advance_slices(&mut buffers, n);
            }
            Ok(_) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                return Ok(Some(DirectReadOutcome::Unsupported));
            }
            Err(Errno::FAULT) => return Ok(Some(DirectReadOutcome::UnsuitableMemory)),
            Err(error) => return Err(error),
        }
    }
    Ok(Some(DirectReadOutcome::Complete))
}

impl AsFd for DirectFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use memmap2::MmapMut;

    use super::super::test_file;
    use super::*;

    #[test]
    fn the_end_of_a_file_is_read_as_far_as_it_goes() {
        let bytes: Vec<u8> = (0..10_000u32).map(|n| (n % 251) as u8).collect();
        let (_dir, file) = test_file::on_disk(&bytes);
        let direct = DirectFile::open(&file).expect("direct reads where this is built");
        let mut buf = MmapMut::map_anon(16_384).unwrap();
        assert_eq!(direct.read_exact_at(&mut buf, 4096).unwrap(), DirectReadOutcome::Complete);
        assert_eq!(&buf[..bytes.len() - 4096], &bytes[4096..]);
    }

    #[test]
    fn whole_pages_of_targets_are_read_into_place_up_to_the_end_of_the_file() {
        let bytes: Vec<u8> = (0..90_000u32).map(|n| (n % 251) as u8).collect();
        let (_dir, file) = test_file::on_disk(&bytes);
        let file = Arc::new(file);
        let (direct, buffered) = (FileReader::new(&file), FileReader::new(&file));
        buffered.disable_direct();
        for (reader, expected) in [(direct, ReadMode::Direct), (buffered, ReadMode::Buffered)] {
            for shift in [4100 % DIRECT_ALIGNMENT_BYTES, 8] {
                let mut memory = MmapMut::map_anon(100_000).unwrap();
                let mut scratch = MmapMut::map_anon(90_112).unwrap();
                let (first, second) = memory.split_at_mut(90_000);
                let targets =
                    &mut [(4100, &mut first[shift..][..80_000]), (89_990, &mut second[..10])];
                let range = 4096..94_208;
                let mode = reader.read_into_place(&range, targets, &mut scratch).unwrap();
                assert_eq!(mode, expected);
                assert!(memory[shift..][..80_000] == bytes[4100..84_100]);
                assert!(memory[90_000..][..10] == bytes[89_990..]);
                // In place, only the ends went through the scratch memory.
                let is_copied = scratch[16_384..].iter().any(|byte| *byte != 0);
                assert_eq!(is_copied, shift == 8);
            }
        }
    }

    #[test]
    fn short_reads_go_on_where_they_ended_in_any_buffer() {
        const PAGE: usize = DIRECT_ALIGNMENT_BYTES;
        let file: Vec<u8> = (0..5 * PAGE - 96).map(|n| (n % 251) as u8).collect();
        // Within a buffer, at its end, across one, and to the end of the file.
        for steps in [vec![PAGE; 5], vec![2 * PAGE, PAGE, 2 * PAGE], vec![3 * PAGE, 2 * PAGE]] {
            let (mut first, mut second) = (vec![0; 2 * PAGE], vec![0; 3 * PAGE]);
            let buffers = &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
            let (mut steps, mut interrupted) = (steps.into_iter(), false);
            let filled = fill_buffers(buffers, file.len(), |buffers, done| {
                interrupted = !interrupted;
                if interrupted {
                    return Err(Errno::INTR);
                }
                let mut source = &file[done..file.len().min(done + steps.next().unwrap())];
                let len = source.len();
                for buffer in buffers {
                    let (now, rest) = source.split_at(buffer.len().min(source.len()));
                    buffer[..now.len()].copy_from_slice(now);
                    source = rest;
                }
                Ok(len)
            });
            assert_eq!(filled, Ok(Some(DirectReadOutcome::Complete)));
            assert!([first, second].concat()[..file.len()] == file);
        }
    }

    #[test]
    fn reads_that_cannot_go_on_say_why() {
        let outcome = |answer: Result<usize, Errno>| {
            let mut memory = vec![0; 2 * DIRECT_ALIGNMENT_BYTES];
            let mut answers = [Ok(DIRECT_ALIGNMENT_BYTES), answer].into_iter();
            let needed = memory.len();
            fill_buffers(&mut [IoSliceMut::new(&mut memory)], needed, |_, _| {
                answers.next().unwrap()
            })
        };
        assert_eq!(outcome(Err(Errno::INVAL)), Ok(Some(DirectReadOutcome::Unsupported)));
        assert_eq!(outcome(Err(Errno::FAULT)), Ok(Some(DirectReadOutcome::UnsuitableMemory)));
        assert_eq!(outcome(Err(Errno::IO)), Err(Errno::IO));
        // A part of a page, and the end, in front of the needed bytes.
        assert_eq!((outcome(Ok(100)), outcome(Ok(0))), (Ok(None), Ok(None)));
    }

    #[test]
    fn a_file_whose_name_is_gone_is_opened_again_and_a_truncated_one_is_not() {
        let (dir, file) = test_file::on_disk(&[7; 9000]);
        std::fs::remove_file(dir.path().join("f")).unwrap();
        assert!(file.reopen(OFlags::empty()).is_some());

        let (dir, file) = test_file::on_disk(&[7; 9000]);
        let direct = DirectFile::open(&file).expect("direct reads where this is built");
        let name = dir.path().join("f");
        std::fs::OpenOptions::new().write(true).open(name).unwrap().set_len(5000).unwrap();
        assert!(file.reopen(OFlags::empty()).is_none());
        let mut buf = MmapMut::map_anon(16_384).unwrap();
        let read = direct.read_exact_at(&mut buf, 0);
        assert!(matches!(read, Err(SourceError::Truncated { .. })));
    }
}
