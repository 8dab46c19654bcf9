//! An object of one version, read in parts.

use std::borrow::Cow;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use futures_util::future::try_join_all;
use futures_util::stream::StreamExt;

use crate::source::disk_cache::CachedObject;
use crate::source::error::SourceError;
use crate::source::metadata::FileState;
use crate::source::request_counters::{count_bytes, count_cached, count_failure};
use crate::source::scatter::copy_to_targets;
use crate::source::store::{FileHandle, PreferredRequests, Storage};
use crate::threads::lock;

use super::error::RemoteError;
use super::failure::StoreFailure;
use super::pages::{FilePages, PAGE_BYTES};
use super::runtime::block_on;
use super::store::RemoteStore;
use super::version::ObjectVersion;

/// Bytes of one request. With larger parts a load waits for the slowest connection; smaller ones cost more requests.
const PART_BYTES: u64 = 8 << 20;

/// Bytes that count as progress: a server that sends fewer in the time of a stall is away. That is 3 KB/s.
const LEAST_PROGRESS_BYTES: u64 = 64 << 10;

/// A sixteenth of an object may be missing in the cache on disk: what a first load did not need.
const ON_DISK_MARGIN_DIVISOR: u64 = 16;

/// An object that is open. Each read is of the version that was opened, or fails.
#[derive(Debug)]
pub struct RemoteFile {
    store: Arc<RemoteStore>,
    key: String,
    version: ObjectVersion,
    /// The URL for messages.
    path: PathBuf,
    pages: FilePages,
    /// Blocks of it in the cache on disk; `None` without a cache.
    cached: Option<CachedObject>,
    /// Whether reads bypass the cache on disk.
    bypasses_cache: AtomicBool,
    /// Bytes of it that the cache on disk had when that was first asked.
    covered_bytes: OnceLock<u64>,
}

impl RemoteFile {
    pub fn new(
        store: Arc<RemoteStore>,
        key: String,
        version: ObjectVersion,
        path: PathBuf,
    ) -> RemoteFile {
        let (bypasses_cache, covered_bytes) = Default::default();
        let pages = FilePages::new();
        if !version.is_strong() {
            store.note_weak_version();
        }
        let cached = store.cached_object(&key, &version);
        RemoteFile { store, key, version, path, pages, cached, bypasses_cache, covered_bytes }
    }

    /// Reads a range in parts that are fetched at once, each into its place.
    fn read_parts(&self, out: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let read = offset..offset + out.len() as u64;
        let parts =
            out.chunks_mut(PART_BYTES as usize).zip((offset..).step_by(PART_BYTES as usize));
        let reads = parts.map(|(part, at)| async move {
            let range = at..at + part.len() as u64;
            self.read_range(range, &mut [(at, part)]).await
        });
        self.wait_for(&read, try_join_all(reads)).map(|_| ())
    }

    /// Runs a read of a range of this file on the calling thread.
    fn wait_for<T>(
        &self,
        range: &Range<u64>,
        read: impl Future<Output = Result<T, StoreFailure>>,
    ) -> Result<T, SourceError> {
        block_on(read)
            .unwrap_or_else(|error| Err(StoreFailure::Permanent(error)))
            .map_err(|failure| self.error(range, failure))
    }

    /// Reads a range into the targets that lie in it, from the cache on disk first. Without targets, it is only kept there.
    /// Returns the bytes that were there.
    async fn read_range(
        &self,
        range: Range<u64>,
        targets: &mut [(u64, &mut [u8])],
    ) -> Result<u64, StoreFailure> {
        let Some(cached) = self.cached.as_ref().filter(|_| !self.bypasses_cache.load(Relaxed))
        else {
            return self.fetch(range, targets, None).await.map(|()| 0);
        };
        let missing = cached.read(&range, targets);
        let missing_bytes: u64 = missing.iter().map(|range| range.end - range.start).sum();
        let cached_bytes = range.end - range.start - missing_bytes;
        count_cached(cached_bytes);
        for range in missing {
            self.fetch(range, targets, Some(cached)).await?;
        }
        Ok(cached_bytes)
    }

