//! The file of a block. Reads bypass the page cache, and fill aligned targets in place.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use memmap2::MmapMut;
use rustix::fs::{Advice, CWD, Mode, OFlags, Timespec, Timestamps, fadvise, futimens, openat};
use rustix::io::{Errno, preadv};

use crate::source::file_limit::open_within_limit;
use crate::source::page_cache::count_cached_pages;
use crate::source::read_spans::{PAGE_BYTES, Span, plan_spans};

use super::block::BlockError;

/// Bytes that are read and compared at a time. A request of a mount has up to 2 MiB. With all bytes that its first and
/// last checksum cover, it takes one read.
pub const READ_BYTES: u64 = 3 << 20;

/// Scratch memory of a thread. Pages that no read touches take no memory.
const SCRATCH_BYTES: usize = READ_BYTES as usize + 2 * PAGE_BYTES;

/// How often a block that is read is marked as used: eviction needs no finer times.
const USE_INTERVAL: Duration = Duration::from_secs(600);

/// How often an open file is checked: an evicted block takes space until every process has closed its file.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

thread_local! {
    static SCRATCH: std::cell::RefCell<Option<MmapMut>> = const { std::cell::RefCell::new(None) };
}

/// The file of a block.
#[derive(Debug)]
pub struct OpenBlockFile {
    file: File,
    /// Whether its reads bypass the page cache.
    is_direct: bool,
    /// The same file for buffered reads, from the first one on.
    buffered: OnceLock<File>,
    /// The time at which it was last looked at: seconds since 1970.
    checked: AtomicI64,
}

impl OpenBlockFile {
    pub fn open(path: &Path) -> io::Result<OpenBlockFile> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let open =
            |flags| open_within_limit(|| openat(CWD, path, flags, Mode::empty())).map(File::from);
        let (file, is_direct) = match open(flags | OFlags::DIRECT) {
            // Its filesystem has no direct reads.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => (open(flags)?, false),
            opened => (opened?, true),
        };
        let checked = AtomicI64::new(seconds_now());
        Ok(OpenBlockFile { file, is_direct, buffered: OnceLock::new(), checked })
    }

    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Reads a range, which begins at a page, into spans. Copies them to the targets if `check` accepts them.
    pub fn read<'a, T>(
        &self,
        range: &Range<u64>,
        targets: impl Iterator<Item = (u64, &'a mut [u8])>,
        check: impl FnOnce(&[Span<'_>]) -> Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let scratch = match scratch {
                Some(scratch) => scratch,
                empty => empty.insert(MmapMut::map_anon(SCRATCH_BYTES)?),
            };
            let targets = targets.map(|(at, target)| (at, &mut target[..]));
            let mut spans = plan_spans(range, targets, scratch);
            self.fill(range, &mut spans)?;
            let checked = check(&spans)?;
            spans.iter_mut().for_each(Span::copy_out);
            Ok(checked)
        })
    }

    /// Reads from the page cache if it has all pages, else directly: no byte is cached twice.
    fn fill(&self, range: &Range<u64>, spans: &mut [Span<'_>]) -> io::Result<()> {
        let len = (range.end - range.start) as usize;
        let is_cached = || {
            let pages = range.end.div_ceil(PAGE_BYTES as u64) - range.start / PAGE_BYTES as u64;
            count_cached_pages(self.file.as_fd(), range).unwrap_or(0) >= pages
        };
        if self.is_direct && !is_cached() {
            let mut slices: Vec<_> = spans.iter_mut().map(Span::as_io_slice).collect();
            // What cannot be read directly is read through the page cache.
            if preadv(&self.file, &mut slices, range.start).is_ok_and(|read| read >= len) {
                return Ok(());
            }
        }
        let file = self.buffered()?;
        let mut done = 0;
        for span in spans {
            let needed = span.bytes.len().min(len - done);
            file.read_exact_at(&mut span.bytes[..needed], range.start + done as u64)?;
            done += needed;
        }
        Ok(())
    }

    fn buffered(&self) -> io::Result<&File> {
        if !self.is_direct {
            return Ok(&self.file);
        }
        if let Some(file) = self.buffered.get() {
            return Ok(file);
        }
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = open_within_limit(|| openat(CWD, path.as_str(), flags, Mode::empty()))?;
        // Readahead would be waste: each read asks for all that it needs.
        let _ = fadvise(&file, 0, None, Advice::Random);
        Ok(self.buffered.get_or_init(|| File::from(file)))
    }

    /// Whether the file still has its name, as of at most 10 seconds ago. Also marks its use.
    pub fn is_current(&self) -> bool {
        let now = seconds_now();
        if now.abs_diff(self.checked.load(Relaxed)) < CHECK_INTERVAL.as_secs() {
            return true;
        }
        self.checked.store(now, Relaxed);
        let Ok(metadata) = self.metadata() else { return false };
        self.mark_used(metadata.atime());
        metadata.nlink() > 0
    }

    /// Marks a block as used now, unless it was marked lately.
    pub fn mark_used(&self, used: i64) {
        let now = seconds_now();
        if now.abs_diff(used) < USE_INTERVAL.as_secs() {
            return;
        }
        let omit = rustix::fs::UTIME_OMIT as _;
        let times = Timestamps {
            last_access: Timespec { tv_sec: now, tv_nsec: 0 },
            last_modification: Timespec { tv_sec: 0, tv_nsec: omit },
        };
        // A cache that cannot be written to is not evicted from either.
        let _ = futimens(&self.file, &times);
    }
}

/// Seconds since 1970.
fn seconds_now() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_secs().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_stays_open_is_marked_as_used_and_given_up_when_evicted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("block");
        std::fs::write(&path, [0; 4096]).unwrap();
        let file = OpenBlockFile::open(&path).unwrap();
        let long_ago = Timespec { tv_sec: 1_000_000, tv_nsec: 0 };
        let times = Timestamps { last_access: long_ago, last_modification: long_ago };
        futimens(&file.file, &times).unwrap();
        // Not looked at again so soon.
        assert!(file.is_current());
        assert_eq!(file.metadata().unwrap().atime(), 1_000_000);
        file.checked.store(0, Relaxed);
        assert!(file.is_current());
        assert!(file.metadata().unwrap().atime() > 1_000_000);
        std::fs::remove_file(&path).unwrap();
        assert!(file.is_current());
        file.checked.store(0, Relaxed);
        assert!(!file.is_current());
    }
}
