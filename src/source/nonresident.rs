//! What of a file the page cache does not have, to leave it as it was found.
//!
//! In: an [`OpenFile`], and a range of it. Out: the ranges that are not there, where the system tells; nothing, where they
//! are to be let go of.

use std::num::NonZeroU64;
use std::ops::Range;

use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;
use rustix::param::page_size;

use super::cachestat::count_cached_pages;
use super::{OpenFile, ReadAt};

/// Questions that are asked about one range at the most: enough for a thousand islands. What is left then,
/// part there and part not, counts as there.
const MAX_QUERY_COUNT: usize = 20_000;

/// What of a range the page cache has nothing of, in whole pages and in order. Not of a file of an overlay.
pub fn uncached_ranges(file: &OpenFile, range: &Range<u64>) -> Option<Vec<Range<u64>>> {
    let (mut found, mut questions) = (Vec::new(), 0);
    let page = page_size() as u64;
    let mut whole = to_whole_pages(range);
    whole.end = whole.end.min(file.size());
    let mut left = vec![whole];
    while let Some(range) = left.pop() {
        if range.is_empty() || questions == MAX_QUERY_COUNT {
            continue;
        }
        questions += 1;
        match count_pages(file, &range) {
            Ok((0, _)) => push_merged(&mut found, range),
            Ok((some, all)) if some < all => {
                let middle = range.start / page * page + all / 2 * page;
                // The first half is next, so that what is found is in order.
                left.extend([middle..range.end, range.start..middle]);
            }
            Ok(_) => {}
            Err(_) => return None,
        }
    }
    Some(found)
}

/// A range with all of the pages at its ends.
pub fn to_whole_pages(range: &Range<u64>) -> Range<u64> {
    let page = page_size() as u64;
    range.start / page * page..range.end.div_ceil(page).saturating_mul(page)
}

/// Lets go of the whole pages of a range, but for those that somebody maps or writes.
pub fn evict(file: &OpenFile, range: &Range<u64>) {
    let len = NonZeroU64::new(range.end.saturating_sub(range.start));
    if len.is_some() {
        // A wish: what stays is only memory that another may want.
        let _ = fadvise(file, range.start, len, Advice::DontNeed);
    }
}

/// The pages that are there, and all of them.
fn count_pages(file: &OpenFile, range: &Range<u64>) -> Result<(u64, u64), Errno> {
    let page = page_size() as u64;
    let all = range.end.div_ceil(page) - range.start / page;
    Ok((count_cached_pages(file, range)?.min(all), all))
}

fn push_merged(found: &mut Vec<Range<u64>>, range: Range<u64>) {
    match found.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => found.push(range),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::source::{LinkPolicy, Root};

    #[test]
    fn what_is_not_there_is_found_to_the_page() {
        // Not /tmp, which may be of memory, where nothing can be evicted.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (page, len) = (page_size() as u64, 999 * page_size() as u64 + 77);
        std::fs::write(dir.path().join("f"), vec![7; len as usize]).unwrap();
        let (root, way) = Root::for_directory(dir.path(), LinkPolicy::Inside).unwrap();
        let file = root.open(&way.join(Path::new("f"))).unwrap();
        assert_eq!(uncached_ranges(&file, &(0..len)).unwrap(), []);
        std::fs::File::open(dir.path().join("f")).unwrap().sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        assert_eq!(uncached_ranges(&file, &(0..len)).unwrap(), std::slice::from_ref(&(0..len)));
        // Without readahead, so that it is these pages alone.
        fadvise(&file, 0, None, Advice::Random).unwrap();
        for at in [0, 500, 501, 999] {
            file.read_exact_at(&mut [0], at * page).unwrap();
        }
        assert_eq!(
            uncached_ranges(&file, &(0..len)).unwrap(),
            [page..500 * page, 502 * page..999 * page]
        );
        // Of a part of it: in whole pages, and not behind the end.
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
