//! Lends ranges of a file's page cache uncopied, while nothing can change them.
//!
//! A mapping of the pages is lent to the kernel, which copies from it. A copy of ours would take as long as the kernel's
//! own. A read lease keeps the bytes: a program that opens the file for writing waits until the lease is given back, within
//! a millisecond. If a program has the file open for writing, there is no lease, and nothing is lent.

use std::ops::{Deref, Range};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use memmap2::{Mmap, MmapOptions, UncheckedAdvice};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::param::page_size;

use crate::source::file::OpenFile;
use crate::source::lease;

use super::pages::{count_pages, count_pages_of};

/// Maximum leases of one file at once, each with a descriptor of its own: one for each session thread of the default.
const MAX_LEASES: usize = 2;

/// Smaller ranges are copied in less time than they are mapped.
const MIN_LENT_BYTES: u64 = 128 << 10;

/// Bytes of the file that a descriptor maps at once, and between the starts of mappings. To map each range anew took a
/// third of the daemon's time. Of a mapping of the whole file the kernel would keep the page tables: 2 MiB for each GiB.
const WINDOW_BYTES: u64 = 64 << 20;
const WINDOW_STRIDE_BYTES: u64 = 32 << 20;

/// Lends pages of one open file.
#[derive(Debug, Default)]
pub struct PageLender {
    slots: [Mutex<Option<LeaseSlot>>; MAX_LEASES],
    /// Set if this user may not hold a lease on the file, or if its filesystem has none.
    is_refused: AtomicBool,
}

/// A descriptor that a lease belongs to, with a mapped part of its file.
#[derive(Debug)]
struct LeaseSlot {
    fd: OwnedFd,
    /// The range of the file that is mapped.
    window: Range<u64>,
    map: Option<Mmap>,
}

/// A range of a file's page cache. Until this is dropped, no program can write to the file.
pub struct LentPages<'a> {
    lease: HeldLease<'a>,
    /// The range in the mapping.
    range: Range<usize>,
}

impl Deref for LentPages<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let map = self.lease.0.as_ref().and_then(|slot| slot.map.as_ref());
        map.map_or(&[], |map| &map[self.range.clone()])
    }
}

impl Drop for LentPages<'_> {
    fn drop(&mut self) {
        let Some(map) = self.lease.0.as_ref().and_then(|slot| slot.map.as_ref()) else {
            return;
        };
        // `posix_fadvise` evicts no page that is mapped here.
        let start = self.range.start - self.range.start % page_size();
        // SAFETY: the mapping is of a file, and shared: its pages come back as they are.
        #[allow(unsafe_code)]
        let dropped = unsafe {
            map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, self.range.end - start)
        };
        if dropped.is_err() {
            tracing::debug!("the kernel keeps pages of a mapping");
        }
    }
}

/// A lease on a file, which is given back when this is dropped.
struct HeldLease<'a>(MutexGuard<'a, Option<LeaseSlot>>);

impl Drop for HeldLease<'_> {
    fn drop(&mut self) {
        // A lease that cannot be given back ends with its descriptor.
        if self.0.as_ref().is_some_and(|slot| lease::give_back(slot.fd.as_fd()).is_err()) {
            *self.0 = None;
        }
    }
}

impl PageLender {
    /// Lends a range if all of it is in the page cache; `None` if it must be copied. The caller has verified that
    /// reading the range starts no readahead, and must call [`OpenFile::check_unchanged`] before it uses the bytes.
    pub fn lend(&self, file: &OpenFile, range: &Range<u64>) -> Option<LentPages<'_>> {
        let len = range.end.saturating_sub(range.start);
        if !(MIN_LENT_BYTES..=WINDOW_STRIDE_BYTES).contains(&len)
            || self.is_refused.load(Ordering::Relaxed)
        {
            return None;
        }
        let mut slot = self.slots.iter().find_map(|slot| match slot.try_lock() {
            Ok(slot) => Some(slot),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        })?;
        if slot.is_none() {
            let fd = file.reopen(OFlags::empty())?;
            *slot = Some(LeaseSlot { fd, window: 0..0, map: None });
        }
        match lease::take(slot.as_ref()?.fd.as_fd()) {
            Ok(()) => {}
            // A program has it open for writing now.
            Err(Errno::AGAIN) => return None,
            Err(_) => {
                self.is_refused.store(true, Ordering::Relaxed);
                return None;
            }
        }
        // Gives the lease back when it is dropped.
        let mut held = HeldLease(slot);
        // A page that is gone would make this thread wait for the disk.
        if count_pages_of(file, range).map_or(true, |cached| cached < count_pages(range)) {
            return None;
        }
        let slot = held.0.as_mut()?;
        slot.map_window(range)?;
        let start = (range.start - slot.window.start) as usize;
        Some(LentPages { lease: held, range: start..start + len as usize })
    }
}

