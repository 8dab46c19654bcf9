//! How far to read ahead of the streams of readers.
//!
//! In: each read of one virtual file, the tensor that it begins in, and what was delivered before. Out: what the read
//! is among those before it, and the range to fetch ahead. A pure state machine: it reads nothing, knows no clock and
//! cannot fail.
//!
//! Reads that follow one another closely are a stream. Real loaders have several at once, from several threads. Before
//! them they touch the first page of every tensor, which is hundreds of random reads. So a random read fetches nothing
//! ahead, and a stream earns its window. Each time half of its fetched bytes are used up, the window doubles.
//!
//! Loaders take tensors in the order of their names, or of their own, which is seldom that of the file. So a stream
//! that began in a tensor fetches little more than that tensor, until it is seen to continue behind it.
//!
//! Delivered ranges are not fetched again: a stream continues at the next undelivered byte.
//!
//! What the kernel reads around a touched page looks like the first steps of a stream. Where readers only touch pages,
//! what lies further is fetched once a reader continues to it.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use crate::cache::ablation::is_left_out;

/// Streams told apart at once. A loader uses no more threads than this to read one file.
const MAX_STREAMS: usize = 8;

/// How far behind the end of its stream a read may begin. The kernel reads around a page fault, in requests that
/// overtake one another.
const MAX_BACKWARD_BYTES: u64 = 1 << 20;

/// How far beyond the end of its stream a read may begin. A reader that skips more has jumped, even to where the
/// stream was fetched ahead.
const MAX_SKIP_BYTES: u64 = 4 << 20;

/// Bounds both as a multiple of the read's length. The kernel makes small requests for what it reads close by, and a
/// reader of small scattered ranges needs nothing of what lies between.
const MAX_SKIP_RATIO: u64 = 16;

/// What the kernel reads around a touched page, at most. A stream that got no further only touched the page.
const FAULT_AROUND_BYTES: u64 = 8 << 20;

/// Number of latest streams remembered, and how many of them must have only touched a page for readers to count as
/// touching. A new file starts as touching: to fetch for nothing costs more than to wait once.
const TOUCH_HISTORY_STREAMS: u32 = 8;
const MIN_TOUCHED_STREAMS: u32 = 3;

/// How far behind the end of its tensor a stream fetches. The kernel reads as far: around a page fault it requests as
/// much as it may read ahead.
pub const TENSOR_OVERRUN_BYTES: u64 = 4 << 20;

/// Reads after which a stream that made none of them is over. Its share of the memory goes to the others.
const STREAM_EXPIRY_READS: u64 = 512;

/// How much further the kernel may read before a touched page than behind it.
const FAULT_SLACK_BYTES: u64 = 64 << 10;

/// What a read is among those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadPattern {
    /// No stream leads to it.
    pub is_random: bool,
    /// It may be what the kernel reads around the touched first page of a tensor. No reader waits for it yet, unless
    /// that page is in it.
    pub is_fault_around: bool,
}

/// What a stream does at a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamStep {
    /// The range to fetch ahead, if any.
    pub prefetch: Option<Range<u64>>,
    /// The read is the stream's first in its tensor, and the reader does more than to touch pages.
    pub enters_tensor: bool,
    /// The reader has begun elsewhere, and may do no more than to touch a page there.
    pub is_touch: bool,
    /// The reader has come back to the rest of a tensor that was touched before.
    pub resumes_tensor: bool,
}

/// What a stream stops at.
#[derive(Clone, Debug)]
pub struct ReadBounds {
    /// The tensor that the read begins in, if any.
    pub tensor: Option<Range<u64>>,
    pub file_end: u64,
}

/// The streams of one virtual file.
#[derive(Debug)]
pub struct Readahead {
    /// The first window of a stream.
    first_window: u64,
    streams: Vec<ReadStream>,
    read_count: u64,
    /// A bit for each of the latest streams that are over: whether it only touched a page.
    touch_history: u32,
}

