//! The pages of a file in the page cache: which are there, reading them alone, and evicting them.
//!
//! Counting uses cachestat(2), which neither starts a read nor maps anything. It needs Linux 6.5. For a file that
//! this user neither owns nor may write, the kernel refuses. Never mincore(2): for such a file it reports every page
//! as present.

use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, OFlags, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::param::page_size;

use crate::source::file::OpenFile;
use crate::source::metadata::FilesystemKind;
use crate::source::read_at::ReadAt;
use crate::threads::lock;

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

    /// Whether the kernel tells which pages are cached, as far as is known.
    pub fn is_reported(&self) -> bool {
        !self.is_unreported()
    }

    fn is_unreported(&self) -> bool {
        self.is_unreported.load(Ordering::Relaxed)
    }

    /// Whether all pages of a range are cached, or being read. What is not reported counts as uncached.
    fn has_all_pages(&self, file: &OpenFile, range: Range<u64>) -> bool {
        match count_pages_of(file, &range) {
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
            _ => file.descriptor().is_some_and(|fd| self.read_nowait(fd, buf, offset)),
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

/// Queries for one range: enough for a thousand separate parts. What is unknown after that counts as cached.
const MAX_QUERY_COUNT: usize = 20_000;

/// The parts of a range that are not in the page cache, in whole pages and in order; `None` if the kernel refuses.
/// Must not be used for a file of an overlay.
pub fn uncached_ranges(file: &OpenFile, range: &Range<u64>) -> Option<Vec<Range<u64>>> {
    let (mut uncached, mut queries) = (Vec::new(), 0);
    let page = page_size() as u64;
    let mut whole = to_whole_pages(range);
    whole.end = whole.end.min(file.size());
    let mut rest = vec![whole];
    while let Some(range) = rest.pop() {
        if range.is_empty() || queries == MAX_QUERY_COUNT {
            continue;
        }
        queries += 1;
        let all = count_pages(&range);
        match count_pages_of(file, &range).ok()?.min(all) {
            0 => push_merged(&mut uncached, range),
            some if some < all => {
                let middle = range.start / page * page + all / 2 * page;
                // The first half is next, so that the result is in order.
                rest.extend([middle..range.end, range.start..middle]);
            }
            _ => {}
        }
    }
    Some(uncached)
}

/// Extends a range to whole pages at both ends.
pub fn to_whole_pages(range: &Range<u64>) -> Range<u64> {
    let page = page_size() as u64;
    range.start / page * page..range.end.div_ceil(page).saturating_mul(page)
}

/// The number of pages that a range touches.
pub fn count_pages(range: &Range<u64>) -> u64 {
    let page = page_size() as u64;
    range.end.div_ceil(page) - range.start / page
}

/// Evicts the whole pages inside a range, except those that a program maps or writes.
pub fn evict(file: &OpenFile, range: &Range<u64>) {
    let len = NonZeroU64::new(range.end.saturating_sub(range.start));
    if let (Some(_), Some(fd)) = (len, file.descriptor()) {
        // A failure leaves only memory that the kernel can reclaim.
        let _ = fadvise(fd, range.start, len, Advice::DontNeed);
    }
}

fn push_merged(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// The same on every architecture that Rust supports: it is newer than their common table.
const CACHESTAT_SYSCALL: libc::c_long = 451;

#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct CachestatCounts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// The same for an open file, which may not be of this machine.
pub fn count_pages_of(file: &OpenFile, range: &Range<u64>) -> Result<u64, Errno> {
    count_cached_pages(file.descriptor().ok_or(Errno::OPNOTSUPP)?, range)
}

/// The number of pages of a range that are in the page cache, or being read into it.
#[allow(unsafe_code)] // No safe wrapper of this call exists.
pub fn count_cached_pages(descriptor: BorrowedFd<'_>, range: &Range<u64>) -> Result<u64, Errno> {
    let query = CachestatRange { offset: range.start, len: range.end - range.start };
    let mut counts = CachestatCounts::default();
    // SAFETY: both structures have the kernel's layout and outlive the call, which writes to the second alone. The
    // descriptor is open for as long as it is borrowed.
    let code = unsafe {
        libc::syscall(
            CACHESTAT_SYSCALL,
            descriptor.as_raw_fd(),
            &raw const query,
            &raw mut counts,
            0 as libc::c_uint,
        )
    };
    if code == 0 {
        return Ok(counts.cached);
    }
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Err(Errno::from_raw_os_error(error))
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
        let reported = Residency::new(FilesystemKind::of(file.descriptor()));
        let unreported = Residency { is_unreported: true.into(), ..Residency::default() };
        let mut buf = vec![0; 100_000];
        for residency in [&reported, &unreported] {
            assert!(residency.read_cached(&file, &mut buf, 12_345));
            assert_eq!(buf, bytes[12_345..112_345]);
            let past_end = LEN_BYTES as u64 - 10;
            assert!(!residency.read_cached(&file, &mut buf, past_end), "past the end");
        }
        test_file::sync(&dir);
        fadvise(file.descriptor().unwrap(), 0, None, Advice::DontNeed).unwrap();
        let pages = || count_pages_of(&file, &(0..LEN_BYTES as u64)).unwrap();
        assert_eq!(pages(), 0);
        assert!(!reported.read_cached(&file, &mut buf, 12_345));
        assert!(!reported.contains(&file, &(0..10)));
        assert_eq!(pages(), 0, "asking fetches nothing");
        assert!(!unreported.read_cached(&file, &mut buf, 12_345));
        assert!(!unreported.read_cached(&file, &mut buf, 212_345));
        assert!(pages() <= 2, "one page for each byte tried, and not again so soon");
    }

    #[test]
    fn uncached_ranges_are_found_to_the_page() {
        let (page, len) = (page_size() as u64, 999 * page_size() as u64 + 77);
        let (dir, file) = test_file::on_disk(&vec![7; len as usize]);
        assert_eq!(uncached_ranges(&file, &(0..len)).unwrap(), []);
        test_file::sync(&dir);
        fadvise(file.descriptor().unwrap(), 0, None, Advice::DontNeed).unwrap();
        assert_eq!(uncached_ranges(&file, &(0..len)).unwrap(), std::slice::from_ref(&(0..len)));
        // Without readahead, so that only these pages are read.
        fadvise(file.descriptor().unwrap(), 0, None, Advice::Random).unwrap();
        for at in [0, 500, 501, 999] {
            file.read_exact_at(&mut [0], at * page).unwrap();
        }
        assert_eq!(
            uncached_ranges(&file, &(0..len)).unwrap(),
            [page..500 * page, 502 * page..999 * page]
        );
        // A part of the file: in whole pages, and not beyond its end.
        assert_eq!(
            uncached_ranges(&file, &(499 * page + 5..503 * page - 5)).unwrap(),
            [499 * page..500 * page, 502 * page..503 * page]
        );
        assert_eq!(uncached_ranges(&file, &(999 * page..u64::MAX - 7)).unwrap(), []);
        evict(&file, &(999 * page..len));
        assert_eq!(
            uncached_ranges(&file, &(999 * page..u64::MAX - 7)).unwrap(),
            std::slice::from_ref(&(999 * page..len))
        );
    }
}
