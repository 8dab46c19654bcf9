//! Pages that small reads fetch: a parser reads a header, or the entries at the end of a zip file, more than once.
//!
//! All open files of a process share them, so that they take a bounded amount of memory.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex};

use lru::LruCache;

use crate::threads::lock_holding_forks;

/// Small reads fetch whole pages of this size: most headers, and the directory at the end of most zips, fit in one.
pub const PAGE_BYTES: u64 = 64 << 10;

/// Maximum pages in memory: 8 MiB. Each thread that reads headers uses two of them at once.
const MAX_PAGE_COUNT: NonZeroUsize = NonZeroUsize::new(128).expect("is not zero");

/// Maximum pages of one request, where pages are read in order, as for strided tensors.
const MAX_RUN_PAGES: u64 = 32;

/// The most recently used pages of all files.
static PAGES: LazyLock<Mutex<LruCache<PageKey, PageSlot>>> =
    LazyLock::new(|| Mutex::new(LruCache::new(MAX_PAGE_COUNT)));

static NEXT_FILE: AtomicU64 = AtomicU64::new(0);

/// A page, empty until it is fetched. A reader that needs it waits for the one that fetches it.
pub type PageSlot = Arc<Mutex<Option<Vec<u8>>>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PageKey {
    /// A forked child begins anew: another thread may have been fetching a page.
    pid: u32,
    file: u64,
    number: u64,
}

/// The pages of an open file.
#[derive(Debug)]
pub struct FilePages {
    file: u64,
    run: Mutex<PageRun>,
}

/// The last run of pages that was fetched.
#[derive(Debug, Default)]
struct PageRun {
    end: u64,
    len: u64,
}

impl FilePages {
    pub fn new() -> FilePages {
        FilePages { file: NEXT_FILE.fetch_add(1, Relaxed), run: Mutex::default() }
    }

    pub fn slot(&self, number: u64) -> PageSlot {
        let key = PageKey { pid: std::process::id(), file: self.file, number };
        Arc::clone(lock_holding_forks(&PAGES).get_or_insert(key, Default::default))
    }

    /// The number of pages to fetch from a page on. It grows while pages are read in order.
    pub fn next_run(&self, number: u64) -> u64 {
        lock_holding_forks(&self.run).next(number)
    }
}

impl Drop for FilePages {
    fn drop(&mut self) {
        let mut pages = lock_holding_forks(&PAGES);
        let own: Vec<PageKey> =
            pages.iter().map(|(key, _)| *key).filter(|key| key.file == self.file).collect();
        for key in own {
            pages.pop(&key);
        }
    }
}

impl PageRun {
    fn next(&mut self, number: u64) -> u64 {
        let is_in_order = self.end == number && number > 0;
        self.len = if is_in_order { (self.len * 2).min(MAX_RUN_PAGES) } else { 1 };
        self.end = number + self.len;
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::lock;

    #[test]
    fn pages_in_order_are_fetched_in_growing_runs() {
        let mut run = PageRun::default();
        assert_eq!([0, 1, 3, 7].map(|number| run.next(number)), [1, 2, 4, 8]);
        assert_eq!(run.next(100), 1);
        assert_eq!(run.next(101), 2);
    }

    #[test]
    fn files_share_a_bounded_number_of_pages_and_drop_their_own() {
        let files: Vec<FilePages> = (0..10).map(|_| FilePages::new()).collect();
        let numbers: Vec<u64> = files.iter().map(|file| file.file).collect();
        let count = || lock(&PAGES).iter().filter(|(key, _)| numbers.contains(&key.file)).count();
        for file in &files {
            for number in 0..100 {
                *lock(&file.slot(number)) = Some(vec![1]);
            }
        }
        assert!(count() > 64 && count() <= MAX_PAGE_COUNT.get());
        assert_eq!(*lock(&files[9].slot(99)), Some(vec![1]));
        assert_eq!(*lock(&files[0].slot(0)), None);
        drop(files);
        assert_eq!(count(), 0);
    }
}