#[derive(Debug)]
struct ReadStream {
    start: u64,
    /// The end of its furthest read.
    end: u64,
    /// The end of what was fetched for it.
    prefetched_end: u64,
    window: u64,
    /// Where it stops fetching, until a read passes this.
    bound: u64,
    /// Where it stops fetching after that.
    next_bound: u64,
    /// The number of its latest read.
    last_read: u64,
    /// It began so near before a tensor that it may be what the kernel reads around that tensor's first page.
    is_near_tensor: bool,
    /// The start of the furthest tensor that it entered.
    entered_tensor: Option<u64>,
}

impl Readahead {
    /// The streams of a file before its first read.
    pub fn new(first_window: u64) -> Readahead {
        let touch_history = (1 << TOUCH_HISTORY_STREAMS) - 1;
        Readahead { first_window, streams: Vec::new(), read_count: 0, touch_history }
    }

    /// Tells what a read is among those before it, and changes nothing.
    pub fn classify(
        &self,
        range: &Range<u64>,
        bounds: &ReadBounds,
        delivered: &DeliveredRanges,
    ) -> ReadPattern {
        match self.find_stream(range, delivered) {
            Some(n) => {
                let stream = &self.streams[n];
                let is_fault_around = stream.is_fault_around(stream.end.max(range.end));
                ReadPattern { is_random: false, is_fault_around }
            }
            None => {
                let stream = self.new_stream(range, bounds);
                let is_fault_around = stream.is_fault_around(stream.end);
                ReadPattern { is_random: true, is_fault_around }
            }
        }
    }

    /// Moves the stream of a read on, with what was delivered before the read. `max_window` bounds the bytes fetched
    /// ahead for one stream, and `max_total` those for all together.
    pub fn advance(
        &mut self,
        range: &Range<u64>,
        bounds: &ReadBounds,
        delivered: &DeliveredRanges,
        max_window: u64,
        max_total: u64,
    ) -> StreamStep {
        self.read_count += 1;
        let now = self.read_count;
        let (n, is_random) = match self.find_stream(range, delivered) {
            Some(n) => (n, false),
            None => (self.start_stream(range, bounds), true),
        };
        let is_touching = self.is_touching();
        let resumes_tensor = is_random && is_rest_of_touched(range, bounds, delivered);
        let is_alive = |stream: &&ReadStream| {
            stream.window > 0 && stream.last_read + STREAM_EXPIRY_READS > now
        };
        let share = max_total / (self.streams.iter().filter(is_alive).count().max(1) as u64);
        let first_window = self.first_window;
        let stream = &mut self.streams[n];
        stream.last_read = now;
        let enters_tensor = stream.enter_tensor(bounds, is_touching);
        let prefetch = match is_random {
            true => None,
            false => {
                let windows = first_window..=max_window.min(share);
                stream.advance(range, delivered, windows, bounds.file_end)
            }
        };
        let is_touch = is_random && is_touching && !resumes_tensor;
        StreamStep { prefetch, enters_tensor, is_touch, resumes_tensor }
    }

    /// Whether readers only touch pages, as far as is known.
    fn is_touching(&self) -> bool {
        self.touch_history.count_ones() >= MIN_TOUCHED_STREAMS && !is_left_out("touches")
    }

    /// The stream that a read belongs to: the nearest, and of several the one read last.
    fn find_stream(&self, range: &Range<u64>, delivered: &DeliveredRanges) -> Option<usize> {
        let max_skip = (range.end - range.start).saturating_mul(MAX_SKIP_RATIO);
        let near = |(n, stream): (usize, &ReadStream)| {
            let next = delivered.next_undelivered(stream.end).max(stream.end);
            let is_near = range.end + MAX_BACKWARD_BYTES.min(max_skip) >= stream.end
                && range.start <= next + MAX_SKIP_BYTES.min(max_skip);
            let distance = stream.end.abs_diff(range.start).min(next.abs_diff(range.start));
            is_near.then_some((distance, Reverse(stream.last_read), n))
        };
        self.streams.iter().enumerate().filter_map(near).min().map(|(.., n)| n)
    }

