//! Does what a plan says, on several threads.
//!
//! In: checkpoints, [`Job`]s of them, and a [`Stage`] that knows the way to their targets. Out: nothing, when
//! all of it was handed on and is what was parsed; or the first error, and targets of no worth. How each stretch
//! is read is decided when its turn comes: what the page cache has is copied from there, the rest is read past
//! it, and what is tiny or comes from another machine plainly. A thread fills one buffer of the stage at a
//! time, so that memory is bounded by their number.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::checkpoint::{OpenSources, OriginId};
use crate::source::{self, OpenFile, ReadStrategy, WholeFileGuard};
use crate::threads::{lock, try_spawn};

use super::LoadError;
use super::plan::{LoadExtent, LoadJob, Target};
use super::read_extent::{ExtentReader, in_place_targets};
use super::sink::Sink;

/// Where stretches are cut: enough that a disk is not asked too often, and small enough that several
/// threads have something to do even for one large tensor.
pub const MAX_EXTENT_BYTES: u64 = 4 << 20;

/// What a thread passes bytes through: a stretch, which what is read around it to be aligned does not
/// lead out of.
pub const BUFFER_BYTES: usize = MAX_EXTENT_BYTES as usize;

/// How much is to be done at once, and how.
#[derive(Clone, Copy, Debug)]
pub struct Concurrency {
    pub threads: usize,
    /// Threads for which there may be buffers.
    pub max_threads: usize,
    /// Leave in the page cache only what was there before.
    pub leave_cache: bool,
}

impl Concurrency {
    /// On so many threads at the most, if they are said; but within the memory.
    pub fn with_threads(self, threads: Option<usize>) -> Concurrency {
        Concurrency { threads: threads.unwrap_or(self.threads).clamp(1, self.max_threads), ..self }
    }
}

/// Bytes by how they were read.
#[derive(Debug, Default)]
pub struct ByteTally {
    pub cached: AtomicU64,
    pub direct: AtomicU64,
    pub gpudirect: AtomicU64,
    pub buffered: AtomicU64,
    pub gathered: AtomicU64,
    pub memory: AtomicU64,
}

/// A checkpoint that a load reads from.
pub struct LoadSource<'a> {
    /// To be told with what goes wrong.
    pub path: &'a Path,
    pub sources: &'a OpenSources,
    /// The ways to read each origin that is a file.
    pub strategies: &'a [Option<ReadStrategy>],
    pub tally: ByteTally,
}

/// What a load reads with.
pub struct LoadContext<'a, S> {
    pub concurrency: Concurrency,
    pub sink: &'a S,
    /// Set by whoever wants no more.
    pub stop: &'a AtomicBool,
}

/// Does all of it, for as many checkpoints as there are.
pub fn execute<T: Target + Send, S: Sink<T>>(
    from: &[LoadSource<'_>],
    jobs: VecDeque<LoadJob<'_, T>>,
    with: &LoadContext<'_, S>,
) -> Result<(), LoadError> {
    let threads = with.concurrency.threads.min(jobs.len());
    let guards = with.concurrency.leave_cache.then(|| page_cache_guards(from, &jobs));
    let jobs = Mutex::new(jobs);
    let failed = Mutex::new(None);
    let is_over = || with.stop.load(Ordering::Relaxed) || lock(&failed).is_some();
    let work = || {
        with.sink.run_reader(|| {
            while !is_over() {
                let Some(job) = lock(&jobs).pop_front() else { return };
                let origin = job.origin();
                let guard = guards.as_ref().and_then(|guards| guards.get(&origin));
                if let Err(error) = from[origin.0].run_job(job, with.sink, guard) {
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
            let _others: Vec<_> = (1..threads).map_while(|_| try_spawn(scope, work)).collect();
            work();
        });
        with.sink.finish();
    }
    if let Some(error) = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        return Err(error);
    }
    if with.stop.load(Ordering::Relaxed) {
        let path = from.first().map_or(Path::new(""), |from| from.path);
        return Err(LoadError::Stopped { path: path.to_path_buf() });
    }
    Ok(())
}

/// Guards of the files that the jobs read, by checkpoint and origin.
fn page_cache_guards<'a, T>(
    from: &'a [LoadSource<'_>],
    jobs: &VecDeque<LoadJob<'_, T>>,
) -> BTreeMap<(usize, OriginId), WholeFileGuard<'a>> {
    let mut guards = BTreeMap::new();
    for (checkpoint, origin) in jobs.iter().map(LoadJob::origin) {
        if let Some((strategy, file)) = from[checkpoint].file(origin) {
            let guard = || strategy.guard_whole_file(file);
            guards.entry((checkpoint, origin)).or_insert_with(guard);
        }
    }
    guards
}

impl LoadSource<'_> {
    /// The file of an origin, if it is one.
    fn file(&self, origin: OriginId) -> Option<(&ReadStrategy, &OpenFile)> {
        let strategy = self.strategies.get(origin.0 as usize).and_then(Option::as_ref);
        strategy.zip(self.sources.file(origin))
    }

    fn run_job<T: Target, S: Sink<T>>(
        &self,
        job: LoadJob<'_, T>,
        stage: &S,
        guard: Option<&WholeFileGuard<'_>>,
    ) -> Result<(), LoadError> {
        match job {
            LoadJob::Strided { bytes, offset, target, .. } => {
                let origin = bytes.extent().0;
                let len = target.len();
                self.tally.gathered.fetch_add(len, Ordering::Relaxed);
                let mut piece = [(0, target)];
                self.fill(stage, 0..len, &mut piece, |buffer, _| {
                    self.sources.read(bytes, offset, buffer)
                })?;
                Ok(self.sources.check_unchanged(origin)?)
            }
            LoadJob::Extent(stretch) => match self.file(stretch.origin) {
                None => self.copy_from_memory(stage, stretch),
                Some((ways, file)) => {
                    ExtentReader { source: self, strategy: ways, file, sink: stage }
                        .read(stretch, guard)
                }
            },
        }
    }

    /// From memory.
    fn copy_from_memory<T: Target, S: Sink<T>>(
        &self,
        stage: &S,
        mut stretch: LoadExtent<T>,
    ) -> Result<(), LoadError> {
        let had: u64 = stretch.pieces.iter().map(|(_, piece)| piece.len()).sum();
        self.tally.memory.fetch_add(had, Ordering::Relaxed);
        let origin = self.sources.origin(stretch.origin);
        self.fill(stage, stretch.range, &mut stretch.pieces, |buffer, at| {
            origin.read_exact_at(buffer, at)
        })
    }

    /// Has `execute` fill each piece, or all of the range and what lies between where the pieces are no memory.
    fn fill<T, S: Sink<T>>(
        &self,
        stage: &S,
        range: Range<u64>,
        pieces: &mut [(u64, T)],
        read: impl Fn(&mut [u8], u64) -> Result<(), source::SourceError>,
    ) -> Result<(), LoadError> {
        if let Some(pieces) = in_place_targets::<T, S>(pieces) {
            return Ok(pieces.into_iter().try_for_each(|(at, piece)| read(piece, at))?);
        }
        let len = (range.end - range.start) as usize;
        stage.stage(self.path, range.start, pieces, |buffer| {
            read(&mut buffer[..len], range.start).map(Some)
        })?;
        Ok(())
    }
}

/// The ways to read each origin.
pub fn read_strategies(sources: &OpenSources, origins: u32) -> Box<[Option<ReadStrategy>]> {
    (0..origins).map(|n| sources.file(OriginId(n)).map(ReadStrategy::new)).collect()
}
