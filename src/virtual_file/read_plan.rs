//! The plan of reads: which extents of which files to read, in which order.
//!
//! Jobs are in the order of the sources, each large enough to be worth a read and small enough to be one
//! thread's. What lies close together is read together. Planning reads nothing, and only ever splits targets.
//!
//! From a filesystem, strided bytes are gathered, a part of the tensor at a time. From a store, each byte is fetched once:
//! an extent includes the parts of strided tensors that lie in it. They are copied to all their places.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::checkpoint::{OriginId, Scatter, TensorBytes, scatters_of};
use crate::source::REMOTE_GAP_BYTES;
use crate::threads::lock;

/// Extents end at multiples of this. It is large enough that a disk is not asked too often, and small enough that
/// several threads have work even for one large tensor.
pub const MAX_EXTENT_BYTES: u64 = 4 << 20;

/// Unwanted bytes between wanted ones that are read too: a disk reads as many in the time of one more request.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// Extents in stores end at multiples of this: a connection starts slowly, and is fast afterwards.
const REMOTE_EXTENT_BYTES: u64 = 8 << 20;

/// Maximum bytes of one request for several runs of a virtual file, with the gaps between them.
const MAX_REQUEST_BYTES: u64 = 16 << 20;

/// Where bytes belong: memory of the caller's, of a device, or anything that can be split.
pub trait Target: Sized {
    /// The number of bytes.
    fn len(&self) -> u64;
    /// The first `at` bytes, and the rest.
    fn split(self, at: u64) -> (Self, Self);
}

impl Target for &mut [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn split(self, at: u64) -> (Self, Self) {
        // Callers split within the target, which is in memory.
        self.split_at_mut(at as usize)
    }
}

/// Bytes of a tensor to read.
#[derive(Debug)]
pub struct PlanItem<'a, T> {
    /// The number of its checkpoint in the plan.
    pub checkpoint: usize,
    /// Where the bytes of the tensor lie in the checkpoint.
    pub bytes: &'a TensorBytes,
    /// The first of them.
    pub offset: u64,
    /// Where the bytes belong. Its length is that of the read.
    pub target: T,
}

/// The work of one thread at a time.
#[derive(Debug)]
pub enum ReadJob<'a, T> {
    /// An extent of an origin.
    Extent(ReadExtent<T>),
    /// A part of bytes that are not contiguous, from `offset` in the tensor on.
    Strided { checkpoint: usize, bytes: &'a TensorBytes, offset: u64, target: T },
}

impl<T> ReadJob<'_, T> {
    /// The number of the checkpoint that the job reads from.
    pub fn checkpoint(&self) -> usize {
        match self {
            ReadJob::Extent(ReadExtent { checkpoint, .. })
            | ReadJob::Strided { checkpoint, .. } => *checkpoint,
        }
    }

    /// The origins that the job reads from.
    pub fn origins(&self) -> impl Iterator<Item = OriginId> {
        let (extent, strided) = match self {
            ReadJob::Extent(extent) => (Some(extent.origin), None),
            ReadJob::Strided { bytes, .. } => (None, Some(bytes.extents().map(|run| run.origin))),
        };
        extent.into_iter().chain(strided.into_iter().flatten())
    }
}

/// A range of an origin, and the targets of what lies in it.
#[derive(Debug)]
pub struct ReadExtent<T> {
    pub checkpoint: usize,
    pub origin: OriginId,
    pub range: Range<u64>,
    /// Each with the offset in the origin of its bytes, in order.
    pub targets: Vec<(u64, T)>,
    /// Strided bytes that lie in the range.
    pub strided: Vec<StridedPart<T>>,
}

/// A strided target that several extents fill, each of them at many places.
#[derive(Debug)]
struct StridedTarget<T> {
    scatters: Vec<Scatter>,
    /// Bytes that are reversed together when all are there.
    unit_bytes: Option<usize>,
    state: Mutex<StridedState<T>>,
}

#[derive(Debug)]
struct StridedState<T> {
    target: T,
    missing_parts: usize,
}

/// The bytes of a strided target that lie in a range of an origin.
#[derive(Debug)]
pub struct StridedPart<T> {
    strided: Arc<StridedTarget<T>>,
    /// The index of the scatter.
    scatter: usize,
    range: Range<u64>,
}

