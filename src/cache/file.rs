//! One open virtual file: answers each of its reads from what is there, or has it read.
//!
//! In order: from blocks; from the sources' own page cache, copied once and kept nowhere; from the disk, into blocks
//! that later reads find. A small random read, one of too many blocks and one without a buffer keep no block. No call
//! waits for a disk: that is for the sources' executors. A block is filled once, by one thread, for all its waiters.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::virtual_file::{VirtualFile, VirtualFileReader};

use super::ablation::is_left_out;
use super::block::id::{BlockId, BlockParts, BlockSource, FillPriority};
use super::block::pool::{Block, BufferSize, with_scratch};
use super::block::reply::{PartialReply, PendingReply, ReplyCallback, Waiter};
use super::block::table::{BlockHit, JoinResult};
use super::error::CacheError;
use super::fill::{BlockFiller, FillJob};
use super::plan::{ReadPlan, plan_prefetch, plan_read};
use super::prefetch::Prefetcher;
use super::prefetch::readahead::{ReadPattern, StreamStep};

/// An open virtual file, shared by all its handles.
pub struct CachedFile {
    filler: Arc<BlockFiller>,
    prefetcher: Prefetcher,
}

/// The share of the memory limit that one part may take, as its divisor: many parts are in flight.
const PART_MEMORY_DIVISOR: u64 = 64;

/// Minimum requests for one prefetched range, and the minimum bytes of each. At 30 ms and 50 MB/s, 2 MiB take 70 ms, and
/// 8 MiB take 200: too long for a reader that has just begun.
const MIN_PARTS_PER_RANGE: u64 = 4;
const MIN_PART_BYTES: u64 = 2 << 20;

impl CachedFile {
    pub(super) fn new(filler: BlockFiller, prefetcher: Prefetcher) -> CachedFile {
        CachedFile { filler: Arc::new(filler), prefetcher }
    }

    /// Reads the virtual file without the cache.
    pub fn reader(&self) -> &Arc<VirtualFileReader> {
        self.filler.sources.reader()
    }

    /// The virtual file whose ranges this reads.
    pub fn virtual_file(&self) -> &Arc<VirtualFile> {
        self.filler.sources.virtual_file()
    }

    /// Reads a range, cut at the end of the file. Never waits for a disk.
    ///
    /// `callback` is called exactly once, with all of the bytes or with the error. If everything is in memory, it is
    /// called before this returns, otherwise by another thread.
    pub fn read(self: &Arc<Self>, offset: u64, len: u32, callback: ReplyCallback) {
        let counters = &self.filler.counters;
        let reply = PendingReply::new(callback, Arc::clone(counters));
        let end = offset.saturating_add(u64::from(len)).min(self.virtual_file().size());
        if offset >= end {
            return reply.send(Ok(&[]));
        }
        counters.reads.fetch_add(1, Relaxed);
        if let Some(error) = self.filler.sources.permanent_error() {
            counters.refused.fetch_add(1, Relaxed);
            return reply.send(Err(error));
        }
        let range = offset..end;
        if let Some(header) = self.virtual_file().header().get(offset as usize..end as usize) {
            counters.hits.fetch_add(1, Relaxed);
            return reply.send(Ok(header));
        }
        self.prefetcher.record(&range);
        let plan = plan_read(self.virtual_file(), &range, &self.filler.layout);
        let hits = plan
            .as_ref()
            .and_then(|plan| self.filler.blocks.lookup(self.filler.file_id, &plan.ranges));
        // A local read without a plan looks for no block, and so would the next ones: prefetched blocks would be read twice.
        let may_prefetch = plan.is_some() || self.reader().is_remote();
        let step = match (plan, hits) {
            (Some(plan), Some(hits)) => {
                counters.hits.fetch_add(1, Relaxed);
                self.answer_from_blocks(&range, plan, hits, reply);
                self.prefetcher.advance(&range, self.filler.blocks.memory_limit())
            }
            (plan, _) => {
                let pattern = self.prefetcher.classify(&range);
                let reply = match self.filler.sources.answer_from_page_cache(&range, reply) {
                    Ok(()) => return,
                    Err(reply) => reply,
                };
                counters.misses.fetch_add(1, Relaxed);
                let step = self.prefetcher.advance(&range, self.filler.blocks.memory_limit());
                self.read_missing(&range, plan, pattern, reply);
                step
            }
        };
        if may_prefetch {
            self.prefetch(&range, step);
        }
    }

