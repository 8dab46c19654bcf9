//! Reads the sources of one open virtual file, by the way that suits each: from the page cache, past it, or through it.
//!
//! Every byte is checked to be of the file that was parsed, after it is read. A permanent failure is remembered, and
//! is the answer to every later read. Pages that reads through the page cache bring in are evicted: blocks hold the
//! same bytes.

use std::collections::BTreeMap;
use std::ops::{DerefMut, Range};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use crate::cache::block::id::{BlockId, BlockSource, FillPriority};
use crate::cache::block::pool::{Buffer, with_scratch};
use crate::cache::block::reply::PendingReply;
use crate::cache::counters::AtomicCounters;
use crate::cache::error::CacheError;
use crate::cache::used_ranges::{MAX_LOCAL_GAP_BYTES, merge_ranges};
use crate::checkpoint::{ByteRun, ConvertedRun, OriginId};
use crate::log_throttle::LogThrottle;
use crate::source::{ActiveRead, DIRECT_ALIGNMENT_BYTES, FileReader, SourceError, Storage};
use crate::virtual_file::{Segment, SegmentSource, VirtualFile, VirtualFileReader};

use super::executor::{ExecutorSet, IoJob, STORE_PREFETCH_THREAD_COUNT};
use super::origin_reader::OriginReader;

/// A read of more segments than this comes back to the same pages: they are evicted when the file is closed.
const MAX_EVICTED_SEGMENTS: usize = 8;

/// Bytes that one read of the cache on disk prefetches. Each begins and ends inside of bytes that are compared as one, so that
/// fewer reads are faster.
const DISK_CACHE_PART_BYTES: u64 = 2 << 20;

/// The open sources of one virtual file.
pub struct FileSources {
    virtual_file: Arc<VirtualFile>,
    reader: Arc<VirtualFileReader>,
    sources: Box<[OriginReader]>,
    counters: Arc<AtomicCounters>,
    log_throttle: Arc<LogThrottle>,
    /// Why nothing of it can be read any more.
    permanent_error: OnceLock<Arc<CacheError>>,
    /// Stops its threads when the last open file is dropped.
    _executors: Arc<ExecutorSet>,
}

/// The readahead of a stream that suits its source, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreferredReadahead {
    /// Bytes of the first window.
    pub first: u64,
    /// Bytes of the largest window.
    pub max: u64,
    /// Whether to prefetch the tensors, and pages of tensors, that a reader is expected to read next. On a local disk that won
    /// no time and cost a tenth of the processor time.
    pub predicts_tensors: bool,
}

impl FileSources {
    pub fn new(
        reader: Arc<VirtualFileReader>,
        executors: Arc<ExecutorSet>,
        memory_limit: u64,
        counters: Arc<AtomicCounters>,
        log_throttle: Arc<LogThrottle>,
    ) -> FileSources {
        let origins = reader.virtual_file().origins().len() as u32;
        let open = |number| OriginReader::new(OriginId(number), &reader, &executors, memory_limit);
        let sources = (0..origins).map(open).collect();
        let permanent_error = OnceLock::new();
        FileSources {
            virtual_file: Arc::clone(reader.virtual_file()),
            reader,
            sources,
            counters,
            log_throttle,
            permanent_error,
            _executors: executors,
        }
    }

    pub fn reader(&self) -> &Arc<VirtualFileReader> {
        &self.reader
    }

    pub fn virtual_file(&self) -> &Arc<VirtualFile> {
        &self.virtual_file
    }

    /// The error that every read is answered with, once there is one.
    pub fn permanent_error(&self) -> Option<&Arc<CacheError>> {
        self.permanent_error.get()
    }

    /// Runs a job on the threads that may wait for a source.
    pub fn submit(&self, source: BlockSource, priority: FillPriority, job: IoJob) {
        let executor = &self.source(source).executor;
        match priority {
            FillPriority::Blocking => executor.submit_blocking(job),
            FillPriority::Deferred => executor.submit_deferred(job),
            FillPriority::Prefetch | FillPriority::Replay => executor.submit_prefetch(job),
        }
    }

    /// Whether [`FileSources::check_unchanged`] never waits for another program or machine.
    pub fn is_check_immediate(&self, source: BlockSource) -> bool {
        let mut origins = self.reader.origins().read_origins(self.origin_of(source));
        origins.all(|origin| self.file(origin).is_none_or(FileReader::is_check_immediate))
    }

