//! Whether a range of a file is in the page cache, and reading it from there alone.
//!
//! Never mincore(2): for a file that this user neither owns nor may write, it reports every page as present.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, OFlags, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::source::file::OpenFile;
use crate::source::filesystem::FilesystemKind;
use crate::source::read_at::ReadAt;
use crate::threads::lock;

use super::pages::{count_cached_pages, count_pages};

/// A range counts as cached only if the file is cached this far beyond it, or to its end. A read near the end of
/// what is cached starts the kernel's readahead, at a page that the kernel marked when it read ahead before. A
/// sequential reader would then never leave the page cache, which is slower than direct reads. Twice the readahead
/// of the fastest disks.
pub const READAHEAD_MARGIN_BYTES: u64 = 16 << 20;

/// A query covers this much more than is needed, so that a sequential reader queries seldom: the kernel visits
/// every page.
const QUERY_STRIDE_BYTES: u64 = 16 << 20;

/// After a failed probe, nothing near it is probed again for this long.
const MISS_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What is known about one open file's pages.
#[derive(Debug, Default)]
pub struct Residency {
    /// The kernel does not report which pages are cached.
    is_unreported: AtomicBool,
    /// The filesystem cannot read without waiting, as those in memory on older kernels.
    lacks_nowait: AtomicBool,
    /// The last range that was found cached. A read from it discovers evictions since.
    cached_range: Mutex<Range<u64>>,
    /// A descriptor without readahead, also for probes: a failed read starts readahead, even one that must not wait
    /// (Linux 6.18: 32 pages for one request). With this descriptor a probe costs one page.
    no_readahead_fd: OnceLock<Option<OwnedFd>>,
    /// Offset and time of the last failed probe.
    last_miss: Mutex<Option<(u64, Instant)>>,
}

impl Residency {
    pub fn new(filesystem: FilesystemKind) -> Residency {
        Residency { is_unreported: filesystem.is_overlay.into(), ..Residency::default() }
    }

    /// Whether a range is cached, and enough beyond it that reading it starts no readahead.
    pub fn contains(&self, file: &OpenFile, range: &Range<u64>) -> bool {
        let end = file.size();
        let needed_end = range.end.saturating_add(READAHEAD_MARGIN_BYTES).min(end);
        let covers = |cached: &Range<u64>| cached.start <= range.start && needed_end <= cached.end;
        if covers(&lock(&self.cached_range)) {
            return true;
        }
        if self.is_unreported() {
            return self.probe(file, range.end - 1, needed_end - 1);
        }
        let stride_end = needed_end.saturating_add(QUERY_STRIDE_BYTES).min(end);
        for queried_end in [stride_end, needed_end] {
            if self.has_all_pages(file, range.start..queried_end) {
                *lock(&self.cached_range) = range.start..queried_end;
                return true;
            }
        }
        false
    }

    fn is_unreported(&self) -> bool {
        self.is_unreported.load(Ordering::Relaxed)
    }

    /// Whether all pages of a range are cached, or being read. What is not reported counts as uncached.
    fn has_all_pages(&self, file: &OpenFile, range: Range<u64>) -> bool {
        match count_cached_pages(file, &range) {
            Ok(cached) => cached >= count_pages(&range),
            Err(_) => {
                self.is_unreported.store(true, Ordering::Relaxed);
                false
            }
        }
    }

    /// A descriptor of the same file for which the kernel does no readahead.
    pub fn no_readahead_fd(&self, file: &OpenFile) -> Option<&OwnedFd> {
        let open = || {
            let fd = file.reopen(OFlags::empty())?;
            fadvise(&fd, 0, None, Advice::Random).ok()?;
            Some(fd)
        };
        self.no_readahead_fd.get_or_init(open).as_ref()
    }

    /// Whether two bytes can be read without waiting: the last of a range, and the last that is needed beyond it.
    fn probe(&self, file: &OpenFile, last: u64, last_needed: u64) -> bool {
        let has_missed_nearby = lock(&self.last_miss).is_some_and(|(at, when)| {
            at.abs_diff(last) < QUERY_STRIDE_BYTES && when.elapsed() < MISS_RETRY_INTERVAL
        });
        if has_missed_nearby || self.lacks_nowait.load(Ordering::Relaxed) {
            return false;
        }
        let Some(fd) = self.no_readahead_fd(file) else { return false };
        let is_cached = [last_needed, last].iter().all(|at| self.read_nowait(fd, &mut [0], *at));
        if !is_cached {
            *lock(&self.last_miss) = Some((last, Instant::now()));
        }
        is_cached
    }

    /// Fills `buf` if all of it is in the page cache, and returns whether it did. Never waits for a disk. Must be
    /// followed by [`OpenFile::check_unchanged`].
    pub fn read_cached(&self, file: &OpenFile, buf: &mut [u8], offset: u64) -> bool {
        if buf.is_empty() || !self.contains(file, &(offset..offset + buf.len() as u64)) {
            return buf.is_empty();
        }
        // Without readahead also here: a probe does not reveal the pages between.
        let fd = self.no_readahead_fd.get().filter(|_| self.is_unreported());
        let is_read = match fd {
            Some(Some(fd)) => self.read_nowait(fd, buf, offset),
            _ => self.read_nowait(file, buf, offset),
        };
        if !is_read {
            *lock(&self.cached_range) = 0..0;
        }
        is_read
    }

    fn read_nowait(&self, fd: impl AsFd, buf: &mut [u8], offset: u64) -> bool {
        let flags = if self.lacks_nowait.load(Ordering::Relaxed) {
            ReadWriteFlags::empty()
        } else {
            ReadWriteFlags::NOWAIT
        };
        let mut done = 0;
        while done < buf.len() {
            let rest = &mut [IoSliceMut::new(&mut buf[done..])];
            match preadv2(&fd, rest, offset + done as u64, flags) {
                Ok(0) => return false,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP) if !flags.is_empty() => {
                    self.lacks_nowait.store(true, Ordering::Relaxed);
                    return false;
                }
                Err(_) => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::test_file;

    const LEN_BYTES: usize = 3 << 20;

    #[test]
    fn cached_bytes_are_read_and_others_are_neither_read_nor_fetched() {
        let bytes: Vec<u8> = (0..LEN_BYTES).map(|n| (n / 5) as u8).collect();
        let (dir, file) = test_file::on_disk(&bytes);
        let reported = Residency::new(FilesystemKind::of(&file));
        let unreported = Residency { is_unreported: true.into(), ..Residency::default() };
        let mut buf = vec![0; 100_000];
        for residency in [&reported, &unreported] {
            assert!(residency.read_cached(&file, &mut buf, 12_345));
            assert_eq!(buf, bytes[12_345..112_345]);
            let past_end = LEN_BYTES as u64 - 10;
            assert!(!residency.read_cached(&file, &mut buf, past_end), "past the end");
        }
        test_file::sync(&dir);
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let pages = || count_cached_pages(&file, &(0..LEN_BYTES as u64)).unwrap();
        assert_eq!(pages(), 0);
        assert!(!reported.read_cached(&file, &mut buf, 12_345));
        assert!(!reported.contains(&file, &(0..10)));
        assert_eq!(pages(), 0, "asking fetches nothing");
        assert!(!unreported.read_cached(&file, &mut buf, 12_345));
        assert!(!unreported.read_cached(&file, &mut buf, 212_345));
        assert!(pages() <= 2, "one page for each byte tried, and not again so soon");
    }
}