impl<T> StridedPart<T> {
    /// Copies the part from `bytes`, which begin at `start` in the origin. Threads that fill one target take turns.
    pub fn copy_from(
        self,
        bytes: &[u8],
        start: u64,
        memory: impl FnOnce(&mut T) -> Option<&mut [u8]>,
    ) {
        let StridedPart { strided, scatter, range } = self;
        let StridedTarget { scatters, unit_bytes, state } = &*strided;
        let mut state = lock(state);
        let StridedState { target, missing_parts } = &mut *state;
        *missing_parts -= 1;
        // Only plans for targets in memory have such parts.
        let Some(memory) = memory(target) else { return };
        let bytes = &bytes[(range.start - start) as usize..(range.end - start) as usize];
        scatters[scatter].copy(range.start, bytes, memory);
        if let Some(unit_bytes) = *unit_bytes
            && *missing_parts == 0
        {
            memory.chunks_exact_mut(unit_bytes).for_each(<[u8]>::reverse);
        }
    }
}

/// Where extents end.
#[derive(Clone, Copy, Debug)]
pub struct SplitPolicy {
    /// Extents end at multiples of this, whatever lies there.
    pub boundary_bytes: u64,
    /// Maximum bytes of an extent with several targets.
    pub max_bytes: u64,
    /// Unwanted bytes that are read all the same, because skipping them would cost more.
    pub max_gap_bytes: u64,
    /// Extents with strided bytes, which are read into a buffer, end at multiples of this. `None`: these are gathered.
    pub strided_boundary_bytes: Option<u64>,
}

impl SplitPolicy {
    /// The policy of loads from filesystems.
    pub const LOCAL: SplitPolicy = SplitPolicy {
        boundary_bytes: MAX_EXTENT_BYTES,
        max_bytes: MAX_EXTENT_BYTES,
        max_gap_bytes: MAX_GAP_BYTES,
        strided_boundary_bytes: None,
    };

    /// The policy of loads from stores.
    pub const REMOTE: SplitPolicy = SplitPolicy {
        boundary_bytes: REMOTE_EXTENT_BYTES,
        max_bytes: REMOTE_EXTENT_BYTES,
        max_gap_bytes: REMOTE_GAP_BYTES,
        strided_boundary_bytes: Some(MAX_EXTENT_BYTES),
    };

    /// The policy of reads of one range of a virtual file whose sources lie in stores: a run is one extent.
    pub const REMOTE_RANGE: SplitPolicy = SplitPolicy {
        boundary_bytes: u64::MAX,
        max_bytes: MAX_REQUEST_BYTES,
        max_gap_bytes: REMOTE_GAP_BYTES,
        strided_boundary_bytes: Some(MAX_EXTENT_BYTES),
    };
}

/// The number of a checkpoint, and an origin of it.
type PlanOrigin = (usize, OriginId);

/// Bytes of an origin that a plan needs.
enum Piece<T> {
    Run(T),
    Strided(StridedPart<T>),
}

/// Plans the jobs for some items. Bytes that are wanted twice, as by tensors that share them, are read once. `policy`
/// gives the policy of a checkpoint.
pub fn plan_jobs<'a, T: Target>(
    items: Vec<PlanItem<'a, T>>,
    policy: impl Fn(usize) -> SplitPolicy,
) -> VecDeque<ReadJob<'a, T>> {
    let mut jobs = VecDeque::new();
    let mut runs: Vec<(PlanOrigin, u64, T)> = Vec::new();
    let mut pieces: Vec<(PlanOrigin, Range<u64>, Piece<T>)> = Vec::new();
    let mut strided_cells = StridedCells::default();
    for PlanItem { checkpoint, bytes, offset, target } in items {
        let policy = policy(checkpoint);
        let end = offset + target.len();
        let mut rest = target;
        for part in bytes.parts() {
            let (from, until) = (part.offset.max(offset), (part.offset + part.len).min(end));
            if from >= until {
                continue;
            }
            let (target, after) = rest.split(until - from);
            rest = after;
            if let Some(run) = part.run {
                runs.push(((checkpoint, run.origin), run.offset + from - part.offset, target));
                continue;
            }
            let boundary = policy.strided_boundary_bytes;
            let scatters = boundary
                .and_then(|boundary| Some((boundary, plan_scatters(bytes, from, until - from)?)));
            match scatters {
                Some((boundary, (scatters, unit_bytes))) => {
                    let parts = cut_ranges(&scatters, policy.max_gap_bytes, boundary);
                    let missing_parts = parts.len();
                    let state = Mutex::new(StridedState { target, missing_parts });
                    let strided = Arc::new(StridedTarget { scatters, unit_bytes, state });
                    for (scatter, range) in parts {
                        let part = StridedPart { strided: Arc::clone(&strided), scatter, range };
                        let origin = (checkpoint, part.strided.scatters[part.scatter].origin);
                        strided_cells.insert(origin, part.range.start, policy);
                        pieces.push((origin, part.range.clone(), Piece::Strided(part)));
                    }
                }
                None => push_gathered(&mut jobs, checkpoint, bytes, from, target, policy),
            }
        }
    }
    for (origin, start, target) in runs {
        let policy = policy(origin.0);
        let (mut at, mut rest) = (start, target);
        while rest.len() > 0 {
            let room = strided_cells.bytes_to_end(origin, at, policy);
            let len = rest.len().min(room);
            let (now, after) = rest.split(len);
            pieces.push((origin, at..at + len, Piece::Run(now)));
            (at, rest) = (at + len, after);
        }
    }
    pieces.sort_by_key(|(origin, range, _)| (*origin, range.start));
    let mut open: Option<ReadExtent<T>> = None;
    for (origin, range, piece) in pieces {
        let policy = policy(origin.0);
        let extent = match open.take() {
            Some(extent) if strided_cells.may_join(&extent, origin, &range, policy) => extent,
            before => {
                jobs.extend(before.map(ReadJob::Extent));
                let (checkpoint, origin) = origin;
                let (targets, strided) = Default::default();
                ReadExtent { checkpoint, origin, range: range.clone(), targets, strided }
            }
        };
        let extent = open.insert(extent);
        extent.range.end = extent.range.end.max(range.end);
        match piece {
            Piece::Run(target) => extent.targets.push((range.start, target)),
            Piece::Strided(part) => extent.strided.push(part),
        }
    }
    jobs.extend(open.map(ReadJob::Extent));
    jobs
}

