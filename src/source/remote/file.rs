//! An object of one version, read in parts.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use futures_util::future::try_join_all;

use crate::source::error::SourceError;
use crate::source::metadata::FileState;
use crate::source::store::FileHandle;
use crate::threads::lock;

use super::error::{RemoteError, RequestFailure};
use super::retry::RetryBudget;
use super::runtime::block_on;
use super::store::RemoteStore;
use super::transport::{ANSWER_TIMEOUT, count_bytes};
use super::version::ObjectVersion;

/// Bytes of one request. Larger parts make a slow connection the last, smaller ones cost more requests.
const PART_BYTES: u64 = 8 << 20;

/// Small reads fetch whole pages of this size: most headers, and the directory at the end of most zips, fit in one.
const PAGE_BYTES: u64 = 64 << 10;

/// Pages of one open file that are kept. A parser reads a header, or the entries at the end, and returns to them.
const MAX_PAGE_COUNT: usize = 64;

/// A page, empty until it was fetched. A reader that needs it waits for the one that fetches it.
type PageSlot = Mutex<Option<Vec<u8>>>;

/// An object that is open. Each read is of the version that was opened, or fails.
#[derive(Debug)]
pub struct RemoteFile {
    store: Arc<RemoteStore>,
    key: String,
    version: ObjectVersion,
    /// The URL for messages.
    path: PathBuf,
    pages: Mutex<HashMap<u64, Arc<PageSlot>>>,
}

impl RemoteFile {
    pub fn new(
        store: Arc<RemoteStore>,
        key: String,
        version: ObjectVersion,
        path: PathBuf,
    ) -> RemoteFile {
        RemoteFile { store, key, version, path, pages: Mutex::default() }
    }

    /// Reads a range in parts that are fetched at once, each into its place.
    fn read_parts(&self, out: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let parts =
            out.chunks_mut(PART_BYTES as usize).zip((offset..).step_by(PART_BYTES as usize));
        let reads = parts.map(|(part, at)| self.read_part(part, at));
        let read = block_on(try_join_all(reads))
            .map_err(|error| self.error(RequestFailure::Permanent(RemoteError::Runtime(error))))?;
        read.map(|_| ()).map_err(|failure| self.error(failure))
    }

    /// Reads one range, and resumes where an answer broke.
    async fn read_part(&self, out: &mut [u8], offset: u64) -> Result<(), RequestFailure> {
        let mut budget = RetryBudget::new(self.store.options.outage_timeout);
        let mut done = 0;
        while done < out.len() {
            let before = done;
            let rest = offset + done as u64..offset + out.len() as u64;
            if let Err(failure) = self.read_body(rest, out, &mut done).await {
                if done > before {
                    budget.on_progress();
                }
                budget.wait_after(failure).await?;
            }
        }
        Ok(())
    }

    /// Reads one answer. `done` counts the bytes of `out` that are there, also if it breaks.
    async fn read_body(
        &self,
        range: Range<u64>,
        out: &mut [u8],
        done: &mut usize,
    ) -> Result<(), RequestFailure> {
        let mut body = self.store.get(&self.key, &self.version, range).await?;
        while *done < out.len() {
            let next = tokio::time::timeout(ANSWER_TIMEOUT, body.next()).await;
            let stalled = |_| RequestFailure::transient("the answer stalled");
            let Some(bytes) = next.map_err(stalled)?.transpose()? else {
                return Err(RequestFailure::transient("the answer ended early"));
            };
            let Some(place) = out.get_mut(*done..*done + bytes.len()) else {
                return Err(RequestFailure::transient("the answer is too long"));
            };
            place.copy_from_slice(&bytes);
            count_bytes(bytes.len());
            *done += bytes.len();
        }
        Ok(())
    }

    /// Reads a small range from whole pages, which stay for the next.
    fn read_pages(&self, out: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let number = at / PAGE_BYTES;
            let slot = self.page_slot(number);
            let mut page = lock(&slot);
            let bytes = match &mut *page {
                Some(bytes) => bytes,
                empty => {
                    let start = number * PAGE_BYTES;
                    let end = (start + PAGE_BYTES).min(self.version.size);
                    let mut bytes = vec![0; (end - start) as usize];
                    self.read_parts(&mut bytes, start)?;
                    empty.insert(bytes)
                }
            };
            let within = &bytes[(at % PAGE_BYTES) as usize..];
            let len = within.len().min(out.len() - done);
            out[done..done + len].copy_from_slice(&within[..len]);
            done += len;
        }
        Ok(())
    }

    fn page_slot(&self, number: u64) -> Arc<PageSlot> {
        let mut pages = lock(&self.pages);
        if pages.len() >= MAX_PAGE_COUNT && !pages.contains_key(&number) {
            pages.clear();
        }
        Arc::clone(pages.entry(number).or_default())
    }

    fn error(&self, failure: RequestFailure) -> SourceError {
        remote_error(self.path.clone(), "read it", failure)
    }
}

impl FileHandle for RemoteFile {
    fn state(&self) -> Result<FileState, SourceError> {
        // Every answer is compared with it.
        Ok(self.version.state(self.store.id, &self.key))
    }

    fn read_available_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, SourceError> {
        let available = self.version.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        let out = &mut buf[..available];
        if out.is_empty() {
            return Ok(0);
        }
        if available as u64 <= PAGE_BYTES {
            self.read_pages(out, offset)?;
        } else {
            self.read_parts(out, offset)?;
        }
        Ok(available)
    }
}

/// The error of a path.
pub fn remote_error(path: PathBuf, action: &'static str, failure: RequestFailure) -> SourceError {
    match failure {
        RequestFailure::Missing => SourceError::Missing { path },
        RequestFailure::Changed => SourceError::Changed { path },
        RequestFailure::Permanent(error) => {
            SourceError::Remote { path, action, error: Box::new(error) }
        }
        // Only a read that gave up has one.
        RequestFailure::Transient { message, .. } => {
            SourceError::Remote { path, action, error: Box::new(RemoteError::Other { message }) }
        }
    }
}