    /// Reads what neither the blocks nor the page cache have.
    fn read_missing(
        self: &Arc<Self>,
        range: &Range<u64>,
        plan: Option<ReadPlan>,
        pattern: ReadPattern,
        reply: PendingReply,
    ) {
        let Some(plan) = plan else { return self.read_by_segments(range, reply) };
        if pattern.is_random
            && !is_left_out("random")
            && let Some((source, run)) = plan.small_run()
            && !self.filler.blocks.is_any_pending(self.filler.file_id, &plan.ranges)
        {
            return self.read_uncached(source, run, reply);
        }
        let is_deferred = pattern.is_fault_around && !is_left_out("deferral");
        let priority = match is_deferred {
            true => FillPriority::Deferred,
            false => FillPriority::Blocking,
        };
        self.wait_for_blocks(range, &plan, priority, reply);
    }

    /// Answers from blocks all of which are there. Where asking whether their sources changed may wait, another thread
    /// does it.
    fn answer_from_blocks(
        self: &Arc<Self>,
        range: &Range<u64>,
        plan: ReadPlan,
        hits: Vec<BlockHit>,
        reply: PendingReply,
    ) {
        let remote = hits
            .iter()
            .map(|hit| hit.id.source)
            .find(|&of| !self.filler.sources.is_check_immediate(of));
        let Some(remote) = remote else { return self.copy_blocks(range, &plan, &hits, reply) };
        let (file, range) = (Arc::clone(self), range.clone());
        let job = Box::new(move || file.copy_blocks(&range, &plan, &hits, reply));
        self.filler.sources.submit(remote, FillPriority::Blocking, job);
    }

    fn copy_blocks(
        &self,
        range: &Range<u64>,
        plan: &ReadPlan,
        hits: &[BlockHit],
        reply: PendingReply,
    ) {
        let mut checked = None;
        for BlockHit { id, .. } in hits {
            if checked != Some(id.source)
                && let Err(error) = self.filler.sources.check_unchanged(id.source)
            {
                return reply.send(Err(&error));
            }
            checked = Some(id.source);
        }
        if let [BlockHit { block, parts, .. }] = hits
            && let [part] = &**parts
            && plan.in_memory.is_empty()
        {
            return reply.send(Ok(&block.bytes()[part.bytes.clone()]));
        }
        with_scratch((range.end - range.start) as usize, |scratch| {
            for BlockHit { block, parts, .. } in hits {
                for part in parts {
                    scratch[part.reply_offset..part.reply_offset + part.bytes.len()]
                        .copy_from_slice(&block.bytes()[part.bytes.clone()]);
                }
            }
            match self.copy_in_memory(plan, scratch) {
                Ok(()) => reply.send(Ok(scratch)),
                Err(error) => reply.send(Err(&error)),
            }
        });
    }

    fn copy_in_memory(&self, plan: &ReadPlan, out: &mut [u8]) -> Result<(), Arc<CacheError>> {
        plan.in_memory.iter().try_for_each(|(reply_offset, range)| {
            let end = reply_offset + (range.end - range.start) as usize;
            self.filler.sources.copy_in_memory(range.start, &mut out[*reply_offset..end])
        })
    }

    /// Makes the reply wait for the blocks of a read, and submits fills for the missing ones.
    fn wait_for_blocks(
        self: &Arc<Self>,
        range: &Range<u64>,
        plan: &ReadPlan,
        priority: FillPriority,
        reply: PendingReply,
    ) {
        let mut reply = Some(reply);
        // One part of one block is the reply itself; several are put together.
        let direct = |parts: BlockParts| match &*parts {
            [(id, parts)] if parts.len() == 1 && plan.in_memory.is_empty() => {
                Some(vec![(*id, Waiter::Direct(parts[0].bytes.clone(), reply.take()?))])
            }
            _ => None,
        };
        let joined = self.filler.blocks.join(self.filler.file_id, &plan.ranges, priority, direct);
        let joined = joined.or_else(|| self.wait_for_parts(range, plan, priority, reply.take()?));
        let Some(joined) = joined else { return };
        for id in joined.to_fill {
            self.filler.fill(id, priority);
        }
        for (id, block, waiter) in joined.ready {
            if self.filler.sources.is_check_immediate(id.source) {
                self.answer_waiter(id, &block, waiter);
            } else {
                let file = Arc::clone(self);
                let job = Box::new(move || file.answer_waiter(id, &block, waiter));
                self.filler.sources.submit(id.source, FillPriority::Blocking, job);
            }
        }
    }

    /// The same for a reply that is put together; `None` if it was answered otherwise.
    fn wait_for_parts(
        self: &Arc<Self>,
        range: &Range<u64>,
        plan: &ReadPlan,
        priority: FillPriority,
        reply: PendingReply,
    ) -> Option<JoinResult> {
        let len = (range.end - range.start) as usize;
        let size = BufferSize::fitting(len);
        let Some(mut bytes) = size.and_then(|size| self.filler.blocks.take_buffer(size)) else {
            self.read_by_segments(range, reply);
            return None;
        };
        if let Err(error) = self.copy_in_memory(plan, &mut bytes) {
            reply.send(Err(&error));
            return None;
        }
        let mut reply = Some(reply);
        let partial = |parts: BlockParts| {
            let partial = PartialReply::new(bytes, len, parts.len(), reply.take()?);
            let waiter = |(id, parts)| (id, Waiter::Partial(parts, Arc::clone(&partial)));
            Some(parts.into_iter().map(waiter).collect())
        };
        let joined = self.filler.blocks.join(self.filler.file_id, &plan.ranges, priority, partial);
        if let Some(reply) = reply {
            self.read_by_segments(range, reply);
        }
        joined
    }

