//! What to fetch before it is requested, for one open virtual file.
//!
//! In: each of its reads. Out: ranges of the virtual file. Three pure state machines know them: `readahead` follows
//! the streams of readers, `predictor` the names of tensors, and `trace` the order of an earlier load.

pub mod predictor;
pub mod readahead;
pub mod trace;
mod trace_format;
pub mod trace_store;

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use crate::cache::io::source::PreferredReadahead;
use crate::threads::lock;
use crate::virtual_file::VirtualFile;

use predictor::TensorPredictor;
use readahead::{
    DeliveredRanges, ReadBounds, ReadPattern, Readahead, StreamStep, TENSOR_OVERRUN_BYTES,
};
use trace::AccessTrace;
use trace_store::{TraceHandle, TraceStore};

/// Smaller tensors are read several at once: which comes next says little.
const MIN_PREDICTED_TENSOR_BYTES: u64 = 1 << 20;

/// Maximum number of tensors that a request scans for those that were touched and not read.
const MAX_SCANNED_TENSORS: usize = 4096;

/// What is known of how an open virtual file is read.
pub struct Prefetcher {
    file: Arc<VirtualFile>,
    max_readahead_bytes: u64,
    /// Whether the next tensors are predicted: where each would cost the wait for a request.
    predicts_tensors: bool,
    readahead: Mutex<Readahead>,
    delivered: Mutex<DeliveredRanges>,
    predictor: OnceLock<Mutex<TensorPredictor>>,
    /// The order of its reads, if loads of it are remembered.
    trace: Option<Arc<TraceHandle>>,
}

impl Prefetcher {
    pub fn new(
        file: &Arc<VirtualFile>,
        traces: Option<&Arc<TraceStore>>,
        readahead: PreferredReadahead,
    ) -> Prefetcher {
        // A file that is shown as it is has no layout to know it again by.
        let traces = traces.filter(|_| !file.is_plain());
        let trace = traces.and_then(|traces| {
            Some(traces.open(file.layout_hash(), AccessTrace::new(file.size())?))
        });
        let (delivered, predictor) = Default::default();
        let file = Arc::clone(file);
        let max_readahead_bytes = readahead.max;
        let predicts_tensors = readahead.predicts_tensors;
        let readahead = Mutex::new(Readahead::new(readahead.first));
        Prefetcher {
            file,
            max_readahead_bytes,
            predicts_tensors,
            readahead,
            delivered,
            predictor,
            trace,
        }
    }

    /// Records a read for the next load.
    pub fn record(&self, range: &Range<u64>) {
        if let Some(trace) = &self.trace {
            lock(&trace.trace).record(range);
        }
    }

    /// Tells what a read is among those before it, and changes nothing.
    pub fn classify(&self, range: &Range<u64>) -> ReadPattern {
        let delivered = lock(&self.delivered);
        let mut pattern = lock(&self.readahead).classify(range, &self.bounds(range), &delivered);
        drop(delivered);
        // The reader that touched the first page of a tensor waits for it.
        pattern.is_fault_around &= !self.contains_tensor_start(range);
        pattern
    }

    /// Moves the readers' streams on by a read whose bytes are about to be delivered.
    pub fn advance(&self, range: &Range<u64>, memory_limit: u64) -> StreamStep {
        let mut delivered = lock(&self.delivered);
        let step = lock(&self.readahead).advance(
            range,
            &self.bounds(range),
            &delivered,
            self.max_readahead_bytes,
            memory_limit / 2,
        );
        delivered.record(range);
        step
    }

    /// The ranges that the earlier load went on with.
    pub fn replay(&self, memory_limit: u64) -> Vec<Range<u64>> {
        let trace = self.trace.as_ref();
        trace.map_or_else(Vec::new, |trace| {
            lock(&trace.trace).next_ranges(self.max_window(memory_limit))
        })
    }