    /// Fetches a range from the store into the targets that lie in it, and resumes where an answer broke.
    async fn fetch(
        &self,
        range: Range<u64>,
        targets: &mut [(u64, &mut [u8])],
        cached: Option<&CachedObject>,
    ) -> Result<(), StoreFailure> {
        let store = self.store.of_this_process()?;
        let permit = store.permit(range.end - range.start).await;
        let mut budget = store.retry_budget(None)?;
        let mut fill = cached.and_then(|cached| cached.write(&range));
        let mut place = |bytes: &[u8], at: u64| {
            copy_to_targets(bytes, at, targets);
            if let Some(fill) = &mut fill {
                fill.append(bytes);
            }
        };
        let mut reached = range.start;
        while reached < range.end {
            let (before, began) = (reached, Instant::now());
            if let Err(failure) = self.read_body(&store, range.end, &mut reached, &mut place).await
            {
                let is_fast = began.elapsed() < store.options.stall_timeout;
                if reached - before >= LEAST_PROGRESS_BYTES || is_fast && reached > before {
                    budget.on_progress();
                }
                budget.wait_after(failure).await?;
            }
        }
        permit.complete(range.end - range.start);
        if let Some(fill) = fill {
            fill.finish();
        }
        Ok(())
    }

    /// Reads one answer, from `reached` to `end`. What came before it broke was passed on, and `reached` is behind it.
    async fn read_body(
        &self,
        store: &RemoteStore,
        end: u64,
        reached: &mut u64,
        place: &mut impl FnMut(&[u8], u64),
    ) -> Result<(), StoreFailure> {
        let mut body = store.get(&self.key, &self.version, *reached..end).await?;
        let (mut checked_at, mut checked) = (Instant::now(), *reached);
        while *reached < end {
            let next = tokio::time::timeout(store.options.stall_timeout, body.next()).await;
            let stalled = |_| StoreFailure::transient("the answer stalled");
            let Some(bytes) = next.map_err(stalled)?.transpose()? else {
                return Err(StoreFailure::transient("the answer ended early"));
            };
            if bytes.len() as u64 > end - *reached {
                return Err(StoreFailure::Permanent(RemoteError::NoRanges));
            }
            place(&bytes, *reached);
            count_bytes(bytes.len());
            store.outage.on_answer();
            *reached += bytes.len() as u64;
            if checked_at.elapsed() >= store.options.stall_timeout {
                if *reached - checked < LEAST_PROGRESS_BYTES && *reached < end {
                    return Err(StoreFailure::transient("the answer is too slow"));
                }
                (checked_at, checked) = (Instant::now(), *reached);
            }
        }
        Ok(())
    }

    /// Reads a small range from whole pages, which stay for the next.
    fn read_pages(&self, out: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let number = at / PAGE_BYTES;
            let slot = self.pages.slot(number);
            let mut page = lock(&slot);
            let bytes = match &mut *page {
                Some(bytes) => bytes,
                empty => empty.insert(self.fetch_pages(number)?),
            };
            let within = &bytes[(at % PAGE_BYTES) as usize..];
            let len = within.len().min(out.len() - done);
            out[done..done + len].copy_from_slice(&within[..len]);
            done += len;
        }
        Ok(())
    }

    /// Fetches a page: the first of a run, which is longer the longer pages are read in order. The others of the run
    /// are kept. Returns the page.
    fn fetch_pages(&self, number: u64) -> Result<Vec<u8>, SourceError> {
        let run = self.pages.next_run(number);
        let start = number * PAGE_BYTES;
        let end = (start + run * PAGE_BYTES).min(self.version.size);
        let mut bytes = vec![0; (end - start) as usize];
        self.read_parts(&mut bytes, start)?;
        for (others, page) in bytes.chunks(PAGE_BYTES as usize).enumerate().skip(1) {
            // A page that another reader fetches just now is left to it.
            if let Ok(mut slot) = self.pages.slot(number + others as u64).try_lock() {
                slot.get_or_insert_with(|| page.to_vec());
            }
        }
        bytes.truncate(PAGE_BYTES as usize);
        bytes.shrink_to_fit();
        Ok(bytes)
    }

    /// Bytes of it that the cache on disk had when that was first asked.
    fn covered_bytes(&self) -> u64 {
        *self.covered_bytes.get_or_init(|| {
            let cached = self.cached.as_ref().filter(|_| !self.bypasses_cache.load(Relaxed));
            cached.map_or(0, CachedObject::covered_bytes)
        })
    }

    fn error(&self, range: &Range<u64>, failure: StoreFailure) -> SourceError {
        if matches!(failure, StoreFailure::Changed | StoreFailure::Missing) {
            // The next open asks anew.
            self.store.forget_version_of(&self.key);
        }
        let last = range.end.saturating_sub(1);
        remote_error(self.path.clone(), format!("read bytes {} to {last}", range.start), failure)
    }
}

