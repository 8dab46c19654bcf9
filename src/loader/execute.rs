//! Executes the plan of a load on several threads.
//!
//! Each thread takes one job after the other, and decides how to read it when its turn comes. What the page cache has is
//! copied from there, the rest is read past it, and tiny extents go through it. After each read the file is checked to be
//! what was parsed, and its bytes are counted by how they were read. A thread fills one staging buffer at a time, so that
//! the number of threads bounds the memory.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::checkpoint::{ConvertedRun, OpenOrigins, OriginId, TensorBytes};
use crate::source::{
    DIRECT_ALIGNMENT_BYTES, FileReader, ReadAt, ReadMode, SourceError, WholeFileGuard,
};
use crate::threads::{lock, try_spawn};
use crate::virtual_file::{ReadExtent, ReadJob, Target};

use super::error::LoadError;
use super::sink::{Sink, copy_out, in_place_targets};

/// An extent of at most so many bytes is read through the page cache: asking what is cached would cost as much.
const MAX_PLAIN_READ_BYTES: u64 = 64 << 10;

/// Targets that are shorter than this on average are read together and copied out.
const MIN_IN_PLACE_BYTES: u64 = 16 << 10;

/// How much a load loaded, how fast, and how each byte was read.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// The number of tensors, or of slices of tensors.
    pub tensors: usize,
    /// The number of their bytes.
    pub bytes: u64,
    /// The duration of the load.
    pub seconds: f64,
    /// Bytes copied out of the page cache.
    pub cached: u64,
    /// Bytes read past the page cache.
    pub direct: u64,
    /// Bytes that GPUDirect Storage wrote to a device.
    pub gpudirect: u64,
    /// Bytes read through the page cache.
    pub buffered: u64,
    /// Bytes that stores sent.
    pub remote: u64,
    /// Bytes of stores that were in the cache on disk.
    pub disk_cached: u64,
    /// Bytes that are strided or byte-swapped in files of this machine, cast on the host, or changed by deltas.
    pub gathered: u64,
    /// Bytes of tensors that were cast, in their new type.
    pub cast: u64,
    /// The part of `cast` that was cast on devices. How it was read is counted in bytes before the cast.
    pub device_cast: u64,
    /// Bytes that were in memory already.
    pub memory: u64,
    /// Why bytes were not read from the sources themselves, and of how many tensors.
    pub fallbacks: BTreeMap<String, usize>,
    /// The first reason why bytes for a device went through the host's memory although GPUDirect was asked for.
    pub without_gpudirect: Option<String>,
}

/// Bytes by how they were read.
#[derive(Debug, Default)]
pub struct ByteTally {
    pub cached: AtomicU64,
    pub direct: AtomicU64,
    pub gpudirect: AtomicU64,
    pub buffered: AtomicU64,
    pub remote: AtomicU64,
    pub disk_cached: AtomicU64,
    pub gathered: AtomicU64,
    pub cast: AtomicU64,
    pub memory: AtomicU64,
}

impl ByteTally {
    /// Adds bytes of a store, of which the cache on disk had some.
    fn add_remote(&self, bytes: u64, disk_cached: u64) {
        self.disk_cached.fetch_add(disk_cached, Ordering::Relaxed);
        self.remote.fetch_add(bytes - disk_cached.min(bytes), Ordering::Relaxed);
    }
}

impl LoadReport {
    /// Adds so many tensors of one checkpoint. `fallback` is why they were read through a mount.
    pub fn add_checkpoint(&mut self, tensors: usize, tally: &ByteTally, fallback: Option<&str>) {
        let ByteTally {
            cached,
            direct,
            gpudirect,
            buffered,
            remote,
            disk_cached,
            gathered,
            cast,
            memory,
        } = tally;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.tensors += tensors;
        self.cached += read(cached);
        self.direct += read(direct);
        self.gpudirect += read(gpudirect);
        self.buffered += read(buffered);
        self.remote += read(remote);
        self.disk_cached += read(disk_cached);
        self.gathered += read(gathered);
        self.cast += read(cast);
        self.memory += read(memory);
        if let Some(reason) = fallback {
            *self.fallbacks.entry(reason.to_owned()).or_default() += tensors;
        }
    }

