//! An open virtual file: answers any read of it from what is at hand, or has it fetched.
//!
//! In order: from blocks that are there; from the sources' own page cache, copied once and kept
//! nowhere; from the disk, into blocks that others then find.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::virtual_file::{SegmentSource, VirtualFile, VirtualFileReader};

use crate::cache::block::extents::BlockParts;
use crate::cache::block::fill;
use crate::cache::block::fill::FillPriority;
use crate::cache::block::pool::BufferSize;
use crate::cache::block::table::{Block, BlockHit, BlockId, BlockSource, JoinResult};
use crate::cache::io::reply::{PartialReply, PendingReply, ReplyCallback, Waiter};
use crate::cache::io::source::SourceHandle;
use crate::cache::plan::ReadPlan;
use crate::cache::prefetch::Prefetcher;
use crate::cache::scratch::with_scratch;
use crate::cache::{Cache, CacheError};

/// An open virtual file, shared by all who have it open.
pub struct CachedFile {
    pub(super) cache: Arc<Cache>,
    pub(super) reader: Arc<VirtualFileReader>,
    pub(super) sources: Box<[SourceHandle]>,
    /// Sets its blocks apart from those of other virtual files.
    pub(super) file_id: u64,
    /// How large the blocks of strided tensors are.
    pub(super) strided_size: BufferSize,
    pub(super) prefetcher: Prefetcher,
    /// Why nothing of it can be read any more.
    permanent_error: OnceLock<Arc<CacheError>>,
}

impl CachedFile {
    pub(super) fn new(
        cache: Arc<Cache>,
        reader: Arc<VirtualFileReader>,
        number: u64,
    ) -> CachedFile {
        let origins = (0..).zip(reader.virtual_file().origins());
        let origins = origins.map(|(n, _)| SourceHandle::new(&cache, &reader, n)).collect();
        let (_, limit) = cache.blocks.pool.held_and_limit();
        let large = if limit >= LARGE_BLOCKS_MIN_LIMIT_BYTES {
            BufferSize::Large
        } else {
            BufferSize::Small
        };
        let broken = OnceLock::new();
        let foresight = Prefetcher::new(&cache, reader.virtual_file());
        CachedFile {
            cache,
            reader,
            sources: origins,
            file_id: number,
            strided_size: large,
            prefetcher: foresight,
            permanent_error: broken,
        }
    }

    /// What reads the virtual file by itself.
    pub fn reader(&self) -> &Arc<VirtualFileReader> {
        &self.reader
    }

    /// The virtual file.
    pub fn virtual_file(&self) -> &Arc<VirtualFile> {
        self.reader.virtual_file()
    }

    /// Reads a range, cut at the virtual file's end. `done` is called exactly once with all of its bytes
    /// or with the error: before this returns if everything is at hand, otherwise by another
    /// thread. Never waits for a disk.
    pub fn read(self: &Arc<Self>, offset: u64, len: u32, done: ReplyCallback) {
        let counting = &self.cache.counters;
        let answer = PendingReply::new(done, Arc::clone(counting));
        let end = offset.saturating_add(u64::from(len)).min(self.virtual_file().size());
        if offset >= end {
            return answer.send(Ok(&[]));
        }
        counting.reads.increment();
        if let Some(error) = self.permanent_error.get() {
            counting.refused.increment();
            return answer.send(Err(error));
        }
        let range = offset..end;
        if let Some(header) = self.virtual_file().header().get(offset as usize..end as usize) {
            counting.hits.increment();
            return answer.send(Ok(header));
        }
        self.prefetcher.record(&range);
        let wanted = self.plan_read(&range);
        let found = wanted.as_ref().and_then(|w| self.cache.blocks.lookup(self.file_id, &w.pieces));
        let wanted = match (wanted, found) {
            (Some(wanted), Some(found)) => {
                counting.hits.increment();
                self.answer_from_blocks(range.clone(), wanted, found, answer);
                self.prefetch_trace();
                let seen = self.classify(&range);
                return self.prefetch(&range, seen);
            }
            (wanted, _) => wanted,
        };
        let answer = match self.answer_from_page_cache(&range, answer) {
            Ok(()) => return,
            Err(answer) => answer,
        };
        counting.misses.increment();
        let seen = self.classify(&range);
        match (wanted, self.locate_small_run(&range)) {
            (None, _) => self.read_by_segments(range.clone(), answer),
            (Some(wanted), Some((origin, offset))) if seen.is_jump && !self.is_pending(&wanted) => {
                let (served, len) = (Arc::clone(self), (range.end - range.start) as usize);
                let read = move || served.read_uncached(origin, offset, len, answer);
                self.sources[origin as usize].executor.submit_blocking(Box::new(read));
            }
            (Some(wanted), _) => {
                let is_beside = seen.is_fault_around && !self.contains_tensor_start(&range);
                let why = if is_beside { FillPriority::Deferred } else { FillPriority::Blocking };
                self.wait_for_blocks(&range, &wanted, why, answer);
            }
        }
        self.prefetch_trace();
        self.prefetch(&range, seen);
    }