    /// Bytes of a source that one request prefetches, if they are more than a block.
    pub fn part_bytes(&self, source: BlockSource) -> Option<u64> {
        match self.source(source).file.as_ref()?.0.open_file().storage() {
            Storage::Store(preferred) => Some(preferred.bytes),
            Storage::DiskCache => Some(DISK_CACHE_PART_BYTES),
            Storage::Filesystem => None,
        }
    }

    /// The readahead that a source prefers: the bytes of all its requests at once.
    pub fn preferred_readahead(&self) -> Option<PreferredReadahead> {
        let preferred = self.sources.iter().find_map(OriginReader::preferred_requests)?;
        let count = preferred.max_count.min(STORE_PREFETCH_THREAD_COUNT) as u64;
        Some(PreferredReadahead {
            first: preferred.bytes,
            max: preferred.bytes * count,
            predicts_tensors: true,
        })
    }

    /// Fails if a source is no longer the file that was parsed.
    pub fn check_unchanged(&self, source: BlockSource) -> Result<(), Arc<CacheError>> {
        self.check_origin(self.origin_of(source))
    }

    /// Whether the page cache has all of a block already.
    pub fn is_in_page_cache(&self, id: BlockId) -> bool {
        let BlockSource::File(_) = id.source else { return false };
        let file = &self.source(id.source).file;
        file.as_ref().is_some_and(|(file, _)| file.is_cached(&id.range()))
    }

    /// Answers a read from the page cache if that has the whole range, copied once and kept nowhere. Otherwise, or if
    /// asking may wait, gives the reply back.
    pub fn answer_from_page_cache(
        &self,
        range: &Range<u64>,
        reply: PendingReply,
    ) -> Result<(), PendingReply> {
        let segments = || self.virtual_file().segments(range.clone());
        let is_local = segments().all(|segment| match segment.bytes {
            SegmentSource::Header(_) => true,
            SegmentSource::Run { origin, .. } => self.sources[origin.0 as usize].is_local,
            SegmentSource::Tensor { .. } => false,
        });
        if !is_local {
            return Err(reply);
        }
        let reply = match self.lend_page_cache(range, reply) {
            Ok(()) => return Ok(()),
            Err(reply) => reply,
        };
        with_scratch((range.end - range.start) as usize, |scratch| {
            let mut read_from = None;
            for segment in segments() {
                let out = part_of(scratch, range, &segment.range);
                match self.file_run(&segment) {
                    Some((file, origin, run)) => {
                        if !file.read_cached(out, run.start) {
                            return Err(reply);
                        }
                        if read_from != Some(origin)
                            && let Some(last) = read_from.replace(origin)
                            && let Err(error) = self.check_origin(last)
                        {
                            reply.send(Err(&error));
                            return Ok(());
                        }
                    }
                    None => {
                        if self.reader.read_at(out, segment.range.start).is_err() {
                            return Err(reply);
                        }
                    }
                }
            }
            self.counters.cached.fetch_add(1, Relaxed);
            self.counters.cached_bytes.fetch_add(scratch.len() as u64, Relaxed);
            match read_from.map_or(Ok(()), |origin| self.check_origin(origin)) {
                Ok(()) => reply.send(Ok(scratch)),
                Err(error) => reply.send(Err(&error)),
            }
            Ok(())
        })
    }

    /// Answers a read of one run of a file from the page cache, uncopied. Otherwise gives the reply back.
    fn lend_page_cache(&self, range: &Range<u64>, reply: PendingReply) -> Result<(), PendingReply> {
        let mut segments = self.virtual_file().segments(range.clone());
        let (Some(segment), None) = (segments.next(), segments.next()) else { return Err(reply) };
        let Some((file, origin, run)) = self.file_run(&segment) else { return Err(reply) };
        let len = run.end - run.start;
        let Some(lent) = file.lend_cached(&run) else { return Err(reply) };
        self.counters.cached.fetch_add(1, Relaxed);
        self.counters.cached_bytes.fetch_add(len, Relaxed);
        self.counters.lent_bytes.fetch_add(len, Relaxed);
        // What is lent does not change after this.
        match self.check_origin(origin) {
            Ok(()) => reply.send(Ok(&lent)),
            Err(error) => reply.send(Err(&error)),
        }
        Ok(())
    }