    /// Adds what another load did.
    pub fn merge(&mut self, other: &LoadReport) {
        let LoadReport {
            tensors,
            bytes,
            seconds,
            cached,
            direct,
            gpudirect,
            buffered,
            remote,
            disk_cached,
            gathered,
            cast,
            device_cast,
            memory,
            fallbacks,
            without_gpudirect,
        } = other;
        self.tensors += tensors;
        self.bytes += bytes;
        self.seconds += seconds;
        self.cached += cached;
        self.direct += direct;
        self.gpudirect += gpudirect;
        self.buffered += buffered;
        self.remote += remote;
        self.disk_cached += disk_cached;
        self.gathered += gathered;
        self.cast += cast;
        self.device_cast += device_cast;
        self.memory += memory;
        for (reason, tensors) in fallbacks {
            *self.fallbacks.entry(reason.clone()).or_default() += tensors;
        }
        if self.without_gpudirect.is_none() {
            self.without_gpudirect.clone_from(without_gpudirect);
        }
    }
}

/// How many threads read at once, and what they leave behind.
#[derive(Clone, Copy, Debug)]
pub struct Concurrency {
    pub threads: usize,
    /// Whether the user gave no number of threads.
    pub is_default: bool,
    /// Threads for which the memory limit allows buffers.
    pub max_threads: usize,
    /// Leave in the page cache only what was there before.
    pub leave_cache: bool,
}

impl Concurrency {
    /// Sets a thread for each concurrent request of a source, unless the user set a number.
    pub fn for_requests(self, max_count: usize) -> Concurrency {
        let threads = if self.is_default { max_count.min(self.max_threads) } else { self.threads };
        Concurrency { threads, ..self }
    }

    /// The same with another number of threads, if one is given; within the memory limit.
    pub fn with_threads(self, threads: Option<usize>) -> Concurrency {
        let threads = threads.unwrap_or(self.threads).clamp(1, self.max_threads);
        Concurrency { threads, ..self }
    }
}

/// A checkpoint that a load reads from.
pub struct LoadSource<'a> {
    /// The path in errors.
    pub path: &'a Path,
    pub sources: &'a OpenOrigins,
    /// The reader of each origin that is a file.
    pub files: &'a [Option<FileReader>],
    pub tally: ByteTally,
}

impl LoadSource<'_> {
    /// The reader of an origin that is a file.
    fn file(&self, origin: OriginId) -> Option<&FileReader> {
        self.files.get(origin.0 as usize)?.as_ref()
    }
}

/// What a load reads with.
pub struct LoadContext<'a, S> {
    pub concurrency: Concurrency,
    pub sink: &'a S,
    /// Set by the caller to stop the load.
    pub stop: &'a AtomicBool,
}

/// Executes all jobs. `Ok` once every target is filled from unchanged files. On error the targets' contents are
/// unspecified.
pub fn execute<T: Target + Send, S: Sink<T>>(
    sources: &[LoadSource<'_>],
    jobs: VecDeque<ReadJob<'_, T>>,
    context: &LoadContext<'_, S>,
) -> Result<(), LoadError> {
    let LoadContext { concurrency, sink, stop } = context;
    let threads = concurrency.threads.min(jobs.len());
    let reader = |source| SourceReader { source, sink: *sink, guards: BTreeMap::new() };
    let mut readers: Vec<SourceReader<'_, S>> = sources.iter().map(reader).collect();
    if concurrency.leave_cache {
        for job in &jobs {
            job.origins().for_each(|origin| readers[job.checkpoint()].guard_page_cache(origin));
        }
    }
    let jobs = Mutex::new(jobs);
    let failed = Mutex::new(None);
    let is_over = || stop.load(Ordering::Relaxed) || lock(&failed).is_some();
    let work = || {
        sink.run_reader(|| {
            while !is_over() {
                let Some(job) = lock(&jobs).pop_front() else { return };
                if let Err(error) = readers[job.checkpoint()].run_job(job) {
                    lock(&failed).get_or_insert(error);
                }
            }
        })
    };
    if threads <= 1 {
        work();
    } else {
        std::thread::scope(|scope| {
            // Where the system starts fewer threads, those do it all.
            let _others: Vec<_> = (1..threads).map_while(|_| try_spawn(scope, work)).collect();
            work();
        });
        sink.finish();
    }
    if let Some(error) = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        return Err(error);
    }
    if stop.load(Ordering::Relaxed) {
        let path = sources.first().map_or(Path::new(""), |source| source.path);
        return Err(LoadError::Stopped { path: path.to_path_buf() });
    }
    Ok(())
}

/// Reads jobs of one checkpoint.
struct SourceReader<'a, S> {
    source: &'a LoadSource<'a>,
    sink: &'a S,
    /// What keeps the page cache of each origin as it was, where that is asked for.
    guards: BTreeMap<OriginId, WholeFileGuard<'a>>,
}

