//! Memory in huge pages. The kernel clears each page on the first write; for many megabytes of ordinary pages that
//! takes longer than the write itself. Without huge pages in the system, this is ordinary memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use memmap2::{Advice, MmapMut};
use rustix::time::{ClockId, clock_gettime};

/// The size of a huge page on nearly all machines. The ends of other sizes are in ordinary pages.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Maximum processor time to clear a huge page that counts as fast. It took 0.2 ms, and 4.3 ms after the host of a virtual
/// machine had reclaimed the memory. The host reclaims whole huge pages, and may return them in ordinary ones.
const MAX_CLEAR_MS: u64 = 1;

/// Memory in ordinary pages before a huge page is tried again. A slow try takes 4 % of the time to clear so many bytes, or
/// 1 % where ordinary pages are slow, too.
const RETRY_BYTES: usize = 256 << 20;

/// The size of ordinary pages where huge ones have [`HUGE_PAGE_BYTES`]. Larger ones always take long to clear.
const ORDINARY_PAGE_BYTES: usize = 4096;

static CHOICE: PageSizeChoice = PageSizeChoice::new(MAX_CLEAR_MS);

/// Maps zeroed memory.
pub fn allocate_zeroed(len: usize) -> std::io::Result<MmapMut> {
    let map = MmapMut::map_anon(len)?;
    advise(&map);
    Ok(map)
}

/// Advises huge pages. The kernel may later join ordinary ones that are there already.
pub fn advise(map: &MmapMut) {
    let _ = map.advise(Advice::HugePage);
}

/// Chooses the page size of a part of a mapping, before the first byte is written. Writes a zero into each huge page until
/// one is slow.
pub fn choose_page_size(memory: &mut [u8]) {
    if rustix::param::page_size() == ORDINARY_PAGE_BYTES {
        CHOICE.apply(memory);
    }
}

/// Chooses huge pages until one is cleared slowly: then the host has probably reclaimed them. The kernel makes ordinary pages
/// of smaller free blocks first, which the host has not reclaimed.
struct PageSizeChoice {
    max_clear_ms: u64,
    /// Memory that will have ordinary pages before a huge page is tried again.
    ordinary_bytes_left: AtomicUsize,
}

impl PageSizeChoice {
    const fn new(max_clear_ms: u64) -> PageSizeChoice {
        PageSizeChoice { max_clear_ms, ordinary_bytes_left: AtomicUsize::new(0) }
    }

    fn apply(&self, memory: &mut [u8]) {
        let subtract = |left: usize| (left > 0).then(|| left.saturating_sub(memory.len()));
        let left = &self.ordinary_bytes_left;
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, subtract).is_ok() {
            return advise_ordinary_pages(memory);
        }
        let first = memory.as_ptr().align_offset(HUGE_PAGE_BYTES);
        for start in (first..memory.len()).step_by(HUGE_PAGE_BYTES) {
            let before = thread_time();
            // The compiler must not move the write behind the clock.
            *std::hint::black_box(&mut memory[start]) = 0;
            if thread_time().saturating_sub(before) > Duration::from_millis(self.max_clear_ms) {
                left.store(RETRY_BYTES, Ordering::Relaxed);
                let end = (start + HUGE_PAGE_BYTES).min(memory.len());
                return advise_ordinary_pages(&mut memory[end..]);
            }
        }
    }
}

/// The processor time of this thread. Other threads do not lengthen it.
fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Advises ordinary pages for all pages of a part of a mapping. Parts that share a page have the same advice, so that the
/// kernel keeps few mappings.
#[allow(unsafe_code)]
fn advise_ordinary_pages(memory: &mut [u8]) {
    if memory.is_empty() {
        return;
    }
    let page = rustix::param::page_size();
    let before = memory.as_ptr().addr() % page;
    let len = (before + memory.len()).next_multiple_of(page);
    let start = memory.as_mut_ptr().wrapping_sub(before);
    let advice = rustix::mm::Advice::LinuxNoHugepage;
    // SAFETY: a mapping has whole pages, and the advice changes no bytes.
    let _ = unsafe { rustix::mm::madvise(start.cast(), len, advice) };
}

/// Reserves capacity for `additional` elements, which will be pushed soon.
#[allow(unsafe_code)]
pub fn reserve<T>(vec: &mut Vec<T>, additional: usize) {
    vec.reserve_exact(additional);
    let spare = vec.spare_capacity_mut().as_mut_ptr_range();
    let page = rustix::param::page_size();
    let (start, end) = (spare.start.addr().next_multiple_of(page), spare.end.addr() / page * page);
    if end.saturating_sub(start) >= HUGE_PAGE_BYTES {
        let address = spare.start.with_addr(start).cast();
        let advice = rustix::mm::Advice::LinuxHugepage;
        // SAFETY: the pages belong to this vector alone, and the advice changes nothing in them.
        let _ = unsafe { rustix::mm::madvise(address, end - start, advice) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP_BYTES: usize = 16 << 20;

    /// The bytes of `memory` in mappings that `/proc/self/smaps` shows with this flag.
    fn flagged_bytes(memory: &[u8], flag: &str) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let memory = memory.as_ptr_range();
        let (mut overlap, mut total) = (0, 0);
        for line in smaps.lines() {
            let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
            if let Some((start, end)) = first.split_once('-') {
                let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16).unwrap());
                let (from, to) = (start.max(memory.start.addr()), end.min(memory.end.addr()));
                overlap = to.saturating_sub(from);
            } else if first == "VmFlags:" && rest.split(' ').any(|one| one == flag) {
                total += overlap;
            }
        }
        total
    }

    #[test]
    fn memory_that_is_cleared_fast_keeps_the_advice_for_huge_pages() {
        let mut map = allocate_zeroed(MAP_BYTES).unwrap();
        PageSizeChoice::new(u64::MAX).apply(&mut map);
        let advised = (flagged_bytes(&map, "hg"), flagged_bytes(&map, "nh"));
        assert_eq!(advised, (MAP_BYTES, 0), "does this kernel have transparent huge pages?");
    }

    #[test]
    fn ordinary_pages_follow_a_huge_page_that_was_cleared_slowly() {
        let choice = PageSizeChoice::new(0);
        let mut map = allocate_zeroed(MAP_BYTES).unwrap();
        choice.apply(&mut map);
        let first = map.as_ptr().align_offset(HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES;
        assert_eq!(flagged_bytes(&map, "nh"), MAP_BYTES - first);

        let mut next = allocate_zeroed(MAP_BYTES).unwrap();
        choice.apply(&mut next[..MAP_BYTES / 2 + 1]);
        choice.apply(&mut next[MAP_BYTES / 2 + 1..MAP_BYTES - 1]);
        choice.apply(&mut next[MAP_BYTES..]);
        assert_eq!(flagged_bytes(&next, "nh"), MAP_BYTES, "pages that parts share, too");
        assert!(next.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_huge_page_is_tried_again_after_some_ordinary_memory() {
        let choice = PageSizeChoice::new(u64::MAX);
        choice.ordinary_bytes_left.store(MAP_BYTES + 1, Ordering::Relaxed);
        let ordinary_bytes = [(); 3].map(|()| {
            let mut map = allocate_zeroed(MAP_BYTES).unwrap();
            choice.apply(&mut map);
            flagged_bytes(&map, "nh")
        });
        assert_eq!(ordinary_bytes, [MAP_BYTES, MAP_BYTES, 0]);
    }
}