    /// Reads a block into an aligned buffer. Returns where in the buffer it lies. `take_scratch` may return a
    /// second one, for source bytes that are converted.
    pub fn read_block(
        &self,
        id: BlockId,
        out: &mut [u8],
        take_scratch: impl FnOnce() -> Option<Buffer>,
    ) -> Result<Range<usize>, CacheError> {
        let place = block_range(id);
        match id.source {
            BlockSource::File(_) => return Ok(self.read_run(id.source, &id.range(), out)?),
            BlockSource::Tensor(index) => {
                let out = &mut out[place.clone()];
                if !self.read_converted(index, id.start, out, take_scratch)? {
                    self.read_part(id.source, id.start, out)?;
                }
            }
        }
        Ok(place)
    }

    /// Fills `out` with values that are cast or byte-swapped, past the page cache into a scratch buffer. Returns false if
    /// they must be read otherwise.
    fn read_converted(
        &self,
        index: u32,
        offset: u64,
        out: &mut [u8],
        take_scratch: impl FnOnce() -> Option<Buffer>,
    ) -> Result<bool, CacheError> {
        let bytes = &self.virtual_file().tensors()[index as usize].bytes;
        let file = |origin| self.file(origin);
        let Some(run) = ConvertedRun::find(bytes, offset, out.len() as u64, file) else {
            return Ok(false);
        };
        let Some(mut scratch) = take_scratch() else { return Ok(false) };
        let source_bytes = run.read(out, &mut scratch)?;
        self.counters.direct_bytes.fetch_add(source_bytes, Relaxed);
        Ok(true)
    }

    /// Reads blocks of one strided tensor in a store, by at most `requests` at once. Each gets its [`block_range`].
    pub fn read_window<S: DerefMut<Target = [u8]> + Send>(
        &self,
        blocks: &mut [(BlockId, Buffer)],
        requests: usize,
        new_scratch: impl Fn(usize) -> S + Sync,
    ) -> Result<(), CacheError> {
        let start_of = |id: &BlockId| match id.source {
            BlockSource::Tensor(index) => self.virtual_file().tensor_range(index as usize).start,
            BlockSource::File(_) => 0,
        };
        let mut targets: Vec<_> = blocks
            .iter_mut()
            .map(|(id, buffer)| (start_of(id) + id.start, &mut buffer[block_range(*id)]))
            .collect();
        let len: usize = targets.iter().map(|(_, target)| target.len()).sum();
        self.reader.read_from_stores(&mut targets, requests, new_scratch, || false)?;
        self.counters.buffered_bytes.fetch_add(len as u64, Relaxed);
        Ok(())
    }

    /// Reads adjacent blocks of a source file, with one request if it lies in a store. Each gets its
    /// [`block_range`].
    pub fn read_adjacent(&self, blocks: &mut [(BlockId, Buffer)]) -> Result<(), CacheError> {
        let Some(&(first, _)) = blocks.first() else { return Ok(()) };
        let source = self.source(first.source);
        let mut targets: Vec<_> = blocks
            .iter_mut()
            .map(|(id, buffer)| (id.start, &mut buffer[block_range(*id)]))
            .collect();
        let len: usize = targets.iter().map(|(_, target)| target.len()).sum();
        let is_read = match &source.file {
            Some((file, _)) => file.read_remote(&mut targets)?.is_some(),
            None => false,
        };
        if !is_read {
            for (start, target) in targets {
                self.read_through(source, target, start)?;
            }
        }
        self.counters.buffered_bytes.fetch_add(len as u64, Relaxed);
        Ok(())
    }

    /// Reads a range of a source file into an aligned buffer, past the page cache if its filesystem can. Returns its
    /// [`buffer_range`].
    pub fn read_run(
        &self,
        source: BlockSource,
        range: &Range<u64>,
        out: &mut [u8],
    ) -> Result<Range<usize>, SourceError> {
        let source = self.source(source);
        let place = buffer_range(range);
        let (before, len) = (place.start, place.end);
        let aligned = &mut out[..len.next_multiple_of(DIRECT_ALIGNMENT_BYTES)];
        let file = source.file.as_ref();
        let read_direct =
            |(file, _): &(FileReader, _)| file.read_direct(aligned, range.start - before as u64);
        if file.map_or(Ok(false), read_direct)? {
            self.counters.direct_bytes.fetch_add(len as u64, Relaxed);
        } else {
            self.read_through(source, &mut out[place.clone()], range.start)?;
            self.counters.buffered_bytes.fetch_add(len as u64, Relaxed);
        }
        Ok(place)
    }

