//! What is fetched before it is asked for: what `readahead` says of the streams that readers are, the tensors that come
//! next by `tensor_predictor`, and what the load before went on with by `access_trace`.
//!
//! In: each read of an open virtual file. Out: blocks that are about to be filled.

pub mod chunk_map;
pub mod delivered;
pub mod predictor;
pub mod readahead;
pub mod trace;
pub mod trace_format;
pub mod trace_store;

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use crate::threads::lock;
use crate::virtual_file::VirtualFile;

use crate::cache::Cache;
use crate::cache::block::fill;
use crate::cache::block::fill::FillPriority;
use crate::cache::file::CachedFile;
use crate::cache::prefetch::delivered::DeliveredRanges;
use crate::cache::prefetch::predictor::TensorPredictor;
use crate::cache::prefetch::readahead::{ReadBounds, ReadPattern, Readahead};
use crate::cache::prefetch::trace::AccessTrace;
use crate::cache::prefetch::trace_store::TraceHandle;

/// A tensor of less comes with others in one read: which one comes next says little.
const MIN_PREDICTED_TENSOR_BYTES: u64 = 1 << 20;

/// What is known of how an open virtual file is read.
pub(super) struct Prefetcher {
    readahead: Mutex<Readahead>,
    delivered: Mutex<DeliveredRanges>,
    predictor: OnceLock<Mutex<TensorPredictor>>,
    /// In which order it is read, if that is remembered.
    trace: Option<Arc<TraceHandle>>,
}

impl Prefetcher {
    pub(super) fn new(cache: &Cache, virtual_file: &VirtualFile) -> Prefetcher {
        // A file as it is has no layout that would be known again.
        let orders = cache.traces.as_ref().filter(|_| !virtual_file.is_plain());
        let kept = orders.and_then(|orders| {
            Some(orders.open(virtual_file.layout_hash(), AccessTrace::new(virtual_file.size())?))
        });
        let (planner, given, course) = Default::default();
        Prefetcher { readahead: planner, delivered: given, predictor: course, trace: kept }
    }

    /// Takes note of a read, for the load after this one.
    pub(super) fn record(&self, range: &Range<u64>) {
        if let Some(kept) = &self.trace {
            lock(&kept.trace).record(range);
        }
    }
}

impl CachedFile {
    /// What a read turns out to be among those before it.
    pub(super) fn classify(&self, range: &Range<u64>) -> ReadPattern {
        let mut given = lock(&self.prefetcher.delivered);
        let (_, limit) = self.cache.blocks.pool.held_and_limit();
        let virtual_file = self.virtual_file();
        let tensor =
            virtual_file.tensor_at(range.start).map(|place| virtual_file.tensor_range(place));
        let ends = ReadBounds { tensor, file_end: virtual_file.size() };
        let seen = lock(&self.prefetcher.readahead).classify(
            range,
            ends,
            &given,
            self.cache.readahead_bytes,
            limit / 2,
        );
        given.record(range);
        seen
    }

    /// Whether the first page of a tensor is in it.
    pub(super) fn contains_tensor_start(&self, range: &Range<u64>) -> bool {
        let last = self.virtual_file().tensor_at(range.end - 1);
        last.is_some_and(|place| self.virtual_file().tensor_range(place).start >= range.start)
    }

    /// Has fetched what the load before went on with.
    pub(super) fn prefetch_trace(self: &Arc<Self>) {
        let Some(kept) = &self.prefetcher.trace else { return };
        let ahead = lock(&kept.trace).next_ranges(self.max_window());
        ahead
            .into_iter()
            .for_each(|range| self.prefetch_blocks(range, &(0..0), FillPriority::Replay));
    }

    /// Has fetched what will probably be read next.
    pub(super) fn prefetch(self: &Arc<Self>, range: &Range<u64>, seen: ReadPattern) {
        if let Some(ahead) = seen.prefetch {
            self.prefetch_undelivered(&ahead, u64::MAX, range);
        }
        if seen.enters_tensor
            && let Some(place) = self.virtual_file().tensor_at(range.start)
        {
            for (next, bytes) in self.predict_tensors(place as u32) {
                let next = self.virtual_file().tensor_range(next as usize);
                self.prefetch_undelivered(&next, bytes, range);
            }
        }
    }

    /// The tensors that will probably be read after one, and how much of each to fetch.
    fn predict_tensors(&self, place: u32) -> Vec<(u32, u64)> {
        let virtual_file = self.virtual_file();
        let range = |place: u32| virtual_file.tensor_range(place as usize);
        let is_large =
            |place: u32| range(place).end - range(place).start >= MIN_PREDICTED_TENSOR_BYTES;
        if !is_large(place) {
            return Vec::new();
        }
        let name = |place: u32| &*virtual_file.tensors()[place as usize].name;
        let course = self.prefetcher.predictor.get_or_init(|| {
            let all = 0..virtual_file.tensors().len() as u32;
            Mutex::new(TensorPredictor::new(all.filter(|&n| is_large(n)).map(|n| (n, name(n)))))
        });
        let left = |place| {
            let left = lock(&self.prefetcher.delivered).undelivered(&range(place));
            left.into_iter().map(|left| left.end - left.start).sum()
        };
        lock(course).on_tensor(place, name(place), self.max_window(), left)
    }

    /// What may be fetched ahead otherwise than for streams: half of what those may take together, which go on beside it.
    fn max_window(&self) -> u64 {
        let (_, limit) = self.cache.blocks.pool.held_and_limit();
        self.cache.readahead_bytes.min(limit / 4)
    }

    /// Has fetched so many bytes at the most of what was not given of a range, as is expected to be asked for by who
    /// asked for another.
    fn prefetch_undelivered(self: &Arc<Self>, range: &Range<u64>, most: u64, asked: &Range<u64>) {
        let left = lock(&self.prefetcher.delivered).undelivered(range);
        let mut room = most;
        for left in left {
            if room == 0 {
                break;
            }
            let left = left.start..left.end.min(left.start.saturating_add(room));
            room -= left.end - left.start;
            let left = match &self.prefetcher.trace {
                Some(kept) => lock(&kept.trace).outside_trace(left, asked.start),
                None => vec![left],
            };
            left.into_iter()
                .for_each(|range| self.prefetch_blocks(range, asked, FillPriority::Prefetch));
        }
    }

    /// Has filled what no block has of a range, nor is about to.
    fn prefetch_blocks(self: &Arc<Self>, range: Range<u64>, asked: &Range<u64>, why: FillPriority) {
        let new = self.cache.blocks.reserve(self.file_id, &self.plan_prefetch(range, asked));
        new.into_iter().for_each(|id| fill::schedule(self, id, why));
    }
}
