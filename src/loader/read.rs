//! Does what a plan says, on several threads.
//!
//! In: checkpoints, and [`Job`]s of them whose targets are memory. Out: nothing, when all of it is filled
//! with bytes that are what was parsed; or the first error, and memory of no worth. How each stretch is
//! read is decided when its turn comes: what the page cache has is copied from there, the rest is read past
//! it, and what is tiny or comes from another machine plainly. A thread has one buffer, so that memory is
//! bounded by their number.

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
use super::memory::Buffers;
use super::plan::{Job, Stretch};

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
pub struct With<'a> {
    pub how: How,
    pub buffers: &'a Buffers,
    /// Set by whoever wants no more.
    pub stop: &'a AtomicBool,
}

/// Does all of it, for as many checkpoints as there are.
pub fn read(
    from: &[From<'_>],
    jobs: VecDeque<Job<'_, &mut [u8]>>,
    with: &With<'_>,
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
            if let Err(error) = from[of].one(job, with.buffers, left) {
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
        with.buffers.trim();
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
    fn one(
        &self,
        job: Job<'_, &mut [u8]>,
        buffers: &Buffers,
        left: Option<&Left<'_>>,
    ) -> Result<(), Error> {
        match job {
            Job::Gather { bytes, offset, target, .. } => {
                let origin = bytes.reach().0;
                self.tally.gathered.fetch_add(target.len() as u64, Ordering::Relaxed);
                self.sources.read(bytes, offset, target)?;
                Ok(self.sources.check_unchanged(origin)?)
            }
            Job::Stretch(stretch) => {
                let ways = self.ways.get(stretch.origin.0 as usize).and_then(Option::as_ref);
                match ways.zip(self.sources.file(stretch.origin)) {
                    None => self.copy(stretch),
                    Some((ways, file)) => {
                        Reading { from: self, ways, file, buffers }.stretch(stretch, left)
                    }
                }
            }
        }
    }

    /// From memory.
    fn copy(&self, stretch: Stretch<&mut [u8]>) -> Result<(), Error> {
        for (at, piece) in stretch.pieces {
            self.tally.memory.fetch_add(piece.len() as u64, Ordering::Relaxed);
            self.sources.origin(stretch.origin).read_exact_at(piece, at)?;
        }
        Ok(())
    }
}

/// A file of a checkpoint that a stretch of is read.
struct Reading<'a> {
    from: &'a From<'a>,
    ways: &'a Ways,
    file: &'a OpenFile,
    buffers: &'a Buffers,
}

impl Reading<'_> {
    fn stretch(&self, stretch: Stretch<&mut [u8]>, left: Option<&Left<'_>>) -> Result<(), Error> {
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
            ways.read(file, buffer, there, aligned.start)
        })?;
        let tally = match way {
            Way::Direct => &tally.direct,
            Way::Buffered => &tally.buffered,
        };
        tally.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// From the page cache; whether all of it was there.
    fn cached(&self, range: &Range<u64>, pieces: &mut [(u64, &mut [u8])]) -> Result<bool, Error> {
        let Reading { ways, file, .. } = self;
        let there = if is_scattered(range, pieces) {
            let mut there = false;
            self.through(range, pieces, |buffer, aligned| {
                let len = (range.end - aligned.start) as usize;
                there = ways.read_cached(file, &mut buffer[..len], aligned.start);
                Ok(Way::Buffered)
            })?;
            there
        } else {
            pieces.iter_mut().all(|(at, piece)| ways.read_cached(file, piece, *at))
        };
        file.check_unchanged()?;
        Ok(there)
    }

    /// Through the page cache.
    fn buffered(&self, range: &Range<u64>, pieces: &mut [(u64, &mut [u8])]) -> Result<(), Error> {
        let Reading { ways, file, .. } = self;
        if !is_scattered(range, pieces) {
            return Ok(pieces
                .iter_mut()
                .try_for_each(|(at, piece)| ways.read_buffered(file, piece, *at))?);
        }
        if range.end - range.start <= TINY {
            // Fresh memory of the size of a buffer would cost many times what is read.
            let mut tiny = vec![0; (range.end - range.start) as usize];
            ways.read_buffered(file, &mut tiny, range.start)?;
            copy_out(&tiny, range.start, pieces);
            return Ok(());
        }
        self.through(range, pieces, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            ways.read_buffered(file, &mut buffer[..len], aligned.start)?;
            Ok(Way::Buffered)
        })?;
        Ok(())
    }

    /// Reads all of a range into a buffer, and copies the pieces out.
    fn through(
        &self,
        range: &Range<u64>,
        pieces: &mut [(u64, &mut [u8])],
        read: impl FnOnce(&mut [u8], Range<u64>) -> Result<Way, source::Error>,
    ) -> Result<Way, Error> {
        const ALIGNMENT: u64 = DIRECT_ALIGNMENT as u64;
        let start = range.start / ALIGNMENT * ALIGNMENT;
        let end = range.end.next_multiple_of(ALIGNMENT);
        let done = self.buffers.with(|buffer| {
            let buffer = &mut buffer[..(end - start) as usize];
            let way = read(buffer, start..end)?;
            copy_out(buffer, start, pieces);
            Ok::<Way, source::Error>(way)
        });
        let path = || self.from.path.to_path_buf();
        Ok(done.map_err(|_| Error::Memory { path: path(), bytes: BUFFER as u64 })??)
    }
}

/// Fills the pieces of what was read from `start` on.
fn copy_out(read: &[u8], start: u64, pieces: &mut [(u64, &mut [u8])]) {
    for (at, piece) in pieces {
        let from = (*at - start) as usize;
        piece.copy_from_slice(&read[from..from + piece.len()]);
    }
}

fn is_scattered(range: &Range<u64>, pieces: &[(u64, &mut [u8])]) -> bool {
    (range.end - range.start) / (pieces.len() as u64) < SCATTERED
}

/// The ways to read each origin.
pub fn ways(sources: &Sources, origins: u32) -> Box<[Option<Ways>]> {
    (0..origins).map(|n| sources.file(OriginId(n)).map(Ways::of)).collect()
}