    /// Fills `out` from any offset of a source, through the page cache.
    pub fn read_part(
        &self,
        source: BlockSource,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), CacheError> {
        self.counters.buffered_bytes.fetch_add(out.len() as u64, Relaxed);
        match source {
            BlockSource::File(_) => Ok(self.read_through(self.source(source), out, offset)?),
            BlockSource::Tensor(index) => {
                let start = self.virtual_file().tensor_range(index as usize).start;
                let _retained = self.retain_tensor_pages(index as usize);
                let bytes = &self.virtual_file().tensors()[index as usize].bytes;
                self.reader.origins().advise_will_need(bytes, offset, out.len() as u64);
                self.reader.read_at(out, start + offset)?;
                Ok(())
            }
        }
    }

    /// Fills `out` with a range of the virtual file, segment by segment through the page cache.
    pub fn read_by_segments(&self, range: &Range<u64>, out: &mut [u8]) -> Result<(), CacheError> {
        let segments: Vec<Segment> = self.virtual_file().segments(range.clone()).collect();
        if segments.len() > MAX_EVICTED_SEGMENTS {
            let _retained: Vec<_> =
                segments.iter().flat_map(|segment| self.retain_pages(segment)).collect();
            if self.reader.is_remote() {
                self.reader.read_at(out, range.start)?;
            } else {
                self.read_segments_without_readahead(&segments, range, out)?;
            }
        } else {
            for segment in &segments {
                let out = part_of(out, range, &segment.range);
                if let SegmentSource::Run { origin, offset } = segment.bytes {
                    self.read_through(&self.sources[origin.0 as usize], out, offset)?;
                } else {
                    let _retained = self.retain_pages(segment);
                    self.reader.read_at(out, segment.range.start)?;
                }
            }
        }
        self.counters.buffered_bytes.fetch_add(out.len() as u64, Relaxed);
        Ok(())
    }

    /// Fills `out` from segments through the page cache. Only their ranges and small gaps are requested: the bytes around
    /// them may never be needed.
    fn read_segments_without_readahead(
        &self,
        segments: &[Segment],
        range: &Range<u64>,
        out: &mut [u8],
    ) -> Result<(), CacheError> {
        let mut runs: BTreeMap<OriginId, Vec<Range<u64>>> = BTreeMap::new();
        for (_, origin, run) in segments.iter().filter_map(|segment| self.file_run(segment)) {
            runs.entry(origin).or_default().push(run);
        }
        for (origin, runs) in runs {
            let Some(file) = self.file(origin) else { continue };
            for run in merge_ranges(runs, MAX_LOCAL_GAP_BYTES) {
                file.open_file().advise_will_need(run);
            }
        }
        for segment in segments {
            let out = part_of(out, range, &segment.range);
            match self.file_run(segment) {
                Some((file, _, run)) => file.read_without_readahead(out, run.start)?,
                None => drop(self.reader.read_at(out, segment.range.start)?),
            }
        }
        Ok(())
    }

    /// Copies a range that the virtual file holds in memory: there is no disk to wait for.
    pub fn copy_in_memory(&self, start: u64, out: &mut [u8]) -> Result<(), Arc<CacheError>> {
        self.reader.read_at(out, start).map_err(|error| self.record_failure(error.into()))?;
        Ok(())
    }

    /// The first source that a range is made of, unless the range is header alone.
    pub fn first_source(&self, range: &Range<u64>) -> Option<BlockSource> {
        let mut segments = self.virtual_file().segments(range.clone());
        segments.find_map(|segment| match segment.bytes {
            SegmentSource::Header(_) => None,
            SegmentSource::Run { origin, .. } => Some(BlockSource::File(origin.0)),
            SegmentSource::Tensor { index, .. } => Some(BlockSource::Tensor(index as u32)),
        })
    }

    /// Logs a failure at most once a minute for each path. The first permanent one is the answer from now on.
    pub fn record_failure(&self, error: CacheError) -> Arc<CacheError> {
        let should_log =
            |path: Option<&Path>| path.is_none_or(|path| self.log_throttle.should_log(path));
        let error = Arc::new(error);
        if !error.is_permanent() {
            if !error.is_outage() && should_log(error.path()) {
                tracing::warn!(%error, "a read failed");
            }
            return error;
        }
        let first = self.permanent_error.get_or_init(|| {
            let remedy = error.remedy();
            if self.virtual_file().is_plain() {
                // Files that are shown as they are may change: they are then read as they are.
                tracing::debug!(%error, "readahead stops for this file");
            } else if should_log(error.path()) {
                tracing::error!(%error, %remedy, "this virtual file can no longer be read");
            }
            Arc::clone(&error)
        });
        Arc::clone(first)
    }