    /// The undelivered ranges to fetch after a step: for its stream, and of the tensors that probably come next.
    pub fn upcoming(
        &self,
        request: &Range<u64>,
        step: StreamStep,
        memory_limit: u64,
    ) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        if let Some(prefetch) = step.prefetch {
            self.push_undelivered(&mut ranges, &prefetch, u64::MAX, request);
        }
        if step.enters_tensor
            && self.predicts_tensors
            && let Some(index) = self.file.tensor_at(request.start)
        {
            for (next, bytes) in self.predict_tensors(index as u32, memory_limit) {
                let next = self.file.tensor_range(next as usize);
                self.push_undelivered(&mut ranges, &next, bytes, request);
            }
        }
        if step.is_touch
            && self.predicts_tensors
            // The kernel reads around the page.
            && let Some(index) = self.file.tensor_at(request.start.saturating_add(TENSOR_OVERRUN_BYTES))
        {
            for (next, _) in self.predict_tensors(index as u32, memory_limit) {
                let start = self.file.tensor_range(next as usize).start;
                let around = start.saturating_sub(TENSOR_OVERRUN_BYTES)
                    ..(start + TENSOR_OVERRUN_BYTES).min(self.file.size());
                self.push_undelivered(&mut ranges, &around, u64::MAX, request);
            }
        }
        if step.resumes_tensor && self.predicts_tensors {
            self.push_touched_tensors(&mut ranges, request, memory_limit);
        }
        ranges
    }

    /// Adds the rest of the touched tensors, from that of the request on. A loader that comes back to one soon reads
    /// the others, and would wait for a request for each.
    fn push_touched_tensors(
        &self,
        ranges: &mut Vec<Range<u64>>,
        request: &Range<u64>,
        memory_limit: u64,
    ) {
        let Some(first) = self.file.tensor_at(request.start) else { return };
        let mut room = self.max_window(memory_limit);
        for index in (first..self.file.tensors().len()).take(MAX_SCANNED_TENSORS) {
            let tensor = self.file.tensor_range(index);
            if !lock(&self.delivered).contains(tensor.start) {
                continue;
            }
            // A reader of slices skips what lies before its request.
            let start = if index == first { request.start } else { tensor.start };
            room = self.push_undelivered(ranges, &(start..tensor.end), room, request);
            if room == 0 {
                return;
            }
        }
    }

    /// The tensors that will probably be read after one, and how much of each to fetch.
    fn predict_tensors(&self, index: u32, memory_limit: u64) -> Vec<(u32, u64)> {
        let range = |index: u32| self.file.tensor_range(index as usize);
        let is_large =
            |index: u32| range(index).end - range(index).start >= MIN_PREDICTED_TENSOR_BYTES;
        if !is_large(index) {
            return Vec::new();
        }
        let name = |index: u32| &*self.file.tensors()[index as usize].name;
        let predictor = self.predictor.get_or_init(|| {
            let all = 0..self.file.tensors().len() as u32;
            Mutex::new(TensorPredictor::new(all.filter(|&n| is_large(n)).map(|n| (n, name(n)))))
        });
        let undelivered_bytes = |index| {
            let ranges = lock(&self.delivered).undelivered(&range(index));
            ranges.into_iter().map(|range| range.end - range.start).sum()
        };
        let window = self.max_window(memory_limit);
        lock(predictor).on_tensor(index, name(index), window, undelivered_bytes)
    }

    /// Adds the first undelivered bytes of a range, at most so many, without those that the trace comes to in its turn.
    /// Returns how many more there may be.
    fn push_undelivered(
        &self,
        ranges: &mut Vec<Range<u64>>,
        range: &Range<u64>,
        max_bytes: u64,
        request: &Range<u64>,
    ) -> u64 {
        let undelivered = lock(&self.delivered).undelivered(range);
        let mut room = max_bytes;
        for Range { start, end } in undelivered {
            if room == 0 {
                break;
            }
            let range = start..end.min(start.saturating_add(room));
            room -= range.end - range.start;
            match &self.trace {
                Some(trace) => {
                    ranges.extend(lock(&trace.trace).outside_trace(range, request.start))
                }
                None => ranges.push(range),
            }
        }
        room
    }

    /// How much may be prefetched at once beside the streams: half of what those may take together.
    fn max_window(&self, memory_limit: u64) -> u64 {
        self.max_readahead_bytes.min(memory_limit / 4)
    }

    fn bounds(&self, range: &Range<u64>) -> ReadBounds {
        let tensor = self.file.tensor_at(range.start).map(|index| self.file.tensor_range(index));
        ReadBounds { tensor, file_end: self.file.size() }
    }

    fn contains_tensor_start(&self, range: &Range<u64>) -> bool {
        let last = self.file.tensor_at(range.end - 1);
        last.is_some_and(|index| self.file.tensor_range(index).start >= range.start)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::{ParseOptions, parse_bytes};

    const MIB: u64 = 1 << 20;
    const LIMIT_BYTES: u64 = 1 << 30;

    /// Eight tensors of 8 MiB.
    fn file() -> Arc<VirtualFile> {
        let tensor = |n: u64| {
            let (start, end) = (n * 8 * MIB, (n + 1) * 8 * MIB);
            format!(r#""{n}":{{"dtype":"U8","shape":[8388608],"data_offsets":[{start},{end}]}}"#)
        };
        let header = format!("{{{}}}", (0..8).map(tensor).collect::<Vec<_>>().join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + 64 * MIB as usize, 0);
        let checkpoint = parse_bytes(&bytes, Path::new("x.safetensors"), &ParseOptions::default());
        Arc::new(VirtualFile::new(checkpoint.unwrap()).unwrap())
    }

    /// The ranges to fetch after a touch of each of the first four tensors, and a read in the middle of the first.
    fn fetched_after_touches(predicts_tensors: bool) -> (Arc<VirtualFile>, Vec<Range<u64>>) {
        let file = file();
        let readahead = PreferredReadahead { first: 8 * MIB, max: 256 * MIB, predicts_tensors };
        let prefetcher = Prefetcher::new(&file, None, readahead);
        for n in 0..4 {
            let start = file.tensor_range(n).start;
            prefetcher.advance(&(start..start + 4096), LIMIT_BYTES);
        }
        let middle = file.tensor_range(0).start + 2 * MIB;
        let request = middle..middle + 4096;
        let step = prefetcher.advance(&request, LIMIT_BYTES);
        let ranges = prefetcher.upcoming(&request, step, LIMIT_BYTES);
        (file, ranges)
    }

    #[test]
    fn a_reader_that_comes_back_to_a_touched_tensor_gets_the_rest_of_all_touched_ones() {
        let (file, ranges) = fetched_after_touches(true);
        let in_tensor = |n| {
            let tensor = file.tensor_range(n);
            let within = |range: &Range<u64>| {
                range.end.min(tensor.end).saturating_sub(range.start.max(tensor.start))
            };
            ranges.iter().map(within).sum::<u64>()
        };
        assert!((6 * MIB - 4096..=6 * MIB).contains(&in_tensor(0)), "{ranges:?}");
        assert!((1..4).all(|n| in_tensor(n) >= 8 * MIB - 2 * 4096), "{ranges:?}");
        assert!((4..8).all(|n| in_tensor(n) == 0), "{ranges:?}");
        assert_eq!(fetched_after_touches(false).1, []);
    }
}
