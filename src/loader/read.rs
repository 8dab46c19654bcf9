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
use crate::source::{self, DIRECT_ALIGNMENT, OpenFile, Way, Ways};
use crate::threads::{another, lock};

use super::Error;
use super::left::Left;
use super::plan::{Job, Stretch, Target};
use super::stage::{Stage, copy_out};

/// Where stretches are cut: enough that a disk is not asked too often, and small enough that several
/// threads have something to do even for one large tensor.
pub const STRETCH: u64 = 4 << 20;

/// What a thread passes bytes through: a stretch, which what is read around it to be aligned does not
/// lead out of.
pub const BUFFER: usize = STRETCH as usize;

/// A stretch of no more than this is read plainly: asking what is cached would cost as much.
const TINY: u64 = 64 << 10;

/// Pieces that are shorter than this on average are read together and copied out.
const SCATTERED: u64 = 16 << 10;

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
        while !is_over() {
            let Some(job) = lock(&jobs).pop_front() else { return };
            let (of, _) = job.reads();
            let left = left.as_ref().map(|left| &left[of]);
            if let Err(error) = from[of].one(job, with.stage, left) {
                lock(&failed).get_or_insert(error);
            }
        }
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

    /// Has `read` fill each piece, or all of the range and what lies between where the pieces are no memory.
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

/// The memory of all pieces, if all of them are memory.
fn in_place<T, S: Stage<T>>(pieces: &mut [(u64, T)]) -> Option<Vec<(u64, &mut [u8])>> {
    pieces.iter_mut().map(|(at, piece)| Some((*at, S::memory(piece)?))).collect()
}

/// A file of a checkpoint that a stretch of is read.
struct Reading<'a, S> {
    from: &'a From<'a>,
    ways: &'a Ways,
    file: &'a OpenFile,
    stage: &'a S,
}

impl<S> Reading<'_, S> {
    fn stretch<T: Target>(&self, stretch: Stretch<T>, left: Option<&Left<'_>>) -> Result<(), Error>
    where
        S: Stage<T>,
    {
        let Stretch { origin, range, mut pieces, .. } = stretch;
        let Reading { from: From { tally, .. }, ways, file, .. } = self;
        let len = range.end - range.start;
        let is_tiny = len <= TINY;
        if !is_tiny && ways.is_cached(file, &range) && self.cached(&range, &mut pieces)? {
            tally.cached.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if is_tiny || !ways.is_direct(file) {
            self.buffered(&range, &mut pieces)?;
            tally.buffered.fetch_add(len, Ordering::Relaxed);
            if let Some(left) = left {
                left.let_go(origin, &range);
            }
            return Ok(());
        }
        let way = self.through(&range, &mut pieces, |buffer, aligned| {
            let there = (aligned.end.min(file.file().identity().size) - aligned.start) as usize;
            ways.read(file, buffer, there, aligned.start).map(Some)
        })?;
        let tally = match way {
            Some(Way::Buffered) => &tally.buffered,
            _ => &tally.direct,
        };
        tally.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// From the page cache; whether all of it was there.
    fn cached<T: Target>(&self, range: &Range<u64>, pieces: &mut [(u64, T)]) -> Result<bool, Error>
    where
        S: Stage<T>,
    {
        let Reading { ways, file, .. } = self;
        if !is_scattered(range, pieces)
            && let Some(pieces) = in_place::<T, S>(pieces)
        {
            let mut pieces = pieces.into_iter();
            let there = pieces.all(|(at, piece)| ways.read_cached(file, piece, at));
            file.check_unchanged()?;
            return Ok(there);
        }
        let there = self.through(range, pieces, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            let there = ways.read_cached(file, &mut buffer[..len], aligned.start);
            file.check_unchanged()?;
            Ok(there.then_some(Way::Buffered))
        })?;
        Ok(there.is_some())
    }

    /// Through the page cache.
    fn buffered<T: Target>(&self, range: &Range<u64>, pieces: &mut [(u64, T)]) -> Result<(), Error>
    where
        S: Stage<T>,
    {
        let Reading { ways, file, .. } = self;
        let (is_scattered, is_tiny) =
            (is_scattered(range, pieces), range.end - range.start <= TINY);
        if (!is_scattered || is_tiny)
            && let Some(mut pieces) = in_place::<T, S>(pieces)
        {
            if is_scattered {
                // Fresh memory of the size of a buffer would cost many times what is read.
                let mut tiny = vec![0; (range.end - range.start) as usize];
                ways.read_buffered(file, &mut tiny, range.start)?;
                copy_out(&tiny, range.start, &mut pieces);
                return Ok(());
            }
            let mut pieces = pieces.into_iter();
            return Ok(pieces.try_for_each(|(at, piece)| ways.read_buffered(file, piece, at))?);
        }
        self.through(range, pieces, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            ways.read_buffered(file, &mut buffer[..len], aligned.start)?;
            Ok(Some(Way::Buffered))
        })?;
        Ok(())
    }

    /// Has `read` fill memory with all of a range, and more on both sides so that both ends are aligned; then
    /// the pieces get theirs.
    fn through<T: Target>(
        &self,
        range: &Range<u64>,
        pieces: &mut [(u64, T)],
        read: impl FnOnce(&mut [u8], Range<u64>) -> Result<Option<Way>, source::Error>,
    ) -> Result<Option<Way>, Error>
    where
        S: Stage<T>,
    {
        const ALIGNMENT: u64 = DIRECT_ALIGNMENT as u64;
        let start = range.start / ALIGNMENT * ALIGNMENT;
        let end = range.end.next_multiple_of(ALIGNMENT);
        self.stage.pass(self.from.path, start, pieces, |buffer| {
            read(&mut buffer[..(end - start) as usize], start..end)
        })
    }
}

fn is_scattered<T>(range: &Range<u64>, pieces: &[(u64, T)]) -> bool {
    (range.end - range.start) / (pieces.len() as u64) < SCATTERED
}

/// The ways to read each origin.
pub fn ways(sources: &Sources, origins: u32) -> Box<[Option<Ways>]> {
    (0..origins).map(|n| sources.file(OriginId(n)).map(Ways::of)).collect()
}