impl<S> SourceReader<'_, S> {
    fn guard_page_cache(&mut self, origin: OriginId) {
        for origin in self.source.sources.read_origins(origin) {
            if let Some(file) = self.source.file(origin) {
                self.guards.entry(origin).or_insert_with(|| file.guard_whole_file());
            }
        }
    }

    fn run_job<T: Target>(&self, job: ReadJob<'_, T>) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        let LoadSource { sources, tally, .. } = self.source;
        match job {
            ReadJob::Extent(extent) if !extent.strided.is_empty() => self.read_strided(extent),
            ReadJob::Strided { bytes, offset, mut target, .. } => {
                let len = target.len();
                tally.gathered.fetch_add(len, Ordering::Relaxed);
                if bytes.is_cast() {
                    tally.cast.fetch_add(len, Ordering::Relaxed);
                }
                if self.read_converted(bytes, offset, &mut target)? {
                    return Ok(());
                }
                sources.advise_will_need(bytes, offset, len);
                self.fill(0..len, &mut [(0, target)], |buffer, _| {
                    sources.read(bytes, offset, buffer)
                })?;
                Ok(sources.check_tensor_unchanged(bytes)?)
            }
            ReadJob::Extent(extent) => match self.source.file(extent.origin) {
                None if sources.is_patched(extent.origin) => self.read_patched(extent),
                None => self.copy_from_memory(extent),
                Some(file) => self.read_extent(file, extent),
            },
        }
    }

    /// Fills host memory with values that are cast or byte-swapped, past the page cache. Returns false if they must be read
    /// otherwise.
    fn read_converted<T: Target>(
        &self,
        bytes: &TensorBytes,
        offset: u64,
        target: &mut T,
    ) -> Result<bool, LoadError>
    where
        S: Sink<T>,
    {
        let Some(out) = S::host_memory(target) else { return Ok(false) };
        let file = |origin| self.source.file(origin);
        let len = out.len();
        let Some(run) = ConvertedRun::find(bytes, offset, len, file) else { return Ok(false) };
        self.sink
            .stage(self.source.path, 0, &mut [], |scratch| run.read(out, scratch).map(Some))?;
        Ok(true)
    }

    /// Reads an extent that has bytes for many places of a tensor.
    fn read_strided<T: Target>(&self, extent: ReadExtent<T>) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        let ReadExtent { origin, range, mut targets, strided, .. } = extent;
        let LoadSource { path, sources, tally, .. } = self.source;
        let len = range.end - range.start;
        self.sink.stage(path, range.start, &mut targets, |buffer| {
            let buffer = &mut buffer[..len as usize];
            let from_store = match self.source.file(origin) {
                Some(file) => file.read_remote(&mut [(range.start, buffer)])?,
                None => None,
            };
            match from_store {
                Some(disk_cached) => tally.add_remote(len, disk_cached),
                None => {
                    sources.origin(origin).read_exact_at(buffer, range.start)?;
                    sources.check_unchanged(origin)?;
                    tally.gathered.fetch_add(len, Ordering::Relaxed);
                }
            }
            for part in strided {
                part.copy_from(buffer, range.start, S::host_memory);
            }
            Ok(Some(()))
        })?;
        Ok(())
    }

    fn copy_from_memory<T: Target>(&self, mut extent: ReadExtent<T>) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        let len: u64 = extent.targets.iter().map(|(_, target)| target.len()).sum();
        self.source.tally.memory.fetch_add(len, Ordering::Relaxed);
        let origin = self.source.sources.origin(extent.origin);
        self.fill(extent.range, &mut extent.targets, |buffer, at| origin.read_exact_at(buffer, at))
    }

    fn read_patched<T: Target>(&self, mut extent: ReadExtent<T>) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        let LoadSource { sources, tally, .. } = self.source;
        let len: u64 = extent.targets.iter().map(|(_, target)| target.len()).sum();
        tally.gathered.fetch_add(len, Ordering::Relaxed);
        let patched = sources.origin(extent.origin);
        self.fill(extent.range, &mut extent.targets, |buffer, at| {
            patched.read_exact_at(buffer, at)
        })?;
        Ok(sources.check_unchanged(extent.origin)?)
    }

    /// Has `read` fill each target in place, or a staging buffer with the whole range.
    fn fill<T>(
        &self,
        range: Range<u64>,
        targets: &mut [(u64, T)],
        read: impl Fn(&mut [u8], u64) -> Result<(), SourceError>,
    ) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        if let Some(targets) = in_place_targets::<T, S>(targets) {
            return Ok(targets.into_iter().try_for_each(|(at, target)| read(target, at))?);
        }
        // As for files, values lie in the buffer as in the origin.
        self.read_staged(&range, targets, |buffer, aligned| {
            let start = aligned.start;
            let filled = (range.start - start) as usize..(range.end - start) as usize;
            read(&mut buffer[filled], range.start).map(Some)
        })?;
        Ok(())
    }

    /// Reads an extent of a file in the way that is best for it now.
    fn read_extent<T: Target>(
        &self,
        file: &FileReader,
        extent: ReadExtent<T>,
    ) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        let ReadExtent { origin, range, mut targets, .. } = extent;
        let tally = &self.source.tally;
        let len = range.end - range.start;
        if let Some(mut targets) = in_place_targets::<T, S>(&mut targets)
            && let Some(disk_cached) = file.read_remote(&mut targets)?
        {
            tally.add_remote(len, disk_cached);
            return Ok(());
        }
        let is_tiny = len <= MAX_PLAIN_READ_BYTES;
        if !is_tiny && file.is_cached(&range) && self.read_cached(file, &range, &mut targets)? {
            tally.cached.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if !is_tiny
            && self.sink.read_to_device(self.source.path, file.open_file(), &range, &mut targets)?
        {
            tally.gpudirect.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if is_tiny || !file.is_direct() {
            self.read_buffered(file, &range, &mut targets)?;
            tally.buffered.fetch_add(len, Ordering::Relaxed);
            if let Some(guard) = self.guards.get(&origin) {
                guard.evict_range(&range);
            }
            return Ok(());
        }
        let mode = match in_place_targets::<T, S>(&mut targets) {
            Some(mut targets) => self.read_staged(&range, &mut [], |scratch, aligned| {
                file.read_into_place(&aligned, &mut targets, scratch).map(Some)
            })?,
            None => self.read_staged(&range, &mut targets, |buffer, aligned| {
                let available = (aligned.end.min(file.open_file().size()) - aligned.start) as usize;
                file.read_aligned(buffer, available, aligned.start).map(Some)
            })?,
        };
        let tally = match mode {
            Some(ReadMode::Buffered) => &tally.buffered,
            _ => &tally.direct,
        };
        tally.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// Copies out of the page cache; returns whether all of it was there.
    fn read_cached<T: Target>(
        &self,
        file: &FileReader,
        range: &Range<u64>,
        targets: &mut [(u64, T)],
    ) -> Result<bool, LoadError>
    where
        S: Sink<T>,
    {
        if !is_scattered(range, targets)
            && let Some(targets) = in_place_targets::<T, S>(targets)
        {
            let mut targets = targets.into_iter();
            let is_cached = targets.all(|(at, target)| file.read_cached(target, at));
            file.open_file().check_unchanged()?;
            return Ok(is_cached);
        }
        let staged = self.read_staged(range, targets, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            let is_cached = file.read_cached(&mut buffer[..len], aligned.start);
            file.open_file().check_unchanged()?;
            Ok(is_cached.then_some(()))
        })?;
        Ok(staged.is_some())
    }

    /// Reads through the page cache.
    fn read_buffered<T: Target>(
        &self,
        file: &FileReader,
        range: &Range<u64>,
        targets: &mut [(u64, T)],
    ) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        let is_tiny = range.end - range.start <= MAX_PLAIN_READ_BYTES;
        let is_scattered = is_scattered(range, targets);
        if (!is_scattered || is_tiny)
            && let Some(mut targets) = in_place_targets::<T, S>(targets)
        {
            if is_scattered {
                // A fresh staging buffer would cost many times what is read.
                let mut bytes = vec![0; (range.end - range.start) as usize];
                file.read_buffered(&mut bytes, range.start)?;
                copy_out(&bytes, range.start, &mut targets);
                return Ok(());
            }
            for (at, target) in targets {
                file.read_buffered(target, at)?;
            }
            return Ok(());
        }
        self.read_staged(range, targets, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            file.read_buffered(&mut buffer[..len], aligned.start).map(Some)
        })?;
        Ok(())
    }

    /// Has `read` fill a staging buffer with a range, and with more on both sides so that both ends are aligned.
    fn read_staged<T, W>(
        &self,
        range: &Range<u64>,
        targets: &mut [(u64, T)],
        read: impl FnOnce(&mut [u8], Range<u64>) -> Result<Option<W>, SourceError>,
    ) -> Result<Option<W>, LoadError>
    where
        S: Sink<T>,
    {
        const ALIGNMENT_BYTES: u64 = DIRECT_ALIGNMENT_BYTES as u64;
        let start = range.start / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
        let end = range.end.next_multiple_of(ALIGNMENT_BYTES);
        self.sink.stage(self.source.path, start, targets, |buffer| {
            read(&mut buffer[..(end - start) as usize], start..end)
        })
    }
}

fn is_scattered<T>(range: &Range<u64>, targets: &[(u64, T)]) -> bool {
    (range.end - range.start) / (targets.len() as u64) < MIN_IN_PLACE_BYTES
}
