//! One open virtual file: answers each of its reads from what is there, or has it read.
//!
//! In order: from blocks; from the sources' own page cache, copied once and kept nowhere; from the disk, into blocks
//! that later reads find. A small random read, one of too many blocks and one without a buffer keep no block. No call
//! waits for a disk: that is for the sources' executors. A block is filled once, by one thread, for all its waiters.

use std::ops::{Deref, DerefMut, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::threads::lock;
use crate::virtual_file::{VirtualFile, VirtualFileReader};

use super::ablation::is_left_out;
use super::block::id::{BlockId, BlockParts, BlockSource, FillPriority, SourceRange};
use super::block::pool::{Block, Buffer, BufferSize, with_scratch};
use super::block::reply::{PartialReply, PendingReply, ReplyCallback, Waiter};
use super::block::table::{BlockHit, BlockTable, JoinResult};
use super::counters::AtomicCounters;
use super::error::CacheError;
use super::io::source::{FileSources, block_range};
use super::plan::{ReadPlan, StridedBlocks, buffer_size, plan_prefetch, plan_read, plan_window};
use super::prefetch::Prefetcher;
use super::prefetch::readahead::{ReadPattern, StreamStep};

/// An open virtual file, shared by all its handles.
pub struct CachedFile {
    /// Tells its blocks from those of other files.
    file_id: u64,
    blocks: Arc<BlockTable>,
    sources: FileSources,
    prefetcher: Prefetcher,
    counters: Arc<AtomicCounters>,
    /// The blocks of strided tensors.
    strided: StridedBlocks,
    /// Held while a job claims the blocks of a window, so that no other job claims some of them.
    window_claims: Mutex<()>,
}

/// The memory limit from which on strided tensors have large blocks: an eighth of it at most.
const LARGE_BLOCKS_MIN_LIMIT_BYTES: u64 = 64 << 20;

/// Minimum memory limit for large conversion buffers. The threads of one disk then hold at most an eighth of it. A block that
/// is cast from float32 to bfloat16 needs 2 MiB of its source: one read, or three with a small buffer.
const LARGE_SCRATCH_MIN_LIMIT_BYTES: u64 = 256 << 20;

/// The share of the memory limit that one part may take, as its divisor: many parts are in flight.
const PART_MEMORY_DIVISOR: u64 = 64;

/// The part of the memory limit that a window of a strided tensor in a store may take. While one is read, the next is
/// fetched.
const WINDOW_MEMORY_DIVISOR: u64 = 3;

/// The part of the memory limit that the requests of a window may take.
const WINDOW_REQUEST_DIVISOR: u64 = 8;

/// Maximum requests of a window at once.
const MAX_WINDOW_REQUESTS: u64 = 16;

/// Minimum requests for one prefetched range, and the minimum bytes of each. At 30 ms and 50 MB/s, 2 MiB take 70 ms, and
/// 8 MiB take 200: too long for a reader that has just begun.
const MIN_PARTS_PER_RANGE: u64 = 4;
const MIN_PART_BYTES: u64 = 2 << 20;

impl CachedFile {
    pub(super) fn new(
        file_id: u64,
        blocks: Arc<BlockTable>,
        sources: FileSources,
        prefetcher: Prefetcher,
        counters: Arc<AtomicCounters>,
    ) -> CachedFile {
        let is_large = blocks.memory_limit() >= LARGE_BLOCKS_MIN_LIMIT_BYTES;
        let strided_size = if is_large { BufferSize::Large } else { BufferSize::Small };
        let virtual_file = sources.virtual_file();
        let max_window_bytes = blocks.memory_limit() / WINDOW_MEMORY_DIVISOR;
        let max_window_bytes = sources.reader().is_remote().then_some(max_window_bytes);
        let strided = StridedBlocks::new(strided_size, virtual_file, max_window_bytes);
        let window_claims = Mutex::default();
        CachedFile { file_id, blocks, sources, prefetcher, counters, strided, window_claims }
    }

    /// Reads the virtual file without the cache.
    pub fn reader(&self) -> &Arc<VirtualFileReader> {
        self.sources.reader()
    }

    /// The virtual file whose ranges this reads.
    pub fn virtual_file(&self) -> &Arc<VirtualFile> {
        self.sources.virtual_file()
    }

    /// Reads a range, cut at the end of the file. Never waits for a disk.
    ///
    /// `callback` is called exactly once, with all of the bytes or with the error. If everything is in memory, it is
    /// called before this returns, otherwise by another thread.
    pub fn read(self: &Arc<Self>, offset: u64, len: u32, callback: ReplyCallback) {
        let counters = &self.counters;
        let reply = PendingReply::new(callback, Arc::clone(counters));
        let end = offset.saturating_add(u64::from(len)).min(self.virtual_file().size());
        if offset >= end {
            return reply.send(Ok(&[]));
        }
        counters.reads.fetch_add(1, Relaxed);
        if let Some(error) = self.sources.permanent_error() {
            counters.refused.fetch_add(1, Relaxed);
            return reply.send(Err(error));
        }
        let range = offset..end;
        if let Some(header) = self.virtual_file().header().get(offset as usize..end as usize) {
            counters.hits.fetch_add(1, Relaxed);
            return reply.send(Ok(header));
        }
        self.prefetcher.record(&range);
        let plan = plan_read(self.virtual_file(), &range, &self.strided);
        let hits = plan.as_ref().and_then(|plan| self.blocks.lookup(self.file_id, &plan.ranges));
        let step = match (plan, hits) {
            (Some(plan), Some(hits)) => {
                counters.hits.fetch_add(1, Relaxed);
                self.answer_from_blocks(&range, plan, hits, reply);
                self.prefetcher.advance(&range, self.blocks.memory_limit())
            }
            (plan, _) => {
                let pattern = self.prefetcher.classify(&range);
                let reply = match self.sources.answer_from_page_cache(&range, reply) {
                    Ok(()) => return,
                    Err(reply) => reply,
                };
                counters.misses.fetch_add(1, Relaxed);
                let step = self.prefetcher.advance(&range, self.blocks.memory_limit());
                self.read_missing(&range, plan, pattern, reply);
                step
            }
        };
        self.prefetch(&range, step);
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
            && !self.blocks.is_any_pending(self.file_id, &plan.ranges)
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
        let remote =
            hits.iter().map(|hit| hit.id.source).find(|&of| !self.sources.is_check_immediate(of));
        let Some(remote) = remote else { return self.copy_blocks(range, &plan, &hits, reply) };
        let (file, range) = (Arc::clone(self), range.clone());
        let job = Box::new(move || file.copy_blocks(&range, &plan, &hits, reply));
        self.sources.submit(remote, FillPriority::Blocking, job);
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
                && let Err(error) = self.sources.check_unchanged(id.source)
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

    /// A buffer for the source bytes of a block that is converted: a large one if there is room beside the blocks.
    fn take_conversion_buffer(&self) -> Option<Buffer> {
        let may_be_large = self.blocks.memory_limit() >= LARGE_SCRATCH_MIN_LIMIT_BYTES;
        let large =
            may_be_large.then(|| self.blocks.take_spare_buffer(BufferSize::Large)).flatten();
        large.or_else(|| self.blocks.take_buffer(BufferSize::Small))
    }

    fn copy_in_memory(&self, plan: &ReadPlan, out: &mut [u8]) -> Result<(), Arc<CacheError>> {
        plan.in_memory.iter().try_for_each(|(reply_offset, range)| {
            let end = reply_offset + (range.end - range.start) as usize;
            self.sources.copy_in_memory(range.start, &mut out[*reply_offset..end])
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
        let joined = self.blocks.join(self.file_id, &plan.ranges, priority, direct);
        let joined = joined.or_else(|| self.wait_for_parts(range, plan, priority, reply.take()?));
        let Some(joined) = joined else { return };
        for id in joined.to_fill {
            self.fill(id, priority);
        }
        for (id, block, waiter) in joined.ready {
            if self.sources.is_check_immediate(id.source) {
                self.answer_waiter(id, &block, waiter);
            } else {
                let file = Arc::clone(self);
                let job = Box::new(move || file.answer_waiter(id, &block, waiter));
                self.sources.submit(id.source, FillPriority::Blocking, job);
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
        let Some(mut bytes) = size.and_then(|size| self.blocks.take_buffer(size)) else {
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
        let joined = self.blocks.join(self.file_id, &plan.ranges, priority, partial);
        if let Some(reply) = reply {
            self.read_by_segments(range, reply);
        }
        joined
    }

    fn answer_waiter(&self, id: BlockId, block: &Block, waiter: Waiter) {
        match self.sources.check_unchanged(id.source) {
            Ok(()) => waiter.answer(Ok(block.bytes())),
            Err(error) => waiter.answer(Err(&error)),
        }
    }

    /// Reads a small random range alone: the next one will be elsewhere.
    fn read_uncached(self: &Arc<Self>, source: BlockSource, run: Range<u64>, reply: PendingReply) {
        let file = Arc::clone(self);
        let read = move || {
            let (sources, len) = (&file.sources, (run.end - run.start) as usize);
            let answer = |read: Result<&[u8], CacheError>| match read {
                Ok(bytes) => reply.send(Ok(bytes)),
                Err(error) => reply.send(Err(&sources.record_failure(error))),
            };
            match file.blocks.take_buffer(BufferSize::Small) {
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
        self.sources.submit(source, FillPriority::Blocking, Box::new(read));
    }

    /// Reads a range through the page cache, segment by segment.
    fn read_by_segments(self: &Arc<Self>, range: &Range<u64>, reply: PendingReply) {
        let Some(source) = self.sources.first_source(range) else { return };
        let (file, range) = (Arc::clone(self), range.clone());
        let read = move || {
            with_scratch((range.end - range.start) as usize, |scratch| {
                match file.sources.read_by_segments(&range, scratch) {
                    Ok(()) => reply.send(Ok(scratch)),
                    Err(error) => reply.send(Err(&file.sources.record_failure(error))),
                }
            });
        };
        self.sources.submit(source, FillPriority::Blocking, Box::new(read));
    }

    /// Submits fills for what the access trace and the streams of readers expect next.
    fn prefetch(self: &Arc<Self>, request: &Range<u64>, step: StreamStep) {
        let limit = self.blocks.memory_limit();
        for range in self.prefetcher.replay(limit) {
            self.prefetch_blocks(range, FillPriority::Replay);
        }
        for range in self.prefetcher.upcoming(request, step, limit) {
            self.prefetch_blocks(range, FillPriority::Prefetch);
        }
    }

    /// Submits fills for the bytes of a range that no block holds or will hold.
    fn prefetch_blocks(self: &Arc<Self>, range: Range<u64>, priority: FillPriority) {
        let ranges = plan_prefetch(self.virtual_file(), range, &self.strided);
        let ids = self.blocks.reserve(self.file_id, &ranges);
        let mut rest = &ids[..];
        // A short range is fetched by several requests, too: a reader may be close behind.
        let max_bytes = ranges.iter().map(|range| range.bytes.end - range.bytes.start).sum::<u64>()
            / MIN_PARTS_PER_RANGE;
        while let Some(first) = rest.first() {
            let (part, after) = rest.split_at(self.part_len(rest, max_bytes));
            let (source, fills) =
                (first.source, part.iter().map(|&id| self.new_fill(id, priority)));
            let fills: Vec<FillJob> = fills.collect();
            self.sources.submit(source, priority, Box::new(move || FillJob::run_all(fills)));
            rest = after;
        }
    }

    /// The number of blocks from the first on that one request fills, if their source is read by parts.
    fn part_len(&self, ids: &[BlockId], max_bytes: u64) -> usize {
        let Some(&first) = ids.first() else { return 0 };
        let BlockSource::File(_) = first.source else { return 1 };
        let Some(part_bytes) = self.sources.part_bytes(first.source) else { return 1 };
        // Parts in flight take a bounded share of the memory.
        let max_bytes = max_bytes
            .max(MIN_PART_BYTES)
            .min(part_bytes)
            .min(self.blocks.memory_limit() / PART_MEMORY_DIVISOR);
        let follows = |two: &&[BlockId]| {
            (two[0].source, two[0].end) == (two[1].source, two[1].start)
                && two[1].end - first.start <= max_bytes
        };
        1 + ids.windows(2).take_while(follows).count()
    }

    fn fill(self: &Arc<Self>, id: BlockId, priority: FillPriority) {
        let fill = self.new_fill(id, priority);
        self.sources.submit(id.source, priority, Box::new(move || fill.run()));
    }

    /// A buffer for a block. A prefetch for a strided tensor in a store evicts nothing that a reader may soon need: to
    /// gather that again fetches much more.
    fn take_fill_buffer(&self, id: BlockId, priority: FillPriority) -> Option<Buffer> {
        let size = buffer_size(self.virtual_file(), id.source, &self.strided);
        let is_remote_tensor =
            matches!(id.source, BlockSource::Tensor(_)) && self.sources.reader().is_remote();
        if is_remote_tensor && priority.is_prefetch() && !self.blocks.is_requested(id) {
            self.blocks.take_unneeded_buffer(size)
        } else {
            self.blocks.take_buffer(size)
        }
    }

    fn new_fill(self: &Arc<Self>, id: BlockId, priority: FillPriority) -> FillJob {
        FillJob { file: Arc::clone(self), id, priority, state: FillState::Queued }
    }
}

impl Drop for CachedFile {
    fn drop(&mut self) {
        self.blocks.remove_file(self.file_id);
    }
}

/// Memory that a request of a window reads into.
enum WindowScratch {
    Pooled(Buffer),
    Own(Vec<u8>),
}

impl Deref for WindowScratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            WindowScratch::Pooled(buffer) => buffer,
            WindowScratch::Own(bytes) => bytes,
        }
    }
}

impl DerefMut for WindowScratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            WindowScratch::Pooled(buffer) => buffer,
            WindowScratch::Own(bytes) => bytes,
        }
    }
}

/// A block to be filled. Dropped before it is, its waiters are told.
struct FillJob {
    file: Arc<CachedFile>,
    id: BlockId,
    priority: FillPriority,
    state: FillState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FillState {
    Queued,
    /// By this job and no other.
    Claimed,
    /// Nothing waits for this job any more: a later waiter has another.
    Done,
}

impl FillJob {
    fn run(mut self) {
        if let Some(window) = self.window() {
            return self.run_window(&window);
        }
        let Some(mut buffer) = self.claim() else { return };
        let (file, id) = (Arc::clone(&self.file), self.id);
        let sources = &file.sources;
        let scratch = || file.take_conversion_buffer();
        let read = catch_unwind(AssertUnwindSafe(|| sources.read_block(id, &mut buffer, scratch)));
        match read.unwrap_or_else(|_| Err(sources.panic_error(id.source))) {
            Ok(bytes) => self.complete_with(buffer, bytes),
            Err(error) => {
                drop(buffer);
                self.complete(None, Err(&sources.record_failure(error)));
            }
        }
    }

    /// The blocks of the window that this one lies in, if they are to be filled together.
    fn window(&self) -> Option<Vec<SourceRange>> {
        let BlockSource::Tensor(index) = self.id.source else { return None };
        let CachedFile { sources, strided, .. } = &*self.file;
        plan_window(sources.virtual_file(), index, self.id.start, strided)
    }

    /// Fills the block and all others of its window, each part of a source fetched once.
    fn run_window(mut self, window: &[SourceRange]) {
        let file = Arc::clone(&self.file);
        let CachedFile { blocks, sources, .. } = &*file;
        let (mut fills, mut targets) = (Vec::new(), Vec::new());
        {
            let _claims = lock(&file.window_claims);
            let Some(buffer) = self.claim() else { return };
            let (id, priority) = (self.id, self.priority);
            fills.push(self);
            targets.push((id, buffer));
            for id in blocks.reserve_unclaimed(file.file_id, window) {
                // Without a buffer, the block is left to the reads that request it.
                let mut fill = file.new_fill(id, FillPriority::Prefetch);
                let Some(buffer) = file.take_fill_buffer(id, priority) else { continue };
                if blocks.claim(id) {
                    fill.state = FillState::Claimed;
                    fills.push(fill);
                    targets.push((id, buffer));
                }
            }
        }
        let requests = blocks.memory_limit() / WINDOW_REQUEST_DIVISOR;
        let requests = requests / BufferSize::Large.bytes() as u64;
        let requests = requests.clamp(1, MAX_WINDOW_REQUESTS) as usize;
        let scratch = |len| match blocks.take_buffer(BufferSize::Large) {
            Some(buffer) => WindowScratch::Pooled(buffer),
            None => WindowScratch::Own(vec![0; len]),
        };
        FillJob::complete_all(fills, targets, |targets| {
            sources.read_window(targets, requests, scratch)
        });
    }

    /// Fills adjacent blocks by one request, except those that another job has filled meanwhile.
    fn run_all(fills: Vec<FillJob>) {
        if fills.len() == 1 {
            return fills.into_iter().for_each(FillJob::run);
        }
        let mut claimed: Vec<(FillJob, Buffer)> = Vec::new();
        for mut fill in fills {
            if claimed.last().is_some_and(|(last, _)| last.id.end != fill.id.start) {
                FillJob::run_claimed(std::mem::take(&mut claimed));
            }
            if let Some(buffer) = fill.claim() {
                claimed.push((fill, buffer));
            }
        }
        FillJob::run_claimed(claimed);
    }

    fn run_claimed(claimed: Vec<(FillJob, Buffer)>) {
        let Some((first, _)) = claimed.first() else { return };
        let file = Arc::clone(&first.file);
        let (fills, targets) = claimed
            .into_iter()
            .map(|(fill, buffer)| {
                let id = fill.id;
                (fill, (id, buffer))
            })
            .unzip();
        FillJob::complete_all(fills, targets, |targets| file.sources.read_adjacent(targets));
    }

    /// Has `read` fill the blocks of some jobs, and tells their waiters.
    fn complete_all(
        fills: Vec<FillJob>,
        mut targets: Vec<(BlockId, Buffer)>,
        read: impl FnOnce(&mut [(BlockId, Buffer)]) -> Result<(), CacheError>,
    ) {
        let Some(first) = fills.first() else { return };
        let (file, source) = (Arc::clone(&first.file), first.id.source);
        let read = catch_unwind(AssertUnwindSafe(|| read(&mut targets)));
        match read.unwrap_or_else(|_| Err(file.sources.panic_error(source))) {
            Ok(()) => {
                for (mut fill, (id, buffer)) in fills.into_iter().zip(targets) {
                    fill.complete_with(buffer, block_range(id));
                }
            }
            Err(error) => {
                drop(targets);
                let error = file.sources.record_failure(error);
                fills.into_iter().for_each(|mut fill| fill.complete(None, Err(&error)));
            }
        }
    }

    /// Makes this the job that fills the block, and takes a buffer for it; `None` if there is nothing more to do.
    fn claim(&mut self) -> Option<Buffer> {
        let (file, id) = (Arc::clone(&self.file), self.id);
        let CachedFile { blocks, sources, .. } = &*file;
        // Reads of what the page cache has are answered from there.
        if self.priority.is_prefetch() && !blocks.is_requested(id) && sources.is_in_page_cache(id) {
            return None;
        }
        if !blocks.claim(id) {
            self.state = FillState::Done;
            return None;
        }
        self.state = FillState::Claimed;
        let buffer = file.take_fill_buffer(id, self.priority);
        if buffer.is_none() {
            self.run_without_buffer();
        }
        buffer
    }

    fn complete_with(&mut self, buffer: Buffer, bytes: Range<usize>) {
        let block = Arc::new(Block::new(buffer, bytes));
        self.complete(Some(&block), Ok(block.bytes()));
        drop(block);
        self.file.blocks.shrink_to_limit();
    }

    fn complete(&mut self, block: Option<&Arc<Block>>, bytes: Result<&[u8], &CacheError>) {
        self.state = FillState::Done;
        let waiters = self.file.blocks.complete(self.id, block);
        if self.priority == FillPriority::Replay && block.is_some() && waiters.is_empty() {
            self.file.counters.replayed.fetch_add(1, Relaxed);
        }
        for waiter in waiters {
            waiter.answer(bytes);
        }
    }

    /// Every buffer is being filled or copied: a prefetch is dropped, and each waiter gets its own bytes and no more.
    fn run_without_buffer(&mut self) {
        self.state = FillState::Done;
        for waiter in self.file.blocks.complete(self.id, None) {
            let read = || self.answer_without_block(waiter);
            // Its reply was sent as it was dropped.
            drop(catch_unwind(AssertUnwindSafe(read)));
        }
    }

    fn answer_without_block(&self, waiter: Waiter) {
        let (sources, id) = (&self.file.sources, self.id);
        with_scratch(waiter.byte_count() as usize, |scratch| {
            let mut read = Ok(());
            let waiter = waiter.compacted(|bytes, at| {
                let out = &mut scratch[at..at + bytes.len()];
                if read.is_ok() {
                    read = sources.read_part(id.source, id.start + bytes.start as u64, out);
                }
            });
            match read {
                Ok(()) => waiter.answer(Ok(scratch)),
                Err(error) => waiter.answer(Err(&sources.record_failure(error))),
            }
        });
    }
}

impl Drop for FillJob {
    fn drop(&mut self) {
        let blocks = &self.file.blocks;
        let waiters = match self.state {
            FillState::Queued => blocks.cancel(self.id, self.priority.is_prefetch()),
            FillState::Claimed => blocks.complete(self.id, None),
            FillState::Done => return,
        };
        drop(waiters);
    }
}