    /// The error of a read that panicked.
    pub fn panic_error(&self, source: BlockSource) -> CacheError {
        let file = self.file(self.origin_of(source));
        let path = file.map(|file| file.open_file().file().path());
        CacheError::Internal { path: path.unwrap_or_default() }
    }

    fn check_origin(&self, origin: OriginId) -> Result<(), Arc<CacheError>> {
        if let Some(error) = self.permanent_error() {
            return Err(Arc::clone(error));
        }
        let unchanged = self.reader.origins().check_unchanged(origin);
        unchanged.map_err(|error| self.record_failure(error.into()))
    }

    /// Fills `out` from a source through the page cache, and evicts what that brought in. Parts of a patched tensor come
    /// back to the same pages, so these are evicted when the file is closed.
    fn read_through(
        &self,
        source: &OriginReader,
        out: &mut [u8],
        offset: u64,
    ) -> Result<(), SourceError> {
        let _retained = self.retain_patched_pages(source.id);
        source.read_through(&self.reader, out, offset)
    }

    /// To be called before a part of a patched tensor is read, and held until it was.
    fn retain_patched_pages(&self, origin: OriginId) -> Vec<ActiveRead<'_>> {
        let patched = self.virtual_file().origins()[origin.0 as usize].patched();
        patched.map(|patched| self.retain_runs(patched.runs())).unwrap_or_default()
    }

    fn retain_runs(&self, runs: impl Iterator<Item = ByteRun>) -> Vec<ActiveRead<'_>> {
        let retain = |run: ByteRun| {
            let range = run.offset..run.offset.saturating_add(run.len);
            self.sources[run.origin.0 as usize].retain_pages(&range)
        };
        runs.filter_map(retain).collect()
    }

    /// To be called before a segment is read through the page cache to which reads come back, and held until it was.
    fn retain_pages(&self, segment: &Segment) -> Vec<ActiveRead<'_>> {
        match segment.bytes {
            SegmentSource::Header(_) => Vec::new(),
            SegmentSource::Tensor { index, .. } => self.retain_tensor_pages(index),
            SegmentSource::Run { origin, offset } => {
                let len = segment.range.end - segment.range.start;
                let retained =
                    self.sources[origin.0 as usize].retain_pages(&(offset..offset + len));
                retained.into_iter().collect()
            }
        }
    }

    /// The same for a part of a tensor that is gathered: the next part comes back to the same pages.
    fn retain_tensor_pages(&self, index: usize) -> Vec<ActiveRead<'_>> {
        self.retain_runs(self.virtual_file().tensors()[index].bytes.extents())
    }

    /// The file that holds a segment in one run, its origin, and the run.
    fn file_run(&self, segment: &Segment) -> Option<(&FileReader, OriginId, Range<u64>)> {
        let SegmentSource::Run { origin, offset } = segment.bytes else { return None };
        let len = segment.range.end - segment.range.start;
        Some((self.file(origin)?, origin, offset..offset + len))
    }

    /// The reader of an origin that is a file.
    fn file(&self, origin: OriginId) -> Option<&FileReader> {
        self.sources[origin.0 as usize].file.as_ref().map(|(file, _)| file)
    }

    fn source(&self, source: BlockSource) -> &OriginReader {
        &self.sources[self.origin_of(source).0 as usize]
    }

    fn origin_of(&self, source: BlockSource) -> OriginId {
        match source {
            BlockSource::File(origin) => OriginId(origin),
            BlockSource::Tensor(index) => {
                self.virtual_file().tensors()[index as usize].bytes.first_extent().origin
            }
        }
    }
}

impl Drop for FileSources {
    fn drop(&mut self) {
        for source in &self.sources {
            if let Some((file, guard)) = &source.file {
                guard.evict_all(file.open_file());
            }
        }
    }
}

/// The range of an aligned buffer that a block fills.
pub fn block_range(id: BlockId) -> Range<usize> {
    match id.source {
        BlockSource::File(_) => buffer_range(&id.range()),
        BlockSource::Tensor(_) => 0..(id.end - id.start) as usize,
    }
}

/// The range of an aligned buffer that a range of a source fills. Both have the same offset in a page.
fn buffer_range(range: &Range<u64>) -> Range<usize> {
    let before = range.start as usize % DIRECT_ALIGNMENT_BYTES;
    before..before + (range.end - range.start) as usize
}

/// The part of a reply for `range` that a range in it fills.
fn part_of<'a>(out: &'a mut [u8], range: &Range<u64>, part: &Range<u64>) -> &'a mut [u8] {
    &mut out[(part.start - range.start) as usize..(part.end - range.start) as usize]
}