    fn answer_waiter(&self, id: BlockId, block: &Block, waiter: Waiter) {
        match self.filler.sources.check_unchanged(id.source) {
            Ok(()) => waiter.answer(Ok(block.bytes())),
            Err(error) => waiter.answer(Err(&error)),
        }
    }

    /// Reads a small random range alone: the next one will be elsewhere.
    fn read_uncached(self: &Arc<Self>, source: BlockSource, run: Range<u64>, reply: PendingReply) {
        let file = Arc::clone(self);
        let read = move || {
            let (sources, len) = (&file.filler.sources, (run.end - run.start) as usize);
            let answer = |read: Result<&[u8], CacheError>| match read {
                Ok(bytes) => reply.send(Ok(bytes)),
                Err(error) => reply.send(Err(&sources.record_failure(error))),
            };
            match file.filler.blocks.take_buffer(BufferSize::Small) {
                Some(mut buffer) => {
                    let read = sources.read_run(source, &run, &mut buffer);
                    answer(read.map(|bytes| &buffer[bytes]).map_err(CacheError::from));
                }
                None => with_scratch(len, |scratch| {
                    let read = sources.read_part(source, run.start, scratch);
                    answer(read.map(|()| &*scratch));
                }),
            }
        };
        self.filler.sources.submit(source, FillPriority::Blocking, Box::new(read));
    }

    /// Reads a range through the page cache, segment by segment.
    fn read_by_segments(self: &Arc<Self>, range: &Range<u64>, reply: PendingReply) {
        let Some(source) = self.filler.sources.first_source(range) else { return };
        let (file, range) = (Arc::clone(self), range.clone());
        let read = move || {
            with_scratch((range.end - range.start) as usize, |scratch| {
                match file.filler.sources.read_by_segments(&range, scratch) {
                    Ok(()) => reply.send(Ok(scratch)),
                    Err(error) => reply.send(Err(&file.filler.sources.record_failure(error))),
                }
            });
        };
        self.filler.sources.submit(source, FillPriority::Blocking, Box::new(read));
    }

    /// Submits fills for what the access trace and the streams of readers expect next.
    fn prefetch(self: &Arc<Self>, request: &Range<u64>, step: StreamStep) {
        let limit = self.filler.blocks.memory_limit();
        for range in self.prefetcher.replay(limit) {
            self.prefetch_blocks(range, FillPriority::Replay);
        }
        for range in self.prefetcher.upcoming(request, step, limit) {
            self.prefetch_blocks(range, FillPriority::Prefetch);
        }
    }

    /// Submits fills for the bytes of a range that no block holds or will hold.
    fn prefetch_blocks(self: &Arc<Self>, range: Range<u64>, priority: FillPriority) {
        let ranges = plan_prefetch(self.virtual_file(), range, &self.filler.layout);
        let ids = self.filler.blocks.reserve(self.filler.file_id, &ranges);
        let mut rest = &ids[..];
        // A short range is fetched by several requests, too: a reader may be close behind.
        let max_bytes = ranges.iter().map(|range| range.bytes.end - range.bytes.start).sum::<u64>()
            / MIN_PARTS_PER_RANGE;
        while let Some(first) = rest.first() {
            let (part, after) = rest.split_at(self.part_len(rest, max_bytes));
            let (source, fills) =
                (first.source, part.iter().map(|&id| self.filler.new_fill(id, priority)));
            let fills: Vec<FillJob> = fills.collect();
            self.filler.sources.submit(source, priority, Box::new(move || FillJob::run_all(fills)));
            rest = after;
        }
    }

    /// The number of blocks from the first on that one request fills, if their source is read by parts.
    fn part_len(&self, ids: &[BlockId], max_bytes: u64) -> usize {
        let Some(&first) = ids.first() else { return 0 };
        let BlockSource::File(_) = first.source else { return 1 };
        let Some(part_bytes) = self.filler.sources.part_bytes(first.source) else { return 1 };
        // Parts in flight take a bounded share of the memory.
        let max_bytes = max_bytes
            .max(MIN_PART_BYTES)
            .min(part_bytes)
            .min(self.filler.blocks.memory_limit() / PART_MEMORY_DIVISOR);
        let follows = |two: &&[BlockId]| {
            (two[0].source, two[0].end) == (two[1].source, two[1].start)
                && two[1].end - first.start <= max_bytes
        };
        1 + ids.windows(2).take_while(follows).count()
    }
}
