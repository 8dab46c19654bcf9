//! Does what a plan says, on several threads.
//!
//! In: [`Job`]s whose targets are memory. Out: nothing, when all of it is filled with bytes that are what
//! was parsed; or the first error, and memory of no worth. How each stretch is read is decided when its
//! turn comes: what the page cache has is copied from there, the rest is read past it, and what is tiny
//! or comes from another machine plainly. A thread has one buffer, so that memory is bounded by their
//! number.

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

/// Bytes by how they were read.
#[derive(Debug, Default)]
pub struct Tally {
    pub cached: AtomicU64,
    pub direct: AtomicU64,
    pub buffered: AtomicU64,
    pub gathered: AtomicU64,
    pub memory: AtomicU64,
}

/// What a load reads from.
pub struct From<'a> {
    /// To be told with what goes wrong.
    pub path: &'a Path,
    pub sources: &'a Sources,
    /// The ways to read each origin that is a file.
    pub ways: &'a [Option<Ways>],
    pub buffers: &'a Buffers,
    pub tally: &'a Tally,
    /// Set by whoever wants no more.
    pub stop: &'a AtomicBool,
}

/// Does all of it.
pub fn read(from: &From<'_>, jobs: VecDeque<Job<'_, &mut [u8]>>, how: How) -> Result<(), Error> {
    let threads = how.threads.min(jobs.len());
    let left = how.leave_cache.then(|| {
        let origins = jobs.iter().map(Job::origin);
        Left::of(origins, from.sources, from.ways)
    });
    let jobs = Mutex::new(jobs);
    let failed = Mutex::new(None);
    let is_over = || from.stop.load(Ordering::Relaxed) || lock(&failed).is_some();
    let work = || {
        while !is_over() {
            let Some(job) = lock(&jobs).pop_front() else { return };
            if let Err(error) = from.one(job, left.as_ref()) {
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
        from.buffers.trim();
    }
    if let Some(error) = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        return Err(error);
    }
    if from.stop.load(Ordering::Relaxed) {
        return Err(Error::Stopped { path: from.path.to_path_buf() });
    }
    Ok(())
}

impl From<'_> {
    fn one(&self, job: Job<'_, &mut [u8]>, left: Option<&Left<'_>>) -> Result<(), Error> {
        match job {
            Job::Gather { bytes, offset, target } => {
                let origin = bytes.reach().0;
                self.tally.gathered.fetch_add(target.len() as u64, Ordering::Relaxed);
                self.sources.read(bytes, offset, target)?;
                Ok(self.sources.check_unchanged(origin)?)
            }
            Job::Stretch(stretch) => {
                let ways = self.ways.get(stretch.origin.0 as usize).and_then(Option::as_ref);
                match ways.zip(self.sources.file(stretch.origin)) {
                    None => self.copy(stretch),
                    Some((ways, file)) => self.stretch(ways, file, stretch, left),
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

    fn stretch(
        &self,
        ways: &Ways,
        file: &OpenFile,
        stretch: Stretch<&mut [u8]>,
        left: Option<&Left<'_>>,
    ) -> Result<(), Error> {
        let Stretch { origin, range, mut pieces } = stretch;
        let len = range.end - range.start;
        let is_tiny = len <= TINY;
        if !is_tiny
            && ways.is_cached(file, &range)
            && self.cached(ways, file, &range, &mut pieces)?
        {
            self.tally.cached.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if is_tiny || !ways.is_direct(file) {
            self.buffered(ways, file, &range, &mut pieces)?;
            self.tally.buffered.fetch_add(len, Ordering::Relaxed);
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
            Way::Direct => &self.tally.direct,
            Way::Buffered => &self.tally.buffered,
        };
        tally.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// From the page cache; whether all of it was there.
    fn cached(
        &self,
        ways: &Ways,
        file: &OpenFile,
        range: &Range<u64>,
        pieces: &mut [(u64, &mut [u8])],
    ) -> Result<bool, Error> {
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

    fn buffered(
        &self,
        ways: &Ways,
        file: &OpenFile,
        range: &Range<u64>,
        pieces: &mut [(u64, &mut [u8])],
    ) -> Result<(), Error> {
        if is_scattered(range, pieces) {
            self.through(range, pieces, |buffer, aligned| {
                let len = (range.end - aligned.start) as usize;
                ways.read_buffered(file, &mut buffer[..len], aligned.start)?;
                Ok(Way::Buffered)
            })?;
            return Ok(());
        }
        for (at, piece) in pieces {
            ways.read_buffered(file, piece, *at)?;
        }
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
            for (at, piece) in pieces {
                let from = (*at - start) as usize;
                piece.copy_from_slice(&buffer[from..from + piece.len()]);
            }
            Ok::<Way, source::Error>(way)
        });
        let done = done
            .map_err(|_| Error::Memory { path: self.path.to_path_buf(), bytes: BUFFER as u64 })?;
        Ok(done?)
    }
}

fn is_scattered(range: &Range<u64>, pieces: &[(u64, &mut [u8])]) -> bool {
    (range.end - range.start) / (pieces.len() as u64) < SCATTERED
}

/// The ways to read each origin.
pub fn ways(sources: &Sources, origins: u32) -> Box<[Option<Ways>]> {
    (0..origins).map(|n| sources.file(OriginId(n)).map(Ways::of)).collect()
}
