//! What to read, in which order, and in which pieces.
//!
//! In: what is wanted: where its bytes lie, and where they belong. Out: [`Job`]s in the order of the
//! sources, each large enough to be worth a read and small enough to be one thread's: what lies close
//! together is read together. Pure: nothing is read, and where bytes belong is only ever cut in two.

use std::collections::VecDeque;
use std::ops::Range;

use crate::checkpoint::{Bytes, OriginId};

/// Where bytes belong: memory of the caller's, of a device, or anything that can be cut.
pub trait Target: Sized {
    /// How many bytes.
    fn len(&self) -> u64;
    /// The first so many, and the rest.
    fn cut(self, at: u64) -> (Self, Self);
}

impl Target for &mut [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn cut(self, at: u64) -> (Self, Self) {
        // Callers cut within what there is, which is in memory.
        self.split_at_mut(at as usize)
    }
}

/// Something that is wanted, whole.
#[derive(Debug)]
pub struct Want<'a, T> {
    /// Of which checkpoint, by its place among those of the load.
    pub of: usize,
    /// Where it lies in that.
    pub bytes: &'a Bytes,
    /// Where it belongs: as many bytes.
    pub target: T,
}

/// The work of one thread.
#[derive(Debug)]
pub enum Job<'a, T> {
    /// A stretch of an origin, and the pieces of it that are wanted.
    Stretch(Stretch<T>),
    /// A part of what does not lie one byte after the other, from this byte of it on.
    Gather { of: usize, bytes: &'a Bytes, offset: u64, target: T },
}

impl<T> Job<'_, T> {
    /// What it reads from: an origin of a checkpoint.
    pub fn reads(&self) -> (usize, OriginId) {
        match self {
            Job::Stretch(stretch) => (stretch.of, stretch.origin),
            Job::Gather { of, bytes, .. } => (*of, bytes.reach().0),
        }
    }
}

/// A stretch of an origin.
#[derive(Debug)]
pub struct Stretch<T> {
    pub of: usize,
    pub origin: OriginId,
    pub range: Range<u64>,
    /// In order; where each begins in the origin.
    pub pieces: Vec<(u64, T)>,
}

/// How to cut.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Where stretches end, whatever lies there: at multiples of this.
    pub every: u64,
    /// Bytes that nobody wants and that are read all the same, because stopping would cost more.
    pub gap: u64,
}

/// The jobs for what is wanted. Bytes that are wanted twice, as by tensors that share them, are read once.
pub fn plan<'a, T: Target>(wanted: Vec<Want<'a, T>>, cut: Cut) -> VecDeque<Job<'a, T>> {
    let mut jobs = VecDeque::new();
    let mut pieces = Vec::new();
    for Want { of, bytes, target } in wanted {
        let (origin, start) = match bytes {
            Bytes::Run(run) => (run.origin, Some(run.offset)),
            _ => (bytes.reach().0, None),
        };
        let (mut at, mut rest) = (start.unwrap_or(0), target);
        while rest.len() > 0 {
            // Runs are cut where stretches of their file are.
            let room = if start.is_some() { cut.every - at % cut.every } else { cut.every };
            let len = rest.len().min(room);
            let (target, after) = rest.cut(len);
            match start {
                Some(_) => pieces.push(((of, origin), at, target)),
                None => jobs.push_back(Job::Gather { of, bytes, offset: at, target }),
            }
            (at, rest) = (at + len, after);
        }
    }
    pieces.sort_by_key(|(reads, at, _)| (*reads, *at));
    let mut open: Option<Stretch<T>> = None;
    for (reads, at, piece) in pieces {
        add(&mut open, &mut jobs, reads, at, piece, cut);
    }
    jobs.extend(open.map(Job::Stretch));
    jobs
}

/// Adds a piece to the stretch at hand if it lies close, or begins another.
fn add<T: Target>(
    open: &mut Option<Stretch<T>>,
    jobs: &mut VecDeque<Job<'_, T>>,
    (of, origin): (usize, OriginId),
    at: u64,
    piece: T,
    cut: Cut,
) {
    let end = at + piece.len();
    if let Some(stretch) = open
        && (stretch.of, stretch.origin) == (of, origin)
        && stretch.range.start / cut.every == at / cut.every
        && at <= stretch.range.end + cut.gap
    {
        stretch.range.end = stretch.range.end.max(end);
        stretch.pieces.push((at, piece));
        return;
    }
    let new = Stretch { of, origin, range: at..end, pieces: vec![(at, piece)] };
    jobs.extend(open.replace(new).map(Job::Stretch));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::{Axis, Grid, Origin, Run, Sources};

    const CUT: Cut = Cut { every: 64, gap: 8 };

    fn any_bytes() -> impl Strategy<Value = Bytes> {
        prop_oneof![
            (0u32..3, 0u64..300, 0u64..200).prop_map(|(origin, offset, len)| {
                Bytes::Run(Run { origin: OriginId(origin), offset, len })
            }),
            (0u32..3, 0u64..50, 2u64..9, 0u64..20, 1u64..9).prop_map(
                |(origin, base, count, stride, run)| {
                    let axes = [Axis { count, stride }].into();
                    Bytes::Grid(Box::new(Grid { origin: OriginId(origin), base, axes, run }))
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn all_that_is_wanted_is_read_and_no_stretch_is_large_or_mostly_gap(
            wanted in prop::collection::vec((0..2usize, any_bytes()), 0..30),
        ) {
            let checkpoints: Vec<Sources> = (0..2u8).map(|of| {
                let bytes = |n: u8| (0..600u32).map(move |at| (at * 7 + u32::from(10 * of + n)) as u8).collect();
                let origins: Vec<Origin> = (0..3).map(|n| Origin::Memory(bytes(n))).collect();
                Sources::open(&origins, None).unwrap()
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
                wants.map(|((of, bytes), out)| Want { of: *of, bytes, target: &mut out[..] }).collect();
            let mut last = None;
            for job in plan(wants, CUT) {
                match job {
                    Job::Gather { of, bytes, offset, target } => {
                        prop_assert!(Target::len(&target) <= CUT.every);
                        checkpoints[of].read(bytes, offset, target).unwrap();
                    }
                    Job::Stretch(Stretch { of, origin, range, pieces }) => {
                        prop_assert_eq!(range.start / CUT.every, (range.end - 1) / CUT.every);
                        // In order, and no byte twice.
                        prop_assert!(last.replace((of, origin, range.end)) <= Some((of, origin, range.start)));
                        let mut reached = range.start;
                        for (at, piece) in pieces {
                            prop_assert!(at >= range.start && at <= reached + CUT.gap);
                            reached = reached.max(at + Target::len(&piece));
                            checkpoints[of].origin(origin).read_exact_at(piece, at).unwrap();
                        }
                        prop_assert_eq!(reached, range.end);
                    }
                }
            }
            prop_assert_eq!(memory, expected);
        }
    }
}
