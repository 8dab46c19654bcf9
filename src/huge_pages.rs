//! Memory in huge pages. The system clears each page when it is first written, and for memory of many
//! megabytes in ordinary pages that takes longer than writing it.
//!
//! In: how much. Out: memory; where the system has no huge pages, it is ordinary memory.

use memmap2::{Advice, MmapMut};

/// The size of a huge page nearly everywhere. What is no multiple of it has ordinary pages at its ends.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed memory.
pub fn allocate_zeroed(len: usize) -> std::io::Result<MmapMut> {
    let map = MmapMut::map_anon(len)?;
    let _ = map.advise(Advice::HugePage);
    Ok(map)
}

/// Sets room for so many more aside, which are soon to be there.
#[allow(unsafe_code)]
pub fn reserve<T>(vec: &mut Vec<T>, more: usize) {
    vec.reserve_exact(more);
    let room = vec.spare_capacity_mut().as_mut_ptr_range();
    let page = rustix::param::page_size();
    let (start, end) = (room.start.addr().next_multiple_of(page), room.end.addr() / page * page);
    if end.saturating_sub(start) >= HUGE_PAGE_BYTES {
        let at = room.start.with_addr(start).cast();
        // SAFETY: they are pages of this vector alone, and what is advised changes nothing that they hold.
        let _ = unsafe { rustix::mm::madvise(at, end - start, rustix::mm::Advice::LinuxHugepage) };
    }
}
