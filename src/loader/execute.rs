//! Does what a plan says, on several threads.
//!
//! In: checkpoints, [`Job`]s of them, and a [`Stage`] that knows the way to their targets. Out: nothing, when
//! all of it was handed on and is what was parsed; or the first error, and targets of no worth. How each stretch
//! is read is decided when its turn comes: what the page cache has is copied from there, the rest is read past
//! it, and what is tiny or comes from another machine plainly. A thread fills one buffer of the stage at a
//! time, so that memory is bounded by their number.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::checkpoint::{OriginId, Sources};
use crate::source::{self, Ways};
use crate::threads::{another, lock};

use super::Error;
use super::left::Left;
use super::plan::{Job, Stretch, Target};
use super::read_extent::{Reading, in_place};
use super::sink::Stage;

/// Where stretches are cut: enough that a disk is not asked too often, and small enough that several
/// threads have something to do even for one large tensor.
pub const STRETCH: u64 = 4 << 20;

/// What a thread passes bytes through: a stretch, which what is read around it to be aligned does not
/// lead out of.
pub const BUFFER: usize = STRETCH as usize;

/// How much is to be done at once, and how.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub threads: usize,
    /// Threads for which there may be buffers.
    pub most: usize,
    /// Leave in the page cache only what was there before.
    pub leave_cache: bool,
}

impl How {
    /// On so many threads at the most, if they are said; but within the memory.
    pub fn on(self, threads: Option<usize>) -> How {
        How { threads: threads.unwrap_or(self.threads).clamp(1, self.most), ..self }
    }
}

/// Bytes by how they were read.
#[derive(Debug, Default)]
pub struct Tally {
    pub cached: AtomicU64,
    pub direct: AtomicU64,
    pub gpudirect: AtomicU64,
    pub buffered: AtomicU64,
    pub gathered: AtomicU64,
    pub memory: AtomicU64,
}

/// A checkpoint that a load reads from.
pub struct From<'a> {
    /// To be told with what goes wrong.
    pub path: &'a Path,
    pub sources: &'a Sources,
    /// The ways to read each origin that is a file.
    pub ways: &'a [Option<Ways>],
    pub tally: Tally,
}

/// What a load reads with.
pub struct With<'a, S> {
    pub how: How,
    pub stage: &'a S,
    /// Set by whoever wants no more.
    pub stop: &'a AtomicBool,
}

/// Does all of it, for as many checkpoints as there are.
pub fn read<T: Target + Send, S: Stage<T>>(
    from: &[From<'_>],
    jobs: VecDeque<Job<'_, T>>,
    with: &With<'_, S>,
) -> Result<(), Error> {
    let threads = with.how.threads.min(jobs.len());
    let left: Option<Vec<Left<'_>>> = with.how.leave_cache.then(|| {
        let checkpoints = from.iter().enumerate().map(|(n, from)| {
            let origins = jobs.iter().map(Job::reads).filter(|(of, _)| *of == n);
            Left::of(origins.map(|(_, origin)| origin), from.sources, from.ways)
        });
        checkpoints.collect()
    });
    let jobs = Mutex::new(jobs);
    let failed = Mutex::new(None);
    let is_over = || with.stop.load(Ordering::Relaxed) || lock(&failed).is_some();
    let work = || {
        with.stage.reads(|| {
            while !is_over() {
                let Some(job) = lock(&jobs).pop_front() else { return };
                let (of, _) = job.reads();
                let left = left.as_ref().map(|left| &left[of]);
                if let Err(error) = from[of].one(job, with.stage, left) {
                    lock(&failed).get_or_insert(error);
                }
            }
        })
    };
    if threads <= 1 {
        work();
    } else {
        std::thread::scope(|scope| {
            // Those that there are do it all.
            let _others: Vec<_> = (1..threads).map_while(|_| another(scope, work)).collect();
            work();
        });
        with.stage.end();
    }
    if let Some(error) = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        return Err(error);
    }
    if with.stop.load(Ordering::Relaxed) {
        let path = from.first().map_or(Path::new(""), |from| from.path);
        return Err(Error::Stopped { path: path.to_path_buf() });
    }
    Ok(())
}

impl From<'_> {
    fn one<T: Target, S: Stage<T>>(
        &self,
        job: Job<'_, T>,
        stage: &S,
        left: Option<&Left<'_>>,
    ) -> Result<(), Error> {
        match job {
            Job::Gather { bytes, offset, target, .. } => {
                let origin = bytes.reach().0;
                let len = target.len();
                self.tally.gathered.fetch_add(len, Ordering::Relaxed);
                let mut piece = [(0, target)];
                self.fill(stage, 0..len, &mut piece, |buffer, _| {
                    self.sources.read(bytes, offset, buffer)
                })?;
                Ok(self.sources.check_unchanged(origin)?)
            }
            Job::Stretch(stretch) => {
                let ways = self.ways.get(stretch.origin.0 as usize).and_then(Option::as_ref);
                match ways.zip(self.sources.file(stretch.origin)) {
                    None => self.copy(stage, stretch),
                    Some((ways, file)) => {
                        Reading { from: self, ways, file, stage }.stretch(stretch, left)
                    }
                }
            }
        }
    }

    /// From memory.
    fn copy<T: Target, S: Stage<T>>(
        &self,
        stage: &S,
        mut stretch: Stretch<T>,
    ) -> Result<(), Error> {
        let had: u64 = stretch.pieces.iter().map(|(_, piece)| piece.len()).sum();
        self.tally.memory.fetch_add(had, Ordering::Relaxed);
        let origin = self.sources.origin(stretch.origin);
        self.fill(stage, stretch.range, &mut stretch.pieces, |buffer, at| {
            origin.read_exact_at(buffer, at)
        })
    }

    /// Has `execute` fill each piece, or all of the range and what lies between where the pieces are no memory.
    fn fill<T, S: Stage<T>>(
        &self,
        stage: &S,
        range: Range<u64>,
        pieces: &mut [(u64, T)],
        read: impl Fn(&mut [u8], u64) -> Result<(), source::Error>,
    ) -> Result<(), Error> {
        if let Some(pieces) = in_place::<T, S>(pieces) {
            return Ok(pieces.into_iter().try_for_each(|(at, piece)| read(piece, at))?);
        }
        let len = (range.end - range.start) as usize;
        stage.pass(self.path, range.start, pieces, |buffer| {
            read(&mut buffer[..len], range.start).map(Some)
        })?;
        Ok(())
    }
}

/// The ways to read each origin.
pub fn ways(sources: &Sources, origins: u32) -> Box<[Option<Ways>]> {
    (0..origins).map(|n| sources.file(OriginId(n)).map(Ways::of)).collect()
}
