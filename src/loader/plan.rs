//! The plan of a load: which extents of which files to read, in which order.
//!
//! Jobs are in the order of the sources, each large enough to be worth a read and small enough to be one
//! thread's. What lies close together is read together. Planning reads nothing, and only ever splits targets.

use std::collections::VecDeque;
use std::ops::Range;

use crate::checkpoint::{OriginId, TensorBytes};
use crate::source::REMOTE_GAP_BYTES;

/// Extents end at multiples of this. It is large enough that a disk is not asked too often, and small enough that
/// several threads have work even for one large tensor.
pub const MAX_EXTENT_BYTES: u64 = 4 << 20;

/// Unwanted bytes between wanted ones that are read too: a disk reads as many in the time of one more request.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// Extents in stores end at multiples of this: a connection starts slowly, and is fast afterwards.
const REMOTE_EXTENT_BYTES: u64 = 8 << 20;

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

/// A tensor to load, whole.
#[derive(Debug)]
pub struct PlanItem<'a, T> {
    /// The number of its checkpoint in the load.
    pub checkpoint: usize,
    /// Where the bytes lie in the checkpoint.
    pub bytes: &'a TensorBytes,
    /// Where the bytes belong: as many.
    pub target: T,
}

/// The work of one thread at a time.
#[derive(Debug)]
pub enum LoadJob<'a, T> {
    /// An extent of an origin.
    Extent(LoadExtent<T>),
    /// A part of bytes that are not contiguous, from `offset` in the tensor on.
    Strided { checkpoint: usize, bytes: &'a TensorBytes, offset: u64, target: T },
}

impl<T> LoadJob<'_, T> {
    /// The number of the checkpoint that the job reads from.
    pub fn checkpoint(&self) -> usize {
        match self {
            LoadJob::Extent(LoadExtent { checkpoint, .. })
            | LoadJob::Strided { checkpoint, .. } => *checkpoint,
        }
    }

    /// The origins that the job reads from.
    pub fn origins(&self) -> impl Iterator<Item = OriginId> {
        let (extent, strided) = match self {
            LoadJob::Extent(extent) => (Some(extent.origin), None),
            LoadJob::Strided { bytes, .. } => (None, Some(bytes.extents().map(|run| run.origin))),
        };
        extent.into_iter().chain(strided.into_iter().flatten())
    }
}

/// A range of an origin, and the targets of what lies in it.
#[derive(Debug)]
pub struct LoadExtent<T> {
    pub checkpoint: usize,
    pub origin: OriginId,
    pub range: Range<u64>,
    /// Each with the offset in the origin of its bytes, in order.
    pub targets: Vec<(u64, T)>,
}

/// Where extents end.
#[derive(Clone, Copy, Debug)]
pub struct SplitPolicy {
    /// Extents end at multiples of this, whatever lies there.
    pub boundary_bytes: u64,
    /// Unwanted bytes that are read all the same, because skipping them would cost more.
    pub max_gap_bytes: u64,
}

impl SplitPolicy {
    /// The policy of loads from filesystems.
    pub const LOCAL: SplitPolicy =
        SplitPolicy { boundary_bytes: MAX_EXTENT_BYTES, max_gap_bytes: MAX_GAP_BYTES };

    /// The policy of loads from stores.
    pub const REMOTE: SplitPolicy =
        SplitPolicy { boundary_bytes: REMOTE_EXTENT_BYTES, max_gap_bytes: REMOTE_GAP_BYTES };
}

/// Plans the jobs for some items. Bytes that are wanted twice, as by tensors that share them, are read once.
pub fn plan_jobs<'a, T: Target>(
    items: Vec<PlanItem<'a, T>>,
    policy: SplitPolicy,
) -> VecDeque<LoadJob<'a, T>> {
    let boundary = policy.boundary_bytes;
    let mut jobs = VecDeque::new();
    let mut pieces = Vec::new();
    for PlanItem { checkpoint, bytes, target } in items {
        let mut rest = target;
        for part in bytes.parts() {
            let (mut target, after) = rest.split(part.len);
            rest = after;
            let mut done = 0;
            while done < part.len {
                // Runs are split at the boundaries of their file.
                let at = part.run.map_or(0, |run| run.offset) + done;
                let room = if part.run.is_some() { boundary - at % boundary } else { boundary };
                let len = (part.len - done).min(room);
                let (now, after) = target.split(len);
                match part.run {
                    Some(run) => pieces.push(((checkpoint, run.origin), at, now)),
                    None => jobs.push_back(LoadJob::Strided {
                        checkpoint,
                        bytes,
                        offset: part.offset + done,
                        target: now,
                    }),
                }
                target = after;
                done += len;
            }
        }
    }
    pieces.sort_by_key(|(origin, at, _)| (*origin, *at));
    let mut open: Option<LoadExtent<T>> = None;
    for (origin, at, target) in pieces {
        append_target(&mut open, &mut jobs, origin, at, target, policy);
    }
    jobs.extend(open.map(LoadJob::Extent));
    jobs
}

