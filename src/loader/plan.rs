//! What to read, in which order, and in which pieces.
//!
//! In: what is wanted: where its bytes lie, and where they belong. Out: [`Job`]s in the order of the
//! sources, each large enough to be worth a read and small enough to be one thread's: what lies close
//! together is read together. Pure: nothing is read, and where bytes belong is only ever cut in two.

use std::collections::VecDeque;
use std::ops::Range;

use crate::checkpoint::{OriginId, TensorBytes};

/// Where bytes belong: memory of the caller's, of a device, or anything that can be cut.
pub trait Target: Sized {
    /// How many bytes.
    fn len(&self) -> u64;
    /// The first so many, and the rest.
    fn split(self, at: u64) -> (Self, Self);
}

impl Target for &mut [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn split(self, at: u64) -> (Self, Self) {
        // Callers cut within what there is, which is in memory.
        self.split_at_mut(at as usize)
    }
}

/// Something that is wanted, whole.
#[derive(Debug)]
pub struct PlanItem<'a, T> {
    /// Of which checkpoint, by its place among those of the load.
    pub checkpoint: usize,
    /// Where it lies in that.
    pub bytes: &'a TensorBytes,
    /// Where it belongs: as many bytes.
    pub target: T,
}

/// The work of one thread.
#[derive(Debug)]
pub enum LoadJob<'a, T> {
    /// A stretch of an origin, and the pieces of it that are wanted.
    Extent(LoadExtent<T>),
    /// A part of what does not lie one byte after the other, from this byte of it on.
    Strided { of: usize, bytes: &'a TensorBytes, offset: u64, target: T },
}

impl<T> LoadJob<'_, T> {
    /// What it reads from: an origin of a checkpoint.
    pub fn origin(&self) -> (usize, OriginId) {
        match self {
            LoadJob::Extent(stretch) => (stretch.checkpoint, stretch.origin),
            LoadJob::Strided { of, bytes, .. } => (*of, bytes.extent().0),
        }
    }
}

/// A stretch of an origin.
#[derive(Debug)]
pub struct LoadExtent<T> {
    pub checkpoint: usize,
    pub origin: OriginId,
    pub range: Range<u64>,
    /// In order; where each begins in the origin.
    pub pieces: Vec<(u64, T)>,
}

/// How to cut.
#[derive(Clone, Copy, Debug)]
pub struct SplitPolicy {
    /// Where stretches end, whatever lies there: at multiples of this.
    pub boundary_bytes: u64,
    /// Bytes that nobody wants and that are read all the same, because stopping would cost more.
    pub max_gap_bytes: u64,
}

/// The jobs for what is wanted. Bytes that are wanted twice, as by tensors that share them, are read once.
pub fn plan_jobs<'a, T: Target>(
    wanted: Vec<PlanItem<'a, T>>,
    cut: SplitPolicy,
) -> VecDeque<LoadJob<'a, T>> {
    let mut jobs = VecDeque::new();
    let mut pieces = Vec::new();
    for PlanItem { checkpoint: of, bytes, target } in wanted {
        let (origin, start) = match bytes {
            TensorBytes::Run(run) => (run.origin, Some(run.offset)),
            _ => (bytes.extent().0, None),
        };
        let (mut at, mut rest) = (start.unwrap_or(0), target);
        while rest.len() > 0 {
            // Runs are cut where stretches of their file are.
            let room = if start.is_some() {
                cut.boundary_bytes - at % cut.boundary_bytes
            } else {
                cut.boundary_bytes
            };
            let len = rest.len().min(room);
            let (target, after) = rest.split(len);
            match start {
                Some(_) => pieces.push(((of, origin), at, target)),
                None => jobs.push_back(LoadJob::Strided { of, bytes, offset: at, target }),
            }
            (at, rest) = (at + len, after);
        }
    }
    pieces.sort_by_key(|(reads, at, _)| (*reads, *at));
    let mut open: Option<LoadExtent<T>> = None;
    for (reads, at, piece) in pieces {
        append_piece(&mut open, &mut jobs, reads, at, piece, cut);
    }
    jobs.extend(open.map(LoadJob::Extent));
    jobs
}

/// Adds a piece to the stretch at hand if it lies close, or begins another.
fn append_piece<T: Target>(
    open: &mut Option<LoadExtent<T>>,
    jobs: &mut VecDeque<LoadJob<'_, T>>,
    (of, origin): (usize, OriginId),
    at: u64,
    piece: T,
    cut: SplitPolicy,
) {
    let end = at + piece.len();
    if let Some(stretch) = open
        && (stretch.checkpoint, stretch.origin) == (of, origin)
        && stretch.range.start / cut.boundary_bytes == at / cut.boundary_bytes
        && at <= stretch.range.end + cut.max_gap_bytes
    {
        stretch.range.end = stretch.range.end.max(end);
        stretch.pieces.push((at, piece));
        return;
    }
    let new = LoadExtent { checkpoint: of, origin, range: at..end, pieces: vec![(at, piece)] };
    jobs.extend(open.replace(new).map(LoadJob::Extent));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::{Axis, ByteRun, Grid, OpenSources, Origin};

    const CUT: SplitPolicy = SplitPolicy { boundary_bytes: 64, max_gap_bytes: 8 };

    fn any_bytes() -> impl Strategy<Value = TensorBytes> {
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
        fn all_that_is_wanted_is_read_and_no_stretch_is_large_or_mostly_gap(
            wanted in prop::collection::vec((0..2usize, any_bytes()), 0..30),
        ) {
            let checkpoints: Vec<OpenSources> = (0..2u8).map(|of| {
                let bytes = |n: u8| (0..600u32).map(move |at| (at * 7 + u32::from(10 * of + n)) as u8).collect();
                let origins: Vec<Origin> = (0..3).map(|n| Origin::Memory(bytes(n))).collect();
                OpenSources::open(&origins, None).unwrap()
            }).collect();
            let mut memory: Vec<Vec<u8>> =
                wanted.iter().map(|(_, bytes)| vec![0; bytes.len() as usize]).collect();
            let expected: Vec<Vec<u8>> = wanted.iter().map(|(of, bytes)| {
                let mut whole = vec![0; bytes.len() as usize];
                checkpoints[*of].read(bytes, 0, &mut whole).unwrap();
                whole
            }).collect();
            let wants = wanted.iter().zip(&mut memory);
            let wants =
                wants.map(|((of, bytes), out)| PlanItem { checkpoint: *of, bytes, target: &mut out[..] }).collect();
            let mut last = None;
            for job in plan_jobs(wants, CUT) {
                match job {
                    LoadJob::Strided { of, bytes, offset, target } => {
                        prop_assert!(Target::len(&target) <= CUT.boundary_bytes);
                        checkpoints[of].read(bytes, offset, target).unwrap();
                    }
                    LoadJob::Extent(LoadExtent { checkpoint, origin, range, pieces }) => {
                        prop_assert_eq!(range.start / CUT.boundary_bytes, (range.end - 1) / CUT.boundary_bytes);
                        // In order, and no byte twice.
                        prop_assert!(last.replace((checkpoint, origin, range.end)) <= Some((checkpoint, origin, range.start)));
                        let mut reached = range.start;
                        for (at, piece) in pieces {
                            prop_assert!(at >= range.start && at <= reached + CUT.max_gap_bytes);
                            reached = reached.max(at + Target::len(&piece));
                            checkpoints[checkpoint].origin(origin).read_exact_at(piece, at).unwrap();
                        }
                        prop_assert_eq!(reached, range.end);
                    }
                }
            }
            prop_assert_eq!(memory, expected);
        }
    }
}
