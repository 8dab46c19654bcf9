//! Reads of virtual files whose sources lie in stores.
//!
//! A range is read by few requests, and each byte is fetched once. Runs that lie close together share a request, and
//! strided tensors are read in the order of their sources. Some rows of a transposed matrix need nearly all of its source.
//! Such tensors are read by larger ranges, windows.

use std::collections::VecDeque;
use std::ops::{DerefMut, Range};
use std::sync::Mutex;

use crate::checkpoint::{OpenOrigins, OriginId, Tensor, TensorBytes};
use crate::source::{REMOTE_GAP_BYTES, SourceError};
use crate::threads::lock;

use super::parallel_chunks::for_each_chunk;
use super::read_plan::{PlanItem, ReadExtent, ReadJob, SplitPolicy, plan_jobs, plan_scatters};

/// Maximum bytes that a window fetches, in percent of its share of what the whole tensor fetches.
const MAX_WINDOW_PERCENT: u64 = 105;

/// Maximum tensors that are read together because their bytes alternate in a source.
const MAX_INTERLEAVED: usize = 64;

/// Bytes of tensors, each with its target.
pub type StoreItems<'a, 'b> = Vec<PlanItem<'a, &'b mut [u8]>>;

/// Fills all targets, by at most `threads` requests at once. `new_scratch` gives each of them memory of so many bytes, if
/// it needs some. Returns false if it was stopped before the end.
pub fn read_items<S: DerefMut<Target = [u8]> + Send>(
    origins: &OpenOrigins,
    items: StoreItems<'_, '_>,
    threads: usize,
    new_scratch: impl Fn(usize) -> S + Sync,
    should_stop: impl Fn() -> bool + Sync,
) -> Result<bool, SourceError> {
    let jobs = plan_jobs(items, |_| SplitPolicy::REMOTE_RANGE);
    let count = jobs.len();
    let jobs: Mutex<VecDeque<_>> = Mutex::new(jobs);
    for_each_chunk(count, threads, should_stop, |scratch, _| {
        let job = lock(&jobs).pop_front();
        job.map_or(Ok(()), |job| run_job(origins, job, scratch, &new_scratch))
    })
}

fn run_job<S: DerefMut<Target = [u8]>>(
    origins: &OpenOrigins,
    job: ReadJob<'_, &mut [u8]>,
    scratch: &mut Option<S>,
    new_scratch: impl Fn(usize) -> S,
) -> Result<(), SourceError> {
    let ReadExtent { origin, range, mut targets, strided, .. } = match job {
        ReadJob::Extent(extent) => extent,
        ReadJob::Strided { bytes, offset, target, .. } => {
            origins.read(bytes, offset, target)?;
            return origins.check_tensor_unchanged(bytes);
        }
    };
    let source = origins.origin(origin);
    if !strided.is_empty() {
        let len = (range.end - range.start) as usize;
        let scratch = match scratch {
            Some(scratch) if scratch.len() >= len => scratch,
            scratch => scratch.insert(new_scratch(len)),
        };
        let scratch = &mut scratch[..len];
        source.read_exact_at(scratch, range.start)?;
        for (at, target) in targets {
            let from = (at - range.start) as usize;
            target.copy_from_slice(&scratch[from..from + target.len()]);
        }
        for part in strided {
            part.copy_from(scratch, range.start, |target| Some(target));
        }
    } else if let [(at, target)] = &mut targets[..] {
        // Small reads of one place after the other share requests.
        source.read_exact_at(target, *at)?;
    } else {
        source.read_nearby(&mut targets)?;
    }
    origins.check_unchanged(origin)
}

/// The bytes of a tensor that are best read together, of at least `min_bytes` and at most `max_bytes`. They are the
/// fewest whole steps of an axis that fetch little more of the sources than their share.
pub fn window_bytes(tensor: &Tensor, min_bytes: u64, max_bytes: u64) -> u64 {
    let len = tensor.bytes.len();
    let Some(total) = fetched_bytes(&tensor.bytes, len).filter(|_| len > min_bytes) else {
        return min_bytes;
    };
    let mut steps = 1;
    let outer_steps = tensor.shape.iter().map(|&size| {
        steps *= size;
        steps
    });
    // The bytes of one step of each axis, those of the innermost first.
    let mut step_bytes: Vec<u64> = outer_steps
        .filter(|&steps| steps > 0 && len.is_multiple_of(steps))
        .map(|steps| len / steps)
        .collect();
    step_bytes.reverse();
    step_bytes.push(len);
    for &step in &step_bytes {
        let window = (min_bytes / step).max(1) * step;
        let Some(fetched) = fetched_bytes(&tensor.bytes, window) else { continue };
        let is_dense = u128::from(fetched) * u128::from(len) * 100
            <= u128::from(total) * u128::from(window) * u128::from(MAX_WINDOW_PERCENT);
        if is_dense && window <= max_bytes {
            return window;
        }
    }
    let step = step_bytes.into_iter().rev().find(|&step| step <= max_bytes).unwrap_or(max_bytes);
    max_bytes / step * step
}

/// The tensors around one whose bytes alternate with its own in a source, such as all columns of a matrix. If they are too
/// many, the tensor alone.
pub fn interleaved_tensors(tensors: &[Tensor], index: usize) -> Range<usize> {
    let share = |two: &[Tensor]| {
        let [a, b] = [&two[0].bytes, &two[1].bytes].map(|bytes| {
            let is_single = bytes.is_strided() && !matches!(bytes, TensorBytes::Boxes(_));
            is_single.then(|| bytes.first_extent())
        });
        a.zip(b).is_some_and(|(a, b)| {
            a.origin == b.origin && a.offset < b.offset + b.len && b.offset < a.offset + a.len
        })
    };
    let before =
        tensors[..=index].windows(2).rev().take(MAX_INTERLEAVED + 1).take_while(|two| share(two));
    let after = tensors[index..].windows(2).take(MAX_INTERLEAVED + 1).take_while(|two| share(two));
    let range = index - before.count()..index + 1 + after.count();
    if range.len() > MAX_INTERLEAVED { index..index + 1 } else { range }
}

/// Bytes of the sources that a read of the first bytes of a tensor fetches; `None` if they are gathered.
fn fetched_bytes(bytes: &TensorBytes, len: u64) -> Option<u64> {
    let (scatters, _) = plan_scatters(bytes, 0, len)?;
    let mut ranges: Vec<(OriginId, Range<u64>)> = Vec::new();
    for scatter in &scatters {
        let of_scatter = scatter.ranges(REMOTE_GAP_BYTES).into_iter();
        ranges.extend(of_scatter.map(|range| (scatter.origin, range)));
    }
    ranges.sort_by_key(|(origin, range)| (*origin, range.start));
    let (mut total, mut reached) = (0, (OriginId(0), 0));
    for (origin, range) in ranges {
        let from = if reached.0 == origin { range.start.max(reached.1) } else { range.start };
        total += range.end.saturating_sub(from);
        reached = (origin, range.end.max(from));
    }
    Some(total)
}
