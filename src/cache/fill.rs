//! Fills the blocks of one open virtual file, each once, by one thread, for all its waiters.
//!
//! Blocks of a strided tensor in a store are filled by windows: a part of a window fetches nearly as much as the whole.

use std::ops::{Deref, DerefMut, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::threads::lock;
use crate::virtual_file::VirtualFile;

use super::block::id::{BlockId, BlockSource, FillPriority, SourceRange};
use super::block::pool::{Block, Buffer, BufferSize, with_scratch};
use super::block::reply::Waiter;
use super::block::table::BlockTable;
use super::counters::AtomicCounters;
use super::error::CacheError;
use super::io::source::{FileSources, block_range};
use super::plan::{BlockLayout, buffer_size, is_strided, plan_window};

/// The memory limit from which on strided tensors have large blocks: an eighth of it at most.
const LARGE_BLOCKS_MIN_LIMIT_BYTES: u64 = 64 << 20;

/// Minimum memory limit for large conversion buffers. The threads of one disk then hold at most an eighth of it. A block that
/// is cast from float32 to bfloat16 needs 2 MiB of its source: one read, or three with a small buffer.
const LARGE_SCRATCH_MIN_LIMIT_BYTES: u64 = 256 << 20;

/// The part of the memory limit that a window of a strided tensor in a store may take. The next window is
/// fetched while one is read.
const WINDOW_MEMORY_DIVISOR: u64 = 3;

/// The part of the memory limit that the requests of a window may take.
const WINDOW_REQUEST_DIVISOR: u64 = 4;

/// Maximum requests of a window at once.
const MAX_WINDOW_REQUESTS: u64 = 16;

/// The blocks of an open virtual file, and the sources that they are filled from.
pub struct BlockFiller {
    /// Tells its blocks from those of other files.
    pub file_id: u64,
    pub blocks: Arc<BlockTable>,
    pub sources: FileSources,
    pub counters: Arc<AtomicCounters>,
    pub layout: BlockLayout,
    /// Held while a job claims the blocks of a window, so that no other job claims some of them.
    window_claims: Mutex<()>,
}

impl BlockFiller {
    pub fn new(
        file_id: u64,
        blocks: Arc<BlockTable>,
        sources: FileSources,
        counters: Arc<AtomicCounters>,
    ) -> BlockFiller {
        let is_large = blocks.memory_limit() >= LARGE_BLOCKS_MIN_LIMIT_BYTES;
        let strided_size = if is_large { BufferSize::Large } else { BufferSize::Small };
        let virtual_file = sources.virtual_file();
        let max_window_bytes = blocks.memory_limit() / WINDOW_MEMORY_DIVISOR;
        let max_window_bytes = sources.reader().is_remote().then_some(max_window_bytes);
        let layout = BlockLayout::new(strided_size, virtual_file, max_window_bytes);
        let window_claims = Mutex::default();
        BlockFiller { file_id, blocks, sources, counters, layout, window_claims }
    }

    fn virtual_file(&self) -> &Arc<VirtualFile> {
        self.sources.virtual_file()
    }

    /// Submits a fill of a block.
    pub fn fill(self: &Arc<Self>, id: BlockId, priority: FillPriority) {
        let fill = self.new_fill(id, priority);
        self.sources.submit(id.source, priority, Box::new(move || fill.run()));
    }

    /// Whether a block is of a strided tensor in a store: to gather it again may fetch much more than its bytes.
    fn is_strided_in_store(&self, id: BlockId) -> bool {
        self.sources.reader().is_remote() && is_strided(self.virtual_file(), id.source)
    }

    /// A job that fills a block.
    pub fn new_fill(self: &Arc<Self>, id: BlockId, priority: FillPriority) -> FillJob {
        FillJob { file: Arc::clone(self), id, priority, state: FillState::Queued }
    }

    /// A buffer for the source bytes of a block that is converted: a large one if there is room beside the blocks.
    fn take_conversion_buffer(&self) -> Option<Buffer> {
        let may_be_large = self.blocks.memory_limit() >= LARGE_SCRATCH_MIN_LIMIT_BYTES;
        let large =
            may_be_large.then(|| self.blocks.take_spare_buffer(BufferSize::Large)).flatten();
        large.or_else(|| self.blocks.take_buffer(BufferSize::Small))
    }
}

impl Drop for BlockFiller {
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

/// Blocks that are to be filled together, with their buffers.
type ClaimedWindow = (Vec<FillJob>, Vec<(BlockId, Buffer)>);

/// A block to be filled. Dropped before it is, its waiters are told.
pub struct FillJob {
    file: Arc<BlockFiller>,
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
    /// Fills the block, or the window that it lies in.
    pub fn run(mut self) {
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
        let BlockFiller { sources, layout, .. } = &*self.file;
        plan_window(sources.virtual_file(), index, self.id.start, layout)
    }

    /// Fills the block and all others of its window, each part of a source fetched once.
    fn run_window(self, window: &[SourceRange]) {
        let file = Arc::clone(&self.file);
        let blocks = &file.blocks;
        let requests = blocks.memory_limit() / WINDOW_REQUEST_DIVISOR;
        let requests = requests / BufferSize::Large.bytes() as u64;
        let requests = requests.clamp(1, MAX_WINDOW_REQUESTS) as usize;
        let claimed = if self.is_needed() {
            self.claim_needed_window(window).map(|window| (window, Vec::new()))
        } else {
            self.claim_spare_window(window, requests)
        };
        let Some(((fills, targets), scratch)) = claimed else { return };
        let requests = if scratch.is_empty() { requests } else { scratch.len() };
        let scratch = Mutex::new(scratch);
        let new_scratch = |len| {
            let taken = lock(&scratch).pop();
            match taken.or_else(|| blocks.take_buffer(BufferSize::Large)) {
                Some(buffer) => WindowScratch::Pooled(buffer),
                None => WindowScratch::Own(vec![0; len]),
            }
        };
        FillJob::complete_all(fills, targets, |targets| {
            file.sources.read_window(targets, requests, new_scratch)
        });
    }

    /// Claims the blocks of a window that a reader waits for, and takes their buffers from other blocks if it must.
    fn claim_needed_window(mut self, window: &[SourceRange]) -> Option<ClaimedWindow> {
        let file = Arc::clone(&self.file);
        let BlockFiller { blocks, layout, .. } = &*file;
        let claims = lock(&file.window_claims);
        let id = self.id;
        if !blocks.claim(id) {
            self.state = FillState::Done;
            return None;
        }
        self.state = FillState::Claimed;
        let Some(buffer) = blocks.take_buffer(layout.strided_size) else {
            drop(claims);
            self.run_without_buffer();
            return None;
        };
        let mut claimed = (vec![self], vec![(id, buffer)]);
        for id in blocks.reserve_unclaimed(file.file_id, window) {
            // Without a buffer, the block is left to the reads that request it.
            let fill = file.new_fill(id, FillPriority::Prefetch);
            let Some(buffer) = blocks.take_buffer(layout.strided_size) else { continue };
            fill.push_claimed(buffer, &mut claimed);
        }
        Some(claimed)
    }

    /// Claims the blocks of a window that no read has requested, with memory for its requests. `None` if not all of that
    /// fits beside what readers may still need: a part of a window fetches nearly as much as the whole.
    fn claim_spare_window(
        mut self,
        window: &[SourceRange],
        max_requests: usize,
    ) -> Option<(ClaimedWindow, Vec<Buffer>)> {
        let file = Arc::clone(&self.file);
        let BlockFiller { blocks, layout, .. } = &*file;
        let _claims = lock(&file.window_claims);
        if !blocks.is_unclaimed(self.id) {
            self.state = FillState::Done;
            return None;
        }
        let ids = blocks.reserve_unclaimed(file.file_id, window);
        // Those that are dropped leave their blocks to the reads that request them.
        let others = ids.into_iter().filter(|&id| id != self.id);
        let others: Vec<FillJob> =
            others.map(|id| file.new_fill(id, FillPriority::Prefetch)).collect();
        let fills: Vec<FillJob> = std::iter::once(self).chain(others).collect();
        let take = |size| blocks.take_unneeded_buffer(size);
        let buffers: Option<Vec<Buffer>> =
            fills.iter().map(|_| take(layout.strided_size)).collect();
        let buffers = buffers?;
        let scratch = std::iter::from_fn(|| take(BufferSize::Large));
        let scratch: Vec<Buffer> = scratch.take(max_requests).collect();
        if scratch.is_empty() {
            return None;
        }
        let mut claimed = ClaimedWindow::default();
        for (fill, buffer) in fills.into_iter().zip(buffers) {
            fill.push_claimed(buffer, &mut claimed);
        }
        Some((claimed, scratch))
    }

    /// Claims the block and adds it to a window, unless another job has claimed it.
    fn push_claimed(mut self, buffer: Buffer, (fills, targets): &mut ClaimedWindow) {
        if self.file.blocks.claim(self.id) {
            self.state = FillState::Claimed;
            targets.push((self.id, buffer));
            fills.push(self);
        }
    }

    /// Fills adjacent blocks by one request, except those that another job has filled meanwhile.
    pub fn run_all(fills: Vec<FillJob>) {
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

    /// Whether a read has requested the block.
    fn is_needed(&self) -> bool {
        !self.priority.is_prefetch() || self.file.blocks.is_requested(self.id)
    }

    /// Makes this the job that fills the block, and takes a buffer for it; `None` if there is nothing more to do.
    fn claim(&mut self) -> Option<Buffer> {
        let (file, id) = (Arc::clone(&self.file), self.id);
        let BlockFiller { blocks, sources, .. } = &*file;
        let is_needed = self.is_needed();
        // Reads of what the page cache has are answered from there.
        if !is_needed && sources.is_in_page_cache(id) {
            return None;
        }
        let size = buffer_size(file.virtual_file(), id.source, &file.layout);
        let spare = match !is_needed && file.is_strided_in_store(id) {
            true => Some(blocks.take_unneeded_buffer(size)?),
            false => None,
        };
        if !blocks.claim(id) {
            self.state = FillState::Done;
            return None;
        }
        self.state = FillState::Claimed;
        let buffer = spare.or_else(|| blocks.take_buffer(size));
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
