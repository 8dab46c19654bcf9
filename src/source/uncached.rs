//! What of a file the page cache does not have, to leave it as it was found.
//!
//! In: an [`OpenFile`]. Out: the ranges that are not there, where the system tells.

use std::ops::Range;

use rustix::io::Errno;
use rustix::param::page_size;

use super::cachestat::cached_pages;
use super::{OpenFile, ReadAt};

/// Questions that are asked about one file at the most: enough for a thousand islands. What is left then,
/// part there and part not, counts as there.
const QUESTIONS: usize = 20_000;

/// The ranges of a file that the page cache has nothing of, in order.
pub fn uncached(file: &OpenFile) -> Option<Vec<Range<u64>>> {
    // The pages of a file of an overlay are those of the file beneath: the system tells of none, and lets go of all.
    if file.filesystem().overlaid {
        return None;
    }
    let (mut found, mut questions) = (Vec::new(), 0);
    let whole = 0..file.size();
    let mut left = vec![whole];
    while let Some(range) = left.pop() {
        if range.is_empty() || questions == QUESTIONS {
            continue;
        }
        questions += 1;
        match there(file, &range) {
            Ok((0, _)) => add(&mut found, range),
            Ok((some, all)) if some < all => {
                let page = page_size() as u64;
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

/// The pages that are there, and all of them.
fn there(file: &OpenFile, range: &Range<u64>) -> Result<(u64, u64), Errno> {
    let page = page_size() as u64;
    let all = range.end.div_ceil(page) - range.start / page;
    Ok((cached_pages(file, range)?.min(all), all))
}

fn add(found: &mut Vec<Range<u64>>, range: Range<u64>) {
    match found.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => found.push(range),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustix::fs::{Advice, fadvise};

    use super::*;
    use crate::source::{Links, Root};

    #[test]
    fn what_is_not_there_is_found_to_the_page() {
        // Not /tmp, which may be of memory, where nothing can be evicted.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (page, len) = (page_size() as u64, 999 * page_size() as u64 + 77);
        std::fs::write(dir.path().join("f"), vec![7; len as usize]).unwrap();
        let (root, way) = Root::around(dir.path(), Links::Inside).unwrap();
        let file = root.open(&way.join(Path::new("f"))).unwrap();
        assert_eq!(uncached(&file).unwrap(), []);
        std::fs::File::open(dir.path().join("f")).unwrap().sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        assert_eq!(uncached(&file).unwrap(), std::slice::from_ref(&(0..len)));
        // Without readahead, so that it is these pages alone.
        fadvise(&file, 0, None, Advice::Random).unwrap();
        for at in [0, 500, 501, 999] {
            file.read_exact_at(&mut [0], at * page).unwrap();
        }
        assert_eq!(uncached(&file).unwrap(), [page..500 * page, 502 * page..999 * page]);
    }
}
