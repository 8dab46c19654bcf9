//! Memory in huge pages. The kernel clears each page on the first write; for many megabytes of ordinary pages that
//! takes longer than the write itself. Without huge pages in the system, this is ordinary memory.

use memmap2::{Advice, MmapMut};

/// The size of a huge page on nearly all machines. The ends of other sizes are in ordinary pages.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Maps zeroed memory.
pub fn allocate_zeroed(len: usize) -> std::io::Result<MmapMut> {
    let map = MmapMut::map_anon(len)?;
    let _ = map.advise(Advice::HugePage);
    Ok(map)
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