    /// Answers from blocks all of which are there. Whether their files changed is asked here where
    /// that takes no time, and otherwise by a thread that may wait.
    fn answer_from_blocks(
        self: &Arc<Self>,
        range: Range<u64>,
        wanted: ReadPlan,
        found: Vec<BlockHit>,
        answer: PendingReply,
    ) {
        let remote = found.iter().map(|found| self.source_of(found.id)).find(|o| !o.is_local);
        let Some(remote) = remote else {
            return self.answer_unchanged(&range, &wanted, &found, answer);
        };
        let served = Arc::clone(self);
        remote.executor.submit_blocking(Box::new(move || {
            served.answer_unchanged(&range, &wanted, &found, answer);
        }));
    }

    fn answer_unchanged(
        &self,
        range: &Range<u64>,
        wanted: &ReadPlan,
        found: &[BlockHit],
        answer: PendingReply,
    ) {
        let mut checked = None;
        for BlockHit { id, .. } in found {
            if checked != Some(id.source)
                && let Err(error) = self.check_block_source(*id)
            {
                return answer.send(Err(&error));
            }
            checked = Some(id.source);
        }
        if let [BlockHit { block, parts, .. }] = found
            && let [part] = &**parts
            && wanted.in_memory.is_empty()
        {
            return answer.send(Ok(&block.bytes()[part.bytes.clone()]));
        }
        with_scratch((range.end - range.start) as usize, |scratch| {
            for BlockHit { block, parts, .. } in found {
                for part in parts {
                    scratch[part.reply_offset..part.reply_offset + part.bytes.len()]
                        .copy_from_slice(&block.bytes()[part.bytes.clone()]);
                }
            }
            match self.copy_in_memory(wanted, scratch) {
                Ok(()) => answer.send(Ok(scratch)),
                Err(error) => answer.send(Err(&error)),
            }
        });
    }

    /// Copies what the virtual file itself holds in memory: there is no disk to wait for.
    fn copy_in_memory(&self, wanted: &ReadPlan, out: &mut [u8]) -> Result<(), Arc<CacheError>> {
        for (at, range) in &wanted.in_memory {
            let part = &mut out[*at..*at + (range.end - range.start) as usize];
            self.reader.read_at(part, range.start).map_err(|e| self.record_failure(e.into()))?;
        }
        Ok(())
    }

    /// Answers from the sources' page cache if all of the range is there, and gives the answer
    /// back if not.
    fn answer_from_page_cache(
        &self,
        range: &Range<u64>,
        answer: PendingReply,
    ) -> Result<(), PendingReply> {
        let segments = || self.virtual_file().segments(range.clone());
        let local = segments().all(|segment| match segment.bytes {
            SegmentSource::Header(_) => true,
            SegmentSource::Run { origin, .. } => self.sources[origin.0 as usize].is_local,
            SegmentSource::Tensor { .. } => false,
        });
        if !local {
            return Err(answer);
        }
        with_scratch((range.end - range.start) as usize, |scratch| {
            let mut last = None;
            for segment in segments() {
                let start = (segment.range.start - range.start) as usize;
                let out = &mut scratch[start..(segment.range.end - range.start) as usize];
                match segment.bytes {
                    SegmentSource::Run { origin, offset } if self.reader.file(origin).is_some() => {
                        let file = &self.sources[origin.0 as usize];
                        if !file.read_from_page_cache(&self.reader, out, offset) {
                            return Err(answer);
                        }
                        if last != Some(origin)
                            && let Some(last) = last.replace(origin)
                            && let Err(error) = self.check_source(last.0)
                        {
                            answer.send(Err(&error));
                            return Ok(());
                        }
                    }
                    _ => {
                        if self.reader.read_at(out, segment.range.start).is_err() {
                            return Err(answer);
                        }
                    }
                }
            }
            let counting = &self.cache.counters;
            counting.cached.increment();
            counting.cached_bytes.add(scratch.len() as u64);
            match last.map_or(Ok(()), |origin| self.check_source(origin.0)) {
                Ok(()) => answer.send(Ok(scratch)),
                Err(error) => answer.send(Err(&error)),
            }
            Ok(())
        })
    }

