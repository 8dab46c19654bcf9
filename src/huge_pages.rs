//! Memory in huge pages. The kernel clears each page on the first write; for many megabytes of ordinary pages that
//! takes longer than the write itself. Without huge pages in the system, this is ordinary memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use memmap2::{Advice, MmapMut};
use rustix::time::{ClockId, clock_gettime};

/// The size of a huge page on nearly all machines. The ends of other sizes are in ordinary pages.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The host of a virtual machine takes back free memory in whole huge pages, and may return it in ordinary ones. To clear a
/// huge page then took 4.3 ms of processor time, and otherwise 0.2 ms.
const MAX_CLEAR_MS: u64 = 1;

/// Memory in ordinary pages before a huge page is tried again. Another try takes 4 % of the time of so much fresh memory,
/// or 1 % where ordinary pages are slow, too.
const ORDINARY_BYTES: usize = 256 << 20;

static CHOICE: PageSizeChoice = PageSizeChoice::new(MAX_CLEAR_MS);

/// Maps zeroed memory.
pub fn allocate_zeroed(len: usize) -> std::io::Result<MmapMut> {
    let map = MmapMut::map_anon(len)?;
    let _ = map.advise(Advice::HugePage);
    Ok(map)
}

/// Chooses the page size of mapped memory that nothing was written to yet. Writes zeros here and there.
pub fn choose_page_size(memory: &mut [u8]) {
    CHOICE.apply(memory);
}

/// Chooses huge pages, unless the host of this virtual machine has taken those back. The kernel makes ordinary pages of
/// smaller pieces first, which the machine still has.
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
        let take = |left: usize| (left > 0).then(|| left.saturating_sub(memory.len()));
        if self.ordinary_bytes_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
        {
            return advise_ordinary_pages(memory);
        }
        let first = memory.as_ptr().align_offset(HUGE_PAGE_BYTES);
        for start in (first..memory.len()).step_by(HUGE_PAGE_BYTES) {
            let before = thread_time();
            memory[start] = std::hint::black_box(0);
            if thread_time().saturating_sub(before) > Duration::from_millis(self.max_clear_ms) {
                self.ordinary_bytes_left.store(ORDINARY_BYTES, Ordering::Relaxed);
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

/// Advises ordinary pages for all pages within this memory.
#[allow(unsafe_code)]
fn advise_ordinary_pages(memory: &mut [u8]) {
    let page = rustix::param::page_size();
    let start = memory.as_ptr().align_offset(page);
    let Some(within) = memory.get_mut(start..) else { return };
    let len = within.len() / page * page;
    if len > 0 {
        let advice = rustix::mm::Advice::LinuxNoHugepage;
        // SAFETY: the pages are those of a slice that this function alone may use, and the advice changes no bytes.
        let _ = unsafe { rustix::mm::madvise(within.as_mut_ptr().cast(), len, advice) };
    }
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

    /// The bytes of memory whose flags in `/proc/self/smaps` have this one.
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
    fn memory_that_is_cleared_fast_is_in_huge_pages() {
        let mut map = allocate_zeroed(MAP_BYTES).unwrap();
        PageSizeChoice::new(u64::MAX).apply(&mut map);
        assert_eq!((flagged_bytes(&map, "hg"), flagged_bytes(&map, "nh")), (MAP_BYTES, 0));
    }

    #[test]
    fn ordinary_pages_follow_a_huge_page_that_was_cleared_slowly() {
        let choice = PageSizeChoice::new(0);
        let mut map = allocate_zeroed(MAP_BYTES).unwrap();
        choice.apply(&mut map);
        let first = map.as_ptr().align_offset(HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES;
        assert_eq!(flagged_bytes(&map, "nh"), MAP_BYTES - first);

        let mut next = allocate_zeroed(MAP_BYTES).unwrap();
        choice.apply(&mut next[1..]);
        let page = rustix::param::page_size();
        assert_eq!(flagged_bytes(&next, "nh"), MAP_BYTES - page, "only whole pages of the memory");
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
