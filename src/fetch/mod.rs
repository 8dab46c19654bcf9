//! Fetches the files that a view of a store shows into the cache on disk, for later reads.
//!
//! Cached bytes are not fetched again, so a fetch that was stopped resumes.

mod error;
mod plan;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::source::{DiskCache, FileKind, OpenFile, RemoteOptions, SourceError, is_source_url};
use crate::view::{self, View, ViewEntry, ViewOptions};
use crate::virtual_file::{Progress, ReadExtent, VirtualFile, VirtualFileReader, for_each_chunk};

pub use error::FetchError;
use plan::{ByteCount, plan_extents};

/// Extents that are fetched at once. The store's own limit on requests applies, too.
const THREAD_COUNT: usize = 32;

/// The result of a fetch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct FetchReport {
    /// Files that the view shows, virtual ones and others.
    pub files: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes that the cache had before.
    pub cached_bytes: u64,
}

/// Files of a view, and the extents of their sources.
struct FetchPlan {
    readers: Vec<VirtualFileReader>,
    extents: Vec<ReadExtent<ByteCount>>,
}

impl FetchPlan {
    /// Opens all that a view shows, at every depth.
    fn new(view: &View, progress: &dyn Progress) -> Result<FetchPlan, FetchError> {
        let mut readers = Vec::new();
        view::walk(|directory| {
            if progress.should_stop() {
                return Err(FetchError::Stopped);
            }
            let mut listing = view.list(directory)?;
            if let Some((.., error)) = listing.unreadable.pop() {
                return Err(error.into());
            }
            for named in &listing.entries {
                readers.extend(open_shown(view, &directory.join(&named.name), &named.entry)?);
            }
            Ok(listing.subdirectories().map(|name| directory.join(name)).collect())
        })?;
        let extents = plan_extents(&readers);
        Ok(FetchPlan { readers, extents })
    }

    fn bytes(&self) -> u64 {
        self.extents.iter().map(extent_len).sum()
    }

    /// Bytes that the cache lacks now.
    fn missing_bytes(&self) -> u64 {
        let is_same_file = |a: &ReadExtent<_>, b: &ReadExtent<_>| {
            (a.checkpoint, a.origin) == (b.checkpoint, b.origin)
        };
        let missing = |extents: &[ReadExtent<ByteCount>]| {
            let ranges: Vec<Range<u64>> =
                extents.iter().map(|extent| extent.range.clone()).collect();
            self.file(extents.first()?).map(|file| file.uncached_bytes(&ranges))
        };
        self.extents.chunk_by(is_same_file).filter_map(missing).sum()
    }

    fn file(&self, extent: &ReadExtent<ByteCount>) -> Option<&Arc<OpenFile>> {
        self.readers[extent.checkpoint].file(extent.origin)
    }

    /// Fetches the extents, up to the first error. Returns the number of bytes that the cache already had.
    fn execute(&self, progress: &dyn Progress) -> Result<u64, FetchError> {
        let cached = AtomicU64::new(0);
        let should_stop = || progress.should_stop();
        let is_complete =
            for_each_chunk(self.extents.len(), THREAD_COUNT, should_stop, |(), number| {
                let extent = &self.extents[number];
                if let Some(file) = self.file(extent) {
                    cached.fetch_add(file.keep_on_disk(extent.range.clone())?, Relaxed);
                    progress.on_bytes(extent_len(extent));
                }
                Ok::<_, SourceError>(())
            })?;
        if is_complete { Ok(cached.into_inner()) } else { Err(FetchError::Stopped) }
    }
}

fn extent_len(extent: &ReadExtent<ByteCount>) -> u64 {
    extent.range.end - extent.range.start
}

/// Fetches all that a view of a URL shows, at every depth. Fails before the first byte if the cache cannot keep it all.
pub fn fetch(
    path: &Path,
    options: ViewOptions,
    progress: &dyn Progress,
) -> Result<FetchReport, FetchError> {
    if !is_source_url(path) {
        let path = path.to_path_buf();
        return Err(match path.try_exists() {
            Ok(true) => FetchError::NotRemote { path },
            _ => SourceError::Missing { path }.into(),
        });
    }
    let plan = FetchPlan::new(&View::new(path, options)?, progress)?;
    let bytes = plan.bytes();
    check_room(path, &plan, bytes)?;
    progress.on_total(bytes);
    let cached_bytes = plan.execute(progress)?;
    // Another program may have filled the disk meanwhile, or removed blocks.
    match plan.missing_bytes() {
        0 => Ok(FetchReport { files: plan.readers.len() as u64, bytes, cached_bytes }),
        missing => Err(FetchError::NotKept { path: path.to_path_buf(), missing, total: bytes }),
    }
}

/// Fails unless the cache can keep all extents at once.
fn check_room(path: &Path, plan: &FetchPlan, bytes: u64) -> Result<(), FetchError> {
    let missing = plan.missing_bytes();
    if missing == 0 {
        return Ok(());
    }
    let path = path.to_path_buf();
    let Some(cache) = DiskCache::shared(&RemoteOptions::current()?.cache) else {
        return Err(FetchError::NoCache { path });
    };
    let block_count = plan.extents.len() as u64;
    // If the disk cannot be measured, the fetch begins, and fails at its end if bytes were not kept.
    match cache.find_shortage(bytes - missing, missing, block_count) {
        Ok(Some(shortage)) => Err(FetchError::NoRoom { path, bytes, shortage }),
        _ => Ok(()),
    }
}

/// Opens a file that is shown; `None` if it takes no bytes of a source.
fn open_shown(
    view: &View,
    path: &Path,
    entry: &ViewEntry,
) -> Result<Option<VirtualFileReader>, FetchError> {
    let virtual_file = match entry {
        ViewEntry::VirtualFile(shown) => view.virtual_file(shown)?,
        ViewEntry::Source(metadata) if metadata.kind == FileKind::File => {
            let file = view.open(path)?;
            let virtual_file = Arc::new(VirtualFile::plain(Arc::clone(file.file())));
            return Ok(Some(VirtualFileReader::open_with(&virtual_file, Some(file))?));
        }
        ViewEntry::Index(_) | ViewEntry::Config(_) | ViewEntry::Source(_) | ViewEntry::Link(..) => {
            return Ok(None);
        }
    };
    Ok(Some(VirtualFileReader::open(&virtual_file)?))
}