impl FileHandle for RemoteFile {
    fn state(&self) -> Result<FileState, SourceError> {
        // Every answer is compared with it.
        Ok(self.version.state(self.store.id, &self.key))
    }

    fn read_scattered(&self, targets: &mut [(u64, &mut [u8])]) -> Result<u64, SourceError> {
        let end = targets.iter().map(|(at, target)| at + target.len() as u64).max().unwrap_or(0);
        let range = targets.first().map_or(end, |(at, _)| *at)..end;
        self.wait_for(&range, self.read_range(range.clone(), targets))
    }

    fn is_state_known(&self) -> bool {
        true
    }

    fn storage(&self) -> Storage {
        let size = self.version.size;
        let missing_bytes = size.saturating_sub(self.covered_bytes());
        if self.store.options.offline {
            // A request of several blocks fails if any byte of it is missing.
            return if missing_bytes == 0 { Storage::DiskCache } else { Storage::Filesystem };
        }
        if missing_bytes <= size / ON_DISK_MARGIN_DIVISOR {
            return Storage::DiskCache;
        }
        let max_count = self.store.max_request_count();
        Storage::Store(PreferredRequests { bytes: PART_BYTES, max_count })
    }

    fn keep_on_disk(&self, range: Range<u64>) -> Result<u64, SourceError> {
        self.wait_for(&range, self.read_range(range.clone(), &mut []))
    }

    fn uncached_bytes(&self, ranges: &[Range<u64>]) -> u64 {
        match &self.cached {
            Some(cached) => cached.missing_bytes(ranges),
            None => ranges.iter().map(|range| range.end - range.start).sum(),
        }
    }

    fn bypass_disk_cache(&self) {
        self.bypasses_cache.store(true, Relaxed);
    }

    fn keep_blocks_out_of_page_cache(&self) {
        self.cached.iter().for_each(CachedObject::keep_out_of_page_cache);
    }

    fn read_available_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, SourceError> {
        let available = self.version.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        let out = &mut buf[..available];
        if out.is_empty() {
            return Ok(0);
        }
        if available as u64 <= PAGE_BYTES {
            match self.read_pages(out, offset) {
                // The cache may have these bytes, and lack others of their page.
                Err(_) if self.store.options.offline => self.read_parts(out, offset)?,
                read => read?,
            }
        } else {
            self.read_parts(out, offset)?;
        }
        Ok(available)
    }
}

/// The error of a request for a path.
pub fn remote_error(
    path: PathBuf,
    action: impl Into<Cow<'static, str>>,
    failure: StoreFailure,
) -> SourceError {
    let action = action.into();
    match failure {
        StoreFailure::Missing => SourceError::Missing { path },
        StoreFailure::Changed => SourceError::Changed { path, request: Some(action.into_owned()) },
        StoreFailure::Permanent(error) => {
            if !error.is_refusal() {
                count_failure();
            }
            SourceError::Remote { path, action, error: Box::new(error) }
        }
        // Only a read that gave up has one.
        StoreFailure::Transient { message, .. } => {
            SourceError::Remote { path, action, error: Box::new(RemoteError::Other { message }) }
        }
    }
}
