//! Counts, finds and evicts the pages of a file in the page cache.
//!
//! Counting uses cachestat(2), which neither starts a read nor maps anything. It needs Linux 6.5. For a file that
//! this user neither owns nor may write, the kernel refuses.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;
use rustix::param::page_size;

use crate::source::file::OpenFile;
use crate::source::read_at::ReadAt;

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
        match count_cached_pages(file, &range).ok()?.min(all) {
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
    if len.is_some() {
        // A failure leaves only memory that the kernel can reclaim.
        let _ = fadvise(file, range.start, len, Advice::DontNeed);
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

/// The number of pages of a range that are in the page cache, or being read into it.
#[allow(unsafe_code)] // No safe wrapper of this call exists.
pub fn count_cached_pages(file: &OpenFile, range: &Range<u64>) -> Result<u64, Errno> {
    let query = CachestatRange { offset: range.start, len: range.end - range.start };
    let mut counts = CachestatCounts::default();
    // SAFETY: both structures have the kernel's layout and outlive the call, which writes to the second alone. The
    // descriptor is open for as long as it is borrowed.
    let code = unsafe {
        libc::syscall(
            CACHESTAT_SYSCALL,
            file.as_fd().as_raw_fd(),
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

    #[test]
    fn uncached_ranges_are_found_to_the_page() {
        let (page, len) = (page_size() as u64, 999 * page_size() as u64 + 77);
        let (dir, file) = test_file::on_disk(&vec![7; len as usize]);
        assert_eq!(uncached_ranges(&file, &(0..len)).unwrap(), []);
        test_file::sync(&dir);
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        assert_eq!(uncached_ranges(&file, &(0..len)).unwrap(), std::slice::from_ref(&(0..len)));
        // Without readahead, so that only these pages are read.
        fadvise(&file, 0, None, Advice::Random).unwrap();
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