/// Appends a target to the open extent if it lies close, or begins another.
fn append_target<T: Target>(
    open: &mut Option<LoadExtent<T>>,
    jobs: &mut VecDeque<LoadJob<'_, T>>,
    (checkpoint, origin): (usize, OriginId),
    at: u64,
    target: T,
    policy: SplitPolicy,
) {
    let end = at + target.len();
    if let Some(extent) = open
        && (extent.checkpoint, extent.origin) == (checkpoint, origin)
        && extent.range.start / policy.boundary_bytes == at / policy.boundary_bytes
        && at <= extent.range.end + policy.max_gap_bytes
    {
        extent.range.end = extent.range.end.max(end);
        extent.targets.push((at, target));
        return;
    }
    let new = LoadExtent { checkpoint, origin, range: at..end, targets: vec![(at, target)] };
    jobs.extend(open.replace(new).map(LoadJob::Extent));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::{Axis, ByteRun, Grid, OpenOrigins, Origin};

    const POLICY: SplitPolicy = SplitPolicy { boundary_bytes: 64, max_gap_bytes: 8 };

    fn any_tensor_bytes() -> impl Strategy<Value = TensorBytes> {
        prop_oneof![
            (0u32..3, 0u64..300, 0u64..200).prop_map(|(origin, offset, len)| {
                TensorBytes::Run(ByteRun { origin: OriginId(origin), offset, len })
            }),
            (0u32..3, 0u64..50, 2u64..9, 0u64..20, 1u64..9).prop_map(
                |(origin, base, count, stride, piece_bytes)| {
                    let axes = [Axis { count, stride }].into();
                    TensorBytes::Grid(Box::new(Grid {
                        origin: OriginId(origin),
                        base,
                        axes,
                        piece_bytes,
                    }))
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn all_items_are_planned_and_no_extent_is_large_or_mostly_gap(
            requested in prop::collection::vec((0..2usize, any_tensor_bytes()), 0..30),
        ) {
            let checkpoints: Vec<OpenOrigins> = (0..2u8).map(|checkpoint| {
                let bytes = |n: u8| (0..600u32).map(move |at| (at * 7 + u32::from(10 * checkpoint + n)) as u8).collect();
                let origins: Vec<Origin> = (0..3).map(|n| Origin::Memory(bytes(n))).collect();
                OpenOrigins::open(&origins, None).unwrap()
            }).collect();
            let mut memory: Vec<Vec<u8>> =
                requested.iter().map(|(_, bytes)| vec![0; bytes.len() as usize]).collect();
            let expected: Vec<Vec<u8>> = requested.iter().map(|(n, bytes)| {
                let mut whole = vec![0; bytes.len() as usize];
                checkpoints[*n].read(bytes, 0, &mut whole).unwrap();
                whole
            }).collect();
            let items = requested.iter().zip(&mut memory);
            let items =
                items.map(|((n, bytes), out)| PlanItem { checkpoint: *n, bytes, target: &mut out[..] }).collect();
            let mut last = None;
            for job in plan_jobs(items, POLICY) {
                match job {
                    LoadJob::Strided { checkpoint, bytes, offset, target } => {
                        prop_assert!(Target::len(&target) <= POLICY.boundary_bytes);
                        checkpoints[checkpoint].read(bytes, offset, target).unwrap();
                    }
                    LoadJob::Extent(LoadExtent { checkpoint, origin, range, targets }) => {
                        prop_assert_eq!(range.start / POLICY.boundary_bytes, (range.end - 1) / POLICY.boundary_bytes);
                        // In order, and no byte twice.
                        prop_assert!(last.replace((checkpoint, origin, range.end)) <= Some((checkpoint, origin, range.start)));
                        let mut reached = range.start;
                        for (at, target) in targets {
                            prop_assert!(at >= range.start && at <= reached + POLICY.max_gap_bytes);
                            reached = reached.max(at + Target::len(&target));
                            checkpoints[checkpoint].origin(origin).read_exact_at(target, at).unwrap();
                        }
                        prop_assert_eq!(reached, range.end);
                    }
                }
            }
            prop_assert_eq!(memory, expected);
        }
    }
}
