//! Whether bytes of a file are already in the page cache, and reading them from there alone.
//!
//! Never mincore(2): on a file that one neither owns nor may write it reports everything present.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, OFlags, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::param::page_size;

use crate::threads::lock;

use super::cachestat::count_cached_pages;
use super::filesystem::FilesystemKind;
use super::{OpenFile, ReadAt};

/// How far beyond a range its file must be in the page cache too, up to its end. A read that comes
/// near the end of what is cached makes the kernel read on from there (at a page that it marked as
/// it read ahead), and a reader who goes on so never leaves the page cache, which is the slower
/// way. Twice the readahead of the fastest disks.
pub const READAHEAD_MARGIN_BYTES: u64 = 16 << 20;

/// How much is asked about at once, so that a reader who goes on asks seldom: the kernel looks at
/// every page.
const QUERY_STRIDE_BYTES: u64 = 16 << 20;

/// What is known of one open file's pages.
#[derive(Debug, Default)]
pub struct Residency {
    /// The kernel does not tell which pages there are.
    is_unreported: AtomicBool,
    /// The filesystem cannot read without waiting, as those of memory on older kernels.
    lacks_nowait: AtomicBool,
    /// What was found to be there. Reading it finds out what has gone since.
    cached_range: Mutex<Range<u64>>,
    /// To try on, too: a read that finds nothing makes the kernel read ahead for it, even one that must not wait
    /// (Linux 6.18: 32 pages for one request). Here trying costs one page.
    no_readahead_fd: OnceLock<Option<OwnedFd>>,
    /// Where it was last tried in vain.
    last_miss: Mutex<Option<(u64, Instant)>>,
}

/// How long nothing is tried again near where it was tried in vain.
const MISS_RETRY_INTERVAL: Duration = Duration::from_secs(1);

impl Residency {
    /// What is known of a file just opened that lies on this.
    pub fn new(filesystem: FilesystemKind) -> Residency {
        Residency { is_unreported: filesystem.is_overlay.into(), ..Residency::default() }
    }

    /// Whether a range is there, and enough beyond it that reading it starts nothing.
    pub fn contains(&self, file: &OpenFile, range: &Range<u64>) -> bool {
        let end = file.size();
        let needed = range.end.saturating_add(READAHEAD_MARGIN_BYTES).min(end);
        let known = |there: &Range<u64>| there.start <= range.start && needed <= there.end;
        if known(&lock(&self.cached_range)) {
            return true;
        }
        if self.is_unreported() {
            return self.probe(file, range.end - 1, needed - 1);
        }
        let further = needed.saturating_add(QUERY_STRIDE_BYTES).min(end);
        for until in [further, needed] {
            if self.has_all_pages(file, range.start..until) {
                *lock(&self.cached_range) = range.start..until;
                return true;
            }
        }
        false
    }

    fn is_unreported(&self) -> bool {
        self.is_unreported.load(Ordering::Relaxed)
    }

    /// Whether all pages of a range are there, or on their way. What is not told is not there.
    fn has_all_pages(&self, file: &OpenFile, range: Range<u64>) -> bool {
        let page = page_size() as u64;
        match count_cached_pages(file, &range) {
            Ok(pages) => pages >= range.end.div_ceil(page) - range.start / page,
            Err(_) => {
                self.is_unreported.store(true, Ordering::Relaxed);
                false
            }
        }
    }

    /// A descriptor of the same file for which the kernel reads nothing ahead.
    pub fn no_readahead_fd(&self, file: &OpenFile) -> Option<&OwnedFd> {
        let quiet = self.no_readahead_fd.get_or_init(|| {
            let fd = file.reopen(OFlags::empty())?;
            fadvise(&fd, 0, None, Advice::Random).ok()?;
            Some(fd)
        });
        quiet.as_ref()
    }

    /// Tries the last byte of a range, and the last that is needed beyond it.
    fn probe(&self, file: &OpenFile, last: u64, beyond: u64) -> bool {
        let lately = lock(&self.last_miss).is_some_and(|(at, when)| {
            at.abs_diff(last) < QUERY_STRIDE_BYTES && when.elapsed() < MISS_RETRY_INTERVAL
        });
        if lately || self.lacks_nowait.load(Ordering::Relaxed) {
            return false;
        }
        let Some(quiet) = self.no_readahead_fd(file) else { return false };
        let there = [beyond, last].iter().all(|at| self.read_nowait(quiet, &mut [0], *at));
        if !there {
            *lock(&self.last_miss) = Some((last, Instant::now()));
        }
        there
    }

    /// Fills `buf` if all of it is in the page cache, and says whether it did. Never waits for a
    /// disk. Like every read, it must be followed by [`OpenFile::check_unchanged`].
    pub fn read_cached(&self, file: &OpenFile, buf: &mut [u8], offset: u64) -> bool {
        if buf.is_empty() || !self.contains(file, &(offset..offset + buf.len() as u64)) {
            return buf.is_empty();
        }
        // The quiet one also where it is not known what is between.
        let quiet = self.no_readahead_fd.get().filter(|_| self.is_unreported());
        let read = match quiet {
            Some(Some(quiet)) => self.read_nowait(quiet, buf, offset),
            _ => self.read_nowait(file, buf, offset),
        };
        if !read {
            *lock(&self.cached_range) = 0..0;
        }
        read
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
    use std::path::Path;

    use super::*;
    use crate::source::{LinkPolicy, Root};

    const LEN: usize = 3 << 20;

    #[test]
    fn cached_bytes_are_read_and_others_are_neither_read_nor_fetched() {
        // Not /tmp, which may be of memory, where nothing can be evicted.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let bytes: Vec<u8> = (0..LEN).map(|n| (n / 5) as u8).collect();
        std::fs::write(dir.path().join("f"), &bytes).unwrap();
        let (root, way) = Root::for_directory(dir.path(), LinkPolicy::Inside).unwrap();
        let file = root.open(&way.join(Path::new("f"))).unwrap();
        let told = Residency::new(file.filesystem_kind());
        let untold = Residency { is_unreported: true.into(), ..Residency::default() };
        let mut buf = vec![0; 100_000];
        for residency in [&told, &untold] {
            assert!(residency.read_cached(&file, &mut buf, 12_345));
            assert_eq!(buf, bytes[12_345..112_345]);
            assert!(!residency.read_cached(&file, &mut buf, LEN as u64 - 10), "past the end");
        }
        std::fs::File::open(dir.path().join("f")).unwrap().sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let pages = || count_cached_pages(&file, &(0..LEN as u64)).unwrap();
        assert_eq!(pages(), 0);
        assert!(!told.read_cached(&file, &mut buf, 12_345));
        assert!(!told.contains(&file, &(0..10)));
        assert_eq!(pages(), 0, "asking fetches nothing");
        assert!(!untold.read_cached(&file, &mut buf, 12_345));
        assert!(!untold.read_cached(&file, &mut buf, 212_345));
        assert!(pages() <= 2, "one page for each byte tried, and not again so soon");
    }
}