    /// Starts a stream with a read, in the place of the oldest if there are enough.
    fn start_stream(&mut self, range: &Range<u64>, bounds: &ReadBounds) -> usize {
        let stream = self.new_stream(range, bounds);
        if self.streams.len() < MAX_STREAMS {
            self.streams.push(stream);
            return self.streams.len() - 1;
        }
        let oldest =
            (0..MAX_STREAMS).min_by_key(|&n| self.streams[n].last_read).unwrap_or_default();
        let has_only_touched = u32::from(!self.streams[oldest].is_sequential());
        self.touch_history =
            (self.touch_history << 1 | has_only_touched) & ((1 << TOUCH_HISTORY_STREAMS) - 1);
        self.streams[oldest] = stream;
        oldest
    }

    fn new_stream(&self, range: &Range<u64>, bounds: &ReadBounds) -> ReadStream {
        let (start, end) = (range.start, range.end);
        let tensor = bounds.tensor.as_ref();
        // What lies before the first tensor is read from the start of the file: all of it will be read.
        let tensor = tensor.filter(|_| !is_left_out("bounds"));
        let tensor_bound = tensor.map_or(u64::MAX, |t| t.end.saturating_add(TENSOR_OVERRUN_BYTES));
        let may_touch = tensor.is_some() && self.is_touching();
        let (bound, next_bound) = if may_touch {
            ((start + FAULT_AROUND_BYTES).min(tensor_bound), tensor_bound)
        } else {
            (tensor_bound, u64::MAX)
        };
        let begins_near =
            |tensor: &Range<u64>| tensor.start == start || tensor.end < start + FAULT_AROUND_BYTES;
        ReadStream {
            start,
            end,
            prefetched_end: end,
            window: 0,
            bound,
            next_bound,
            last_read: self.read_count,
            is_near_tensor: may_touch && tensor.is_some_and(begins_near),
            entered_tensor: None,
        }
    }
}

impl ReadStream {
    /// Moves on to a read, and returns what to fetch then: at most a window ahead, the first of which is the smallest.
    fn advance(
        &mut self,
        range: &Range<u64>,
        delivered: &DeliveredRanges,
        windows: RangeInclusive<u64>,
        file_end: u64,
    ) -> Option<Range<u64>> {
        if range.end <= self.end {
            return None;
        }
        self.end = range.end;
        while self.end > self.bound {
            self.bound = std::mem::replace(&mut self.next_bound, u64::MAX);
        }
        if self.prefetched_end > delivered.skip_undelivered(self.end, self.window / 2) {
            return None;
        }
        self.window = (self.window * 2).max(*windows.start()).min(*windows.end());
        let end = delivered.skip_undelivered(self.end, self.window).min(self.bound).min(file_end);
        let prefetch = self.prefetched_end.max(self.end)..end;
        self.prefetched_end = self.prefetched_end.max(prefetch.end);
        (!prefetch.is_empty()).then_some(prefetch)
    }

    /// Whether it did more than to touch a page.
    fn is_sequential(&self) -> bool {
        self.is_sequential_to(self.end)
    }

    fn is_sequential_to(&self, end: u64) -> bool {
        end > self.start + FAULT_AROUND_BYTES
    }

    /// Whether what it has read to this end may be what the kernel reads around a touched page.
    fn is_fault_around(&self, end: u64) -> bool {
        self.is_near_tensor && !self.is_sequential_to(end)
    }

    /// Whether it enters a tensor with this read.
    fn enter_tensor(&mut self, bounds: &ReadBounds, is_touching: bool) -> bool {
        let Some(tensor) = &bounds.tensor else { return false };
        let may_enter = !is_touching || self.is_sequential();
        let enters = may_enter && self.entered_tensor.is_none_or(|start| start < tensor.start);
        if enters {
            self.entered_tensor = Some(tensor.start);
        }
        enters
    }
}

/// Whether a read is of the rest of a tensor whose beginning was delivered. What the kernel reads around the first page of
/// the next tensor does not count.
fn is_rest_of_touched(
    range: &Range<u64>,
    bounds: &ReadBounds,
    delivered: &DeliveredRanges,
) -> bool {
    let Some(tensor) = &bounds.tensor else { return false };
    range.start > tensor.start
        && delivered.contains(tensor.start)
        && (is_far_from_next(range.start, tensor) || delivered.contains(tensor.end))
}