impl LeaseSlot {
    /// Maps a window of the file that contains a range.
    fn map_window(&mut self, range: &Range<u64>) -> Option<()> {
        if self.map.is_some() && self.window.start <= range.start && range.end <= self.window.end {
            return Some(());
        }
        // The page tables of the old window are freed first.
        self.map = None;
        let start = range.start / WINDOW_STRIDE_BYTES * WINDOW_STRIDE_BYTES;
        let mut options = MmapOptions::new();
        options.offset(start).len(WINDOW_BYTES as usize);
        // SAFETY: the mapping is read in ranges that are lent, and their file cannot change meanwhile.
        #[allow(unsafe_code)]
        let map = unsafe { options.map(self.fd.as_raw_fd()) }.ok()?;
        (self.window, self.map) = (start..start + WINDOW_BYTES, Some(map));
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use rustix::fs::{Advice, fadvise};

    use super::*;
    use crate::source::test_file;

    const LEN_BYTES: u64 = 3 << 20;

    fn bytes() -> Vec<u8> {
        (0..LEN_BYTES).map(|n| (n / 5) as u8).collect()
    }

    #[test]
    fn any_cached_range_is_lent_and_a_small_or_uncached_one_is_not() {
        let (dir, file) = test_file::on_disk(&bytes());
        let lender = PageLender::default();
        for range in
            [0..LEN_BYTES, 4096..1 << 20, 77_777..1_234_567, LEN_BYTES - 200_001..LEN_BYTES]
        {
            let lent = lender.lend(&file, &range).expect("lent");
            assert!(lent[..] == bytes()[range.start as usize..range.end as usize], "{range:?}");
        }
        assert!(lender.lend(&file, &(0..4096)).is_none());
        test_file::sync(&dir);
        fadvise(file.descriptor().unwrap(), 0, None, Advice::DontNeed).unwrap();
        assert!(lender.lend(&file, &(0..1 << 20)).is_none());
    }

    #[test]
    fn a_writer_waits_for_what_is_lent_and_nothing_is_lent_while_it_writes() {
        let (dir, file) = test_file::on_disk(&bytes());
        let lender = PageLender::default();
        let range = 0..LEN_BYTES;
        for is_truncation in [false, true] {
            let (sender, opened) = channel();
            let path = dir.path().join("f");
            let lent = lender.lend(&file, &range).expect("lent");
            let other = lender.lend(&file, &range).expect("lent to another thread");
            assert!(lender.lend(&file, &range).is_none(), "to no third one");
            let writer = std::thread::spawn(move || {
                let opened = OpenOptions::new().write(true).truncate(is_truncation).open(path);
                sender.send(opened.unwrap()).unwrap();
            });
            drop(other);
            let early = opened.recv_timeout(Duration::from_millis(50));
            assert_eq!(early.err(), Some(RecvTimeoutError::Timeout));
            assert!(lent[..] == bytes());
            drop(lent);
            let written = opened.recv_timeout(Duration::from_secs(20)).expect("opened");
            writer.join().unwrap();
            assert!(lender.lend(&file, &range).is_none(), "it is open for writing");
            drop(written);
            assert_eq!(lender.lend(&file, &range).is_none(), is_truncation);
        }
    }

    /// A lease on a descriptor that is closed elsewhere must not keep writers waiting.
    #[test]
    fn a_lender_that_is_dropped_keeps_no_lease() {
        let (dir, file) = test_file::on_disk(&bytes());
        let lender = PageLender::default();
        drop(lender.lend(&file, &(0..LEN_BYTES)).expect("lent"));
        drop(lender);
        OpenOptions::new().write(true).open(dir.path().join("f")).unwrap();
    }
}
