//! What is known of one source of an open image: whether it may keep us waiting, who reads it, and
//! how.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::checkpoint::OriginId;
use crate::source::{DIRECT_ALIGNMENT_BYTES, OpenFile, ReadStrategy, SourceError};
use crate::virtual_file::VirtualFileReader;

use crate::cache::Cache;
use crate::cache::counters::AtomicCounters;
use crate::cache::io::executor::IoExecutor;
use crate::cache::page_cache_guard::{ActiveRead, PageCacheGuard};

pub struct SourceHandle {
    id: OriginId,
    /// Whether asking its filesystem never waits for anybody else. Memory is local.
    pub is_local: bool,
    /// The threads that may wait for it.
    pub executor: Arc<IoExecutor>,
    /// The file, if it is one.
    pub path: Option<PathBuf>,
    strategy: Option<ReadStrategy>,
    page_cache: PageCacheGuard,
}

impl SourceHandle {
    pub fn new(cache: &Cache, reader: &VirtualFileReader, number: u32) -> SourceHandle {
        let id = OriginId(number);
        let file = reader.file(id);
        let ways = file.map(ReadStrategy::new);
        let local = ways.as_ref().is_none_or(ReadStrategy::is_local);
        let lane = cache.executor(file.map(|file| file.file().identity().dev), local);
        let path = file.map(|file| file.file().path());
        SourceHandle {
            id,
            is_local: local,
            executor: lane,
            path,
            strategy: ways,
            page_cache: PageCacheGuard::default(),
        }
    }

    fn file<'a>(
        &'a self,
        reader: &'a VirtualFileReader,
    ) -> Option<(&'a ReadStrategy, &'a OpenFile)> {
        self.strategy.as_ref().zip(reader.file(self.id))
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
        let count = if file.map_or(Ok(false), |(ways, file)| ways.read_direct(file, out, start))? {
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
        let Some((ways, file)) = self.file(reader) else {
            return reader.sources().origin(self.id).read_exact_at(out, offset);
        };
        let range = offset..offset + out.len() as u64;
        self.page_cache
            .read_through(ways, file, &range, || ways.read_without_readahead(file, out, offset))
    }

    /// To be called before a range is read through the page cache in ways that come back to the same pages again and
    /// again, and held until it was: it is let go of by `leave`.
    pub fn retain_pages(
        &self,
        reader: &VirtualFileReader,
        range: &Range<u64>,
    ) -> Option<ActiveRead<'_>> {
        self.file(reader).map(|(ways, file)| self.page_cache.retain(ways, file, range))
    }

    /// To be called when nothing more is read.
    pub fn evict_pages(&self, reader: &VirtualFileReader) {
        if let Some((ways, file)) = self.file(reader) {
            self.page_cache.evict_all(ways, file);
        }
    }

    /// Fills `out` if the page cache has all of it.
    pub fn read_from_page_cache(
        &self,
        reader: &VirtualFileReader,
        out: &mut [u8],
        offset: u64,
    ) -> bool {
        self.file(reader).is_some_and(|(ways, file)| ways.read_cached(file, out, offset))
    }

    /// Whether the page cache has all of a range already.
    pub fn is_in_page_cache(&self, reader: &VirtualFileReader, range: &Range<u64>) -> bool {
        self.file(reader).is_some_and(|(ways, file)| ways.is_cached(file, range))
    }

    pub fn check_unchanged(&self, reader: &VirtualFileReader) -> Result<(), SourceError> {
        reader.file(self.id).map_or(Ok(()), OpenFile::check_unchanged)
    }
}