/// The scatters of strided bytes, and the bytes that are reversed together; `None` if they can only be gathered.
pub fn plan_scatters(
    bytes: &TensorBytes,
    offset: u64,
    len: u64,
) -> Option<(Vec<Scatter>, Option<usize>)> {
    match bytes {
        TensorBytes::Swapped { unit_bytes, inner }
            if offset.is_multiple_of(*unit_bytes) && len.is_multiple_of(*unit_bytes) =>
        {
            Some((scatters_of(inner, offset, len)?, Some(*unit_bytes as usize)))
        }
        bytes => Some((scatters_of(bytes, offset, len)?, None)),
    }
}

/// Scatters, and the ranges of their origins, none across a boundary. Each range has the index of its scatter.
fn cut_ranges(scatters: &[Scatter], max_gap_bytes: u64, boundary: u64) -> Vec<(usize, Range<u64>)> {
    let mut parts = Vec::new();
    for (index, scatter) in scatters.iter().enumerate() {
        for Range { start, end } in scatter.ranges(max_gap_bytes) {
            let mut at = start;
            while at < end {
                let cut = ((at / boundary + 1) * boundary).min(end);
                parts.push((index, at..cut));
                at = cut;
            }
        }
    }
    parts
}

/// Parts of a tensor that are gathered.
fn push_gathered<'a, T: Target>(
    jobs: &mut VecDeque<ReadJob<'a, T>>,
    checkpoint: usize,
    bytes: &'a TensorBytes,
    mut offset: u64,
    mut target: T,
    policy: SplitPolicy,
) {
    while target.len() > 0 {
        let len = target.len().min(policy.boundary_bytes);
        let (now, after) = target.split(len);
        jobs.push_back(ReadJob::Strided { checkpoint, bytes, offset, target: now });
        (offset, target) = (offset + len, after);
    }
}

/// The cells between two boundaries of a policy that have strided bytes. Extents in them end sooner.
#[derive(Default)]
struct StridedCells(HashSet<(PlanOrigin, u64)>);

impl StridedCells {
    fn insert(&mut self, origin: PlanOrigin, at: u64, policy: SplitPolicy) {
        self.0.insert((origin, at / policy.boundary_bytes));
    }

    /// The distance between two ends of extents where a byte lies.
    fn boundary(&self, origin: PlanOrigin, at: u64, policy: SplitPolicy) -> u64 {
        match self.0.contains(&(origin, at / policy.boundary_bytes)) {
            true => policy.strided_boundary_bytes.unwrap_or(policy.boundary_bytes),
            false => policy.boundary_bytes,
        }
    }

    /// Bytes from a place to the end of its extent at the latest.
    fn bytes_to_end(&self, origin: PlanOrigin, at: u64, policy: SplitPolicy) -> u64 {
        let boundary = self.boundary(origin, at, policy);
        boundary - at % boundary
    }

