//! Fetches the files that a view of a store shows into the cache on disk, for later reads.
//!
//! Cached bytes are not fetched again, so a fetch that was stopped resumes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::source::{FileKind, OpenFile, ReadAt, SourceError, is_source_url};
use crate::threads::{lock, parallel_map};
use crate::view::{View, ViewEntry, ViewError, ViewOptions};
use crate::virtual_file::{SegmentSource, VirtualFile, VirtualFileError, VirtualFileReader};

/// Bytes of one request: those of the largest block of the cache.
const PART_BYTES: u64 = 8 << 20;

/// Parts that are fetched at once. The store's own limit on requests applies, too.
const THREAD_COUNT: usize = 32;

/// The largest gap between two needed ranges that is fetched with them, to save a request.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// The reason that a fetch failed.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The path cannot be shown.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A virtual file cannot be opened.
    #[error(transparent)]
    VirtualFile(#[from] VirtualFileError),
    /// A source cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The path is no URL.
    #[error("{path}: is on this machine already")]
    NotRemote {
        /// The path that was given.
        path: PathBuf,
    },
    /// The cache has not kept it all.
    #[error("{path}: the cache on disk has not kept {missing} of {total} bytes")]
    NotKept {
        /// The path that was given.
        path: PathBuf,
        /// Bytes that are not in the cache.
        missing: u64,
        /// Bytes of all that is shown.
        total: u64,
    },
    /// The caller asked to stop.
    #[error("stopped; what was fetched stays in the cache")]
    Stopped,
}

impl FetchError {
    /// What the user can do about it.
    pub fn remedy(&self) -> std::borrow::Cow<'_, str> {
        match self {
            FetchError::View(error) => error.remedy(),
            FetchError::VirtualFile(error) => error.remedy(),
            FetchError::Source(error) => error.remedy(),
            FetchError::NotRemote { .. } => "give the URL of a store, such as s3://BUCKET/PATH".into(),
            FetchError::NotKept { .. } => {
                "make room, or give the cache a larger limit (--cache-size) or another folder (--cache-dir)".into()
            }
            FetchError::Stopped => "run it again to go on".into(),
        }
    }
}

/// Receives the progress of a fetch, and may stop it.
pub trait FetchProgress: Sync {
    /// Called once, with the bytes of everything, when they are known.
    fn on_total(&self, bytes: u64);
    /// Called after so many more bytes are in the cache.
    fn on_fetch(&self, bytes: u64);
    /// Whether to stop.
    fn should_stop(&self) -> bool;
}

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

/// A range of an open source.
struct Part {
    file: Arc<OpenFile>,
    range: Range<u64>,
}

/// Fetches all that a view of a URL shows, at every depth.
pub fn fetch(
    path: &Path,
    options: ViewOptions,
    progress: &dyn FetchProgress,
) -> Result<FetchReport, FetchError> {
    if !is_source_url(path) {
        return Err(FetchError::NotRemote { path: path.to_path_buf() });
    }
    let view = View::new(path, options)?;
    let mut report = FetchReport::default();
    let mut parts = Vec::new();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        if progress.should_stop() {
            return Err(FetchError::Stopped);
        }
        for (name, entry) in shown_entries(&view, &directory)? {
            let path = directory.join(name);
            match entry {
                ViewEntry::Source(metadata) if metadata.kind == FileKind::Directory => {
                    directories.push(path);
                }
                entry => {
                    if let Some(file) = open_shown(&view, &path, &entry)? {
                        report.files += 1;
                        parts.extend(parts_of(&file));
                    }
                }
            }
        }
    }
    let len = |part: &Part| part.range.end - part.range.start;
    let missing = |parts: &[Part]| -> u64 {
        parts.iter().map(|part| part.file.uncached_bytes(&part.range)).sum()
    };
    report.bytes = parts.iter().map(len).sum();
    report.cached_bytes = report.bytes - missing(&parts);
    progress.on_total(report.bytes);
    let failed: Mutex<Option<SourceError>> = Mutex::default();
    parallel_map(&parts, THREAD_COUNT, |part| {
        if progress.should_stop() || lock(&failed).is_some() {
            return;
        }
        match part.file.keep_on_disk(part.range.clone()) {
            Ok(()) => progress.on_fetch(len(part)),
            Err(error) => drop(lock(&failed).get_or_insert(error)),
        }
    });
    if let Some(error) = lock(&failed).take() {
        return Err(error.into());
    }
    if progress.should_stop() {
        return Err(FetchError::Stopped);
    }
    // The disk may have become full, or what was fetched first was evicted by what came last.
    match missing(&parts) {
        0 => Ok(report),
        missing => {
            Err(FetchError::NotKept { path: path.to_path_buf(), missing, total: report.bytes })
        }
    }
}

/// What a directory shows. The first of its names that cannot be looked at is an error.
fn shown_entries(view: &View, directory: &Path) -> Result<Vec<(OsString, ViewEntry)>, FetchError> {
    let listing = view.list(directory)?;
    if let Some((.., error)) = listing.unreadable.into_iter().next() {
        return Err(error.into());
    }
    Ok(listing.entries.into_iter().map(|named| (named.name, named.entry)).collect())
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
        ViewEntry::Index(_) | ViewEntry::Source(_) | ViewEntry::Link(..) => return Ok(None),
    };
    Ok(Some(VirtualFileReader::open(&virtual_file)?))
}

/// The parts of sources that the bytes of a virtual file are made of, in the order of each source.
fn parts_of(reader: &VirtualFileReader) -> Vec<Part> {
    let virtual_file = reader.virtual_file();
    let mut ranges: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
    for segment in virtual_file.segments(0..virtual_file.size()) {
        match segment.bytes {
            SegmentSource::Header(_) => {}
            SegmentSource::Run { origin, offset } => {
                let len = segment.range.end - segment.range.start;
                ranges.entry(origin.0).or_default().push(offset..offset + len);
            }
            SegmentSource::Tensor { index, .. } => {
                for run in virtual_file.tensors()[index].bytes.extents() {
                    let range = run.offset..run.offset.saturating_add(run.len);
                    ranges.entry(run.origin.0).or_default().push(range);
                }
            }
        }
    }
    let mut parts = Vec::new();
    for (origin, ranges) in ranges {
        // Bytes in memory come from a file that was read whole.
        let Some(file) = reader.file(crate::checkpoint::OriginId(origin)) else { continue };
        for range in merge(ranges, file.size()) {
            let starts = (range.start..range.end).step_by(PART_BYTES as usize);
            parts.extend(starts.map(|start| {
                let range = start..(start + PART_BYTES).min(range.end);
                Part { file: Arc::clone(file), range }
            }));
        }
    }
    parts
}

/// Sorts ranges, and joins those that overlap or lie close together.
fn merge(mut ranges: Vec<Range<u64>>, size: u64) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let range = range.start.min(size)..range.end.min(size);
        match merged.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(MAX_GAP_BYTES) => {
                last.end = last.end.max(range.end);
            }
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_lie_close_together_are_one() {
        let far = 10 * MAX_GAP_BYTES;
        let ranges = vec![far..far + 5, 0..10, 5..7, 20..30, far + 1..far + 9];
        assert_eq!(merge(ranges, far + 7), [0..30, far..far + 7]);
        assert_eq!(merge(Vec::new(), 5), []);
    }
}