    /// Waits for the blocks that are not there.
    fn wait_for_blocks(
        self: &Arc<Self>,
        range: &Range<u64>,
        wanted: &ReadPlan,
        why: FillPriority,
        answer: PendingReply,
    ) {
        let mut answer = Some(answer);
        // One part of one block is the answer itself; of more it is put together.
        let whole = |parts: BlockParts| match &*parts {
            [(id, parts)] if parts.len() == 1 && wanted.in_memory.is_empty() => {
                Some(vec![(*id, Waiter::Direct(parts[0].bytes.clone(), answer.take()?))])
            }
            _ => None,
        };
        let joined = self.cache.blocks.join(self.file_id, &wanted.pieces, why, whole);
        let joined = joined.or_else(|| self.wait_for_parts(range, wanted, why, answer.take()?));
        let Some(joined) = joined else {
            return;
        };
        for id in joined.to_fill {
            fill::schedule(self, id, why);
        }
        for (id, block, waiter) in joined.ready {
            let origin = self.source_of(id);
            if origin.is_local {
                self.complete_waiter(id, &block, waiter);
            } else {
                let served = Arc::clone(self);
                let job = Box::new(move || served.complete_waiter(id, &block, waiter));
                origin.executor.submit_blocking(job);
            }
        }
    }

    /// The same for what is put together; `None` if that was answered otherwise.
    fn wait_for_parts(
        self: &Arc<Self>,
        range: &Range<u64>,
        wanted: &ReadPlan,
        why: FillPriority,
        answer: PendingReply,
    ) -> Option<JoinResult> {
        let store = &self.cache.blocks;
        let len = (range.end - range.start) as usize;
        let Some(mut bytes) = BufferSize::fitting(len).and_then(|size| store.take_buffer(size))
        else {
            self.read_by_segments(range.clone(), answer);
            return None;
        };
        if let Err(error) = self.copy_in_memory(wanted, &mut bytes) {
            answer.send(Err(&error));
            return None;
        }
        let mut answer = Some(answer);
        let gathered = |parts: BlockParts| {
            let gathering = PartialReply::new(bytes, len, parts.len(), answer.take()?);
            let waiter = |(id, parts)| (id, Waiter::Partial(parts, Arc::clone(&gathering)));
            Some(parts.into_iter().map(waiter).collect())
        };
        let joined = store.join(self.file_id, &wanted.pieces, why, gathered);
        if let Some(answer) = answer {
            self.read_by_segments(range.clone(), answer);
        }
        joined
    }

    fn complete_waiter(&self, id: BlockId, block: &Block, waiter: Waiter) {
        match self.check_block_source(id) {
            Ok(()) => waiter.complete(Ok(block.bytes())),
            Err(error) => waiter.complete(Err(&error)),
        }
    }

    /// Refuses bytes of a file that changed.
    pub(super) fn check_block_source(&self, id: BlockId) -> Result<(), Arc<CacheError>> {
        match id.source {
            BlockSource::File(origin) => self.check_source(origin),
            BlockSource::Tensor(place) => {
                self.check_source(self.virtual_file().tensors()[place as usize].bytes.extent().0.0)
            }
        }
    }

    fn check_source(&self, origin: u32) -> Result<(), Arc<CacheError>> {
        if let Some(error) = self.permanent_error.get() {
            return Err(Arc::clone(error));
        }
        let unchanged = self.sources[origin as usize].check_unchanged(&self.reader);
        unchanged.map_err(|error| self.record_failure(error.into()))
    }

    /// An error to be answered. If no later read can do better, all of them get this one.
    pub(super) fn record_failure(&self, error: CacheError) -> Arc<CacheError> {
        let error = Arc::new(error);
        if !error.is_permanent() {
            if self.cache.should_log(error.path()) {
                tracing::warn!(%error, "a read failed");
            }
            return error;
        }
        let first = self.permanent_error.get_or_init(|| {
            let remedy = error.remedy();
            if self.virtual_file().is_plain() {
                // Files that are shown as they are may change: they are then read as they are.
                tracing::debug!(%error, "nothing more is read ahead of this file");
            } else if self.cache.should_log(error.path()) {
                tracing::error!(%error, remedy, "nothing more is read of this virtual file");
            }
            Arc::clone(&error)
        });
        Arc::clone(first)
    }
}

/// Memory from which on gathered tensors have large blocks: they then take an eighth of it at most.
const LARGE_BLOCKS_MIN_LIMIT_BYTES: u64 = 64 << 20;

impl Drop for CachedFile {
    fn drop(&mut self) {
        self.cache.blocks.remove_file(self.file_id);
        self.sources.iter().for_each(|origin| origin.evict_pages(&self.reader));
    }
}