    /// Whether an extent may end with a range that begins behind its start.
    fn may_join<T>(
        &self,
        extent: &ReadExtent<T>,
        origin: PlanOrigin,
        range: &Range<u64>,
        policy: SplitPolicy,
    ) -> bool {
        let boundary = self.boundary(origin, range.start, policy);
        (extent.checkpoint, extent.origin) == origin
            && extent.range.start / boundary == range.start / boundary
            && range.start <= extent.range.end.saturating_add(policy.max_gap_bytes)
            && range.end - extent.range.start <= policy.max_bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::{Axis, ByteRun, Grid, OpenOrigins, Origin};

    const GATHERED: SplitPolicy = SplitPolicy {
        boundary_bytes: 64,
        max_bytes: 64,
        max_gap_bytes: 8,
        strided_boundary_bytes: None,
    };

    fn any_tensor_bytes() -> impl Strategy<Value = TensorBytes> {
        prop_oneof![
            (0u32..3, 0u64..300, 0u64..200).prop_map(|(origin, offset, len)| {
                TensorBytes::Run(ByteRun { origin: OriginId(origin), offset, len })
            }),
            (0u32..3, 0u64..50, 2u64..9, 0u64..20, 1u64..9, any::<bool>()).prop_map(
                |(origin, base, count, stride, piece_bytes, is_swapped)| {
                    let axes = [Axis { count, stride }].into();
                    let grid = Grid { origin: OriginId(origin), base, axes, piece_bytes };
                    let inner = TensorBytes::Grid(Box::new(grid));
                    match is_swapped && piece_bytes % 2 == 0 {
                        true => TensorBytes::Swapped { unit_bytes: 2, inner: Box::new(inner) },
                        false => inner,
                    }
                }
            ),
        ]
    }

    const SCATTERED: SplitPolicy = SplitPolicy { strided_boundary_bytes: Some(16), ..GATHERED };

    proptest! {
        #[test]
        fn all_items_are_planned_and_no_extent_is_large_or_mostly_gap(
            requested in prop::collection::vec((0..2usize, any_tensor_bytes(), 0.0..1.0f64), 0..30),
            scatters in any::<bool>(),
        ) {
            let policy = if scatters { SCATTERED } else { GATHERED };
            let checkpoints: Vec<OpenOrigins> = (0..2u8).map(|checkpoint| {
                let bytes = |n: u8| (0..600u32).map(move |at| (at * 7 + u32::from(10 * checkpoint + n)) as u8).collect();
                let origins: Vec<Origin> = (0..3).map(|n| Origin::Memory(bytes(n))).collect();
                OpenOrigins::open(&origins, None).unwrap()
            }).collect();
            // The tail of each tensor.
            let offset = |bytes: &TensorBytes, share: f64| (bytes.len() as f64 * share) as u64;
            let mut memory: Vec<Vec<u8>> = requested.iter().map(|(_, bytes, share)| {
                vec![0; (bytes.len() - offset(bytes, *share)) as usize]
            }).collect();
            let expected: Vec<Vec<u8>> = requested.iter().zip(&memory).map(|((n, bytes, share), out)| {
                let mut tail = vec![0; out.len()];
                checkpoints[*n].read(bytes, offset(bytes, *share), &mut tail).unwrap();
                tail
            }).collect();
            let items = requested.iter().zip(&mut memory);
            let items = items.map(|((checkpoint, bytes, share), out)| {
                PlanItem { checkpoint: *checkpoint, bytes, offset: offset(bytes, *share), target: &mut out[..] }
            });
            let mut last = None;
            for job in plan_jobs(items.collect(), |_| policy) {
                match job {
                    ReadJob::Strided { checkpoint, bytes, offset, target } => {
                        prop_assert!(Target::len(&target) <= policy.boundary_bytes);
                        let is_swapped = matches!(bytes, TensorBytes::Swapped { .. });
                        prop_assert!(!scatters || is_swapped);
                        checkpoints[checkpoint].read(bytes, offset, target).unwrap();
                    }
                    ReadJob::Extent(ReadExtent { checkpoint, origin, range, targets, strided }) => {
                        let boundary = match policy.strided_boundary_bytes {
                            Some(boundary) if !strided.is_empty() => boundary,
                            _ => policy.boundary_bytes,
                        };
                        prop_assert_eq!(range.start / boundary, (range.end - 1) / boundary);
                        // In order, and no byte twice.
                        prop_assert!(last.replace((checkpoint, origin, range.end)) <= Some((checkpoint, origin, range.start)));
                        let mut bytes = vec![0; (range.end - range.start) as usize];
                        checkpoints[checkpoint].origin(origin).read_exact_at(&mut bytes, range.start).unwrap();
                        let mut ranges: Vec<_> = strided.iter().map(|part| part.range.clone()).collect();
                        for (at, target) in targets {
                            let len = Target::len(&target);
                            let from = (at - range.start) as usize;
                            target.copy_from_slice(&bytes[from..from + len as usize]);
                            ranges.push(at..at + len);
                        }
                        ranges.sort_by_key(|part| part.start);
                        let mut reached = range.start;
                        for part in ranges {
                            prop_assert!(part.start >= range.start && part.start <= reached + policy.max_gap_bytes);
                            reached = reached.max(part.end);
                        }
                        prop_assert_eq!(reached, range.end);
                        for part in strided {
                            part.copy_from(&bytes, range.start, |target| Some(target));
                        }
                    }
                }
            }
            prop_assert_eq!(memory, expected);
        }
    }
}
