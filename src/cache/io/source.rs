//! What is known of one source of an open virtual file: whether it may keep us waiting, who reads it, and
//! how.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::checkpoint::OriginId;
use crate::source::{
    ActiveRead, DIRECT_ALIGNMENT_BYTES, OpenFile, PageCacheGuard, ReadStrategy, SourceError,
};
use crate::virtual_file::VirtualFileReader;

use crate::cache::Cache;
use crate::cache::counters::AtomicCounters;
use crate::cache::io::executor::IoExecutor;

pub struct SourceHandle {
    id: OriginId,
    /// Whether asking its filesystem never waits for anybody else. Memory is local.
    pub is_local: bool,
    /// The threads that may wait for it.
    pub executor: Arc<IoExecutor>,
    /// The file, if it is one.
    pub path: Option<PathBuf>,
    /// How to read the file, if it is one.
    access: Option<(ReadStrategy, PageCacheGuard)>,
}

impl SourceHandle {
    pub fn new(cache: &Cache, reader: &VirtualFileReader, number: u32) -> SourceHandle {
        let id = OriginId(number);
        let file = reader.file(id);
        let ways = file.map(ReadStrategy::new);
        let local = ways.as_ref().is_none_or(ReadStrategy::is_local);
        let lane = cache.executor(file.map(|file| file.file().identity().dev), local);
        let path = file.map(|file| file.file().path());
        let access = ways.map(|strategy| {
            let guard = strategy.guard_reads();
            (strategy, guard)
        });
        SourceHandle { id, is_local: local, executor: lane, path, access }
    }

    fn file<'a>(
        &'a self,
        reader: &'a VirtualFileReader,
    ) -> Option<(&'a ReadStrategy, &'a PageCacheGuard, &'a OpenFile)> {
        let (strategy, guard) = self.access.as_ref()?;
        Some((strategy, guard, reader.file(self.id)?))
    }

    /// Reads a range into aligned memory, past the page cache if the filesystem can, and else as `read_passing` does;
    /// where in it the range lies then, behind what had to be read before it.
    pub fn read(
        &self,
        reader: &VirtualFileReader,
        out: &mut [u8],
        range: &Range<u64>,
        counting: &AtomicCounters,
    ) -> Result<Range<usize>, SourceError> {
        let before = range.start as usize % DIRECT_ALIGNMENT_BYTES;
        let len = before + (range.end - range.start) as usize;
        let start = range.start - before as u64;
        let out = &mut out[..len.next_multiple_of(DIRECT_ALIGNMENT_BYTES)];
        let file = self.file(reader);
        let count = if file
            .map_or(Ok(false), |(strategy, _, file)| strategy.read_direct(file, out, start))?
        {
            &counting.direct_bytes
        } else {
            self.read_through(reader, &mut out[..len], start)?;
            &counting.buffered_bytes
        };
        count.add(len as u64);
        Ok(before..len)
    }

    /// Fills `out` through the page cache, which keeps of it what it had: the rest would be there twice.
    pub fn read_through(
        &self,
        reader: &VirtualFileReader,
        out: &mut [u8],
        offset: u64,
    ) -> Result<(), SourceError> {
        let Some((strategy, guard, file)) = self.file(reader) else {
            return reader.sources().origin(self.id).read_exact_at(out, offset);
        };
        let range = offset..offset + out.len() as u64;
        guard.read_through(file, &range, || strategy.read_without_readahead(file, out, offset))
    }

    /// To be called before a range is read through the page cache in ways that come back to the same pages again and
    /// again, and held until it was: it is let go of by `leave`.
    pub fn retain_pages(
        &self,
        reader: &VirtualFileReader,
        range: &Range<u64>,
    ) -> Option<ActiveRead<'_>> {
        let (_, guard) = self.access.as_ref()?;
        Some(guard.retain(reader.file(self.id)?, range))
    }

    /// To be called when nothing more is read.
    pub fn evict_pages(&self, reader: &VirtualFileReader) {
        if let Some((_, guard, file)) = self.file(reader) {
            guard.evict_all(file);
        }
    }

    /// Fills `out` if the page cache has all of it.
    pub fn read_from_page_cache(
        &self,
        reader: &VirtualFileReader,
        out: &mut [u8],
        offset: u64,
    ) -> bool {
        self.file(reader).is_some_and(|(strategy, _, file)| strategy.read_cached(file, out, offset))
    }

    /// Whether the page cache has all of a range already.
    pub fn is_in_page_cache(&self, reader: &VirtualFileReader, range: &Range<u64>) -> bool {
        self.file(reader).is_some_and(|(strategy, _, file)| strategy.is_cached(file, range))
    }

    pub fn check_unchanged(&self, reader: &VirtualFileReader) -> Result<(), SourceError> {
        reader.file(self.id).map_or(Ok(()), OpenFile::check_unchanged)
    }
}