/// Whether a read that begins here lies before what the kernel reads around the first page of the next tensor.
fn is_far_from_next(start: u64, tensor: &Range<u64>) -> bool {
    start + TENSOR_OVERRUN_BYTES + FAULT_SLACK_BYTES < tensor.end
}

/// Two delivered ranges are merged over a smaller gap: it is not worth fetching.
const MIN_GAP_BYTES: u64 = 64 << 10;

/// The most ranges, half a mebibyte of memory. Of a file that is read in more places, later ranges are not recorded.
const MAX_RANGE_COUNT: usize = 1 << 14;

/// How much is read again, with nothing new between, before that shows that the kernel keeps nothing. It drops some
/// pages of every load, where memory is short or what fits is fragmented: their being read again shows nothing.
const REREAD_RESET_BYTES: u64 = 16 << 20;

/// The ranges of a virtual file that were delivered to its readers. The kernel's page cache keeps them, so they are not
/// prefetched again.
#[derive(Debug, Default)]
pub struct DeliveredRanges {
    /// The end of each range by its start. Gaps are of at least [`MIN_GAP_BYTES`].
    ranges: BTreeMap<u64, u64>,
    /// Bytes that were read again, less those that were delivered since for the first time.
    reread_bytes: u64,
}

impl DeliveredRanges {
    /// Records a read. If much is read again, the kernel has not kept it: then nothing is known of the rest either.
    pub fn record(&mut self, range: &Range<u64>) {
        if is_left_out("delivered") {
            return;
        }
        let bytes = range.end - range.start;
        if self.range_at(range.start).is_some_and(|known| known.end >= range.end) {
            self.reread_bytes += bytes;
            if self.reread_bytes < REREAD_RESET_BYTES {
                return;
            }
            (self.ranges, self.reread_bytes) = Default::default();
        } else {
            self.reread_bytes = self.reread_bytes.saturating_sub(bytes);
        }
        let max_gap = MIN_GAP_BYTES - 1;
        let (from, to) = (range.start.saturating_sub(max_gap), range.end.saturating_add(max_gap));
        let mut merged = range.clone();
        while let Some((&start, &end)) = self.ranges.range(..=to).next_back()
            && end >= from
        {
            self.ranges.remove(&start);
            merged = merged.start.min(start)..merged.end.max(end);
        }
        if self.ranges.len() < MAX_RANGE_COUNT {
            self.ranges.insert(merged.start, merged.end);
        }
    }

    /// Whether this byte was delivered.
    pub fn contains(&self, at: u64) -> bool {
        self.range_at(at).is_some()
    }

    /// The first undelivered byte from here on.
    pub fn next_undelivered(&self, from: u64) -> u64 {
        self.range_at(from).map_or(from, |known| known.end)
    }

    /// The end of the first so many undelivered bytes from here on.
    pub fn skip_undelivered(&self, from: u64, bytes: u64) -> u64 {
        let (mut at, mut remaining) = (self.next_undelivered(from), bytes);
        for (&start, &end) in self.ranges.range(at..) {
            if remaining <= start - at {
                break;
            }
            remaining -= start - at;
            at = end;
        }
        at.saturating_add(remaining)
    }

    /// The undelivered parts of a range.
    pub fn undelivered(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let (mut at, mut parts) = (self.next_undelivered(range.start), Vec::new());
        while at < range.end {
            let known = self.ranges.range(at..range.end).next();
            let (start, end) = known.map_or((range.end, range.end), |(&start, &end)| (start, end));
            parts.push(at..start);
            at = end;
        }
        parts
    }

    /// The delivered range that holds this byte.
    fn range_at(&self, at: u64) -> Option<Range<u64>> {
        let (&start, &end) = self.ranges.range(..=at).next_back()?;
        (at < end).then_some(start..end)
    }
}

#[cfg(test)]
#[path = "readahead_tests.rs"]
mod tests;
