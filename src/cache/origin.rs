//! What is known of one source of an open image: whether it may keep us waiting, who reads it, and
//! how.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::checkpoint::OriginId;
use crate::image::Reader;
use crate::source::{DIRECT_ALIGNMENT, Error, OpenFile, Way, Ways, uncached};

use super::Cache;
use super::counters::Counting;
use super::lane::Lane;

pub struct OpenOrigin {
    id: OriginId,
    /// Whether asking its filesystem never waits for anybody else. Memory is local.
    pub local: bool,
    /// The threads that may wait for it.
    pub lane: Arc<Lane>,
    /// The file, if it is one.
    pub path: Option<PathBuf>,
    ways: Option<Ways>,
    /// What the page cache had nothing of before it was first read through that. Nothing where the system does not tell:
    /// what another has there is not ours to let go of.
    missing: OnceLock<Vec<Range<u64>>>,
}

impl OpenOrigin {
    pub fn new(cache: &Cache, reader: &Reader, number: u32) -> OpenOrigin {
        let id = OriginId(number);
        let file = reader.file(id);
        let ways = file.map(Ways::of);
        let local = ways.as_ref().is_none_or(Ways::is_local);
        let lane = cache.lane(file.map(|file| file.file().identity().dev), local);
        let (path, missing) = (file.map(|file| file.file().path()), OnceLock::new());
        OpenOrigin { id, local, lane, path, ways, missing }
    }

    fn file<'a>(&'a self, reader: &'a Reader) -> Option<(&'a Ways, &'a OpenFile)> {
        self.ways.as_ref().zip(reader.file(self.id))
    }

    /// Reads a range into aligned memory, past the page cache if the filesystem can, and else as `read_buffered` does;
    /// where in it the range lies then, behind what had to be read before it.
    pub fn read(
        &self,
        reader: &Reader,
        out: &mut [u8],
        range: &Range<u64>,
        counting: &Counting,
    ) -> Result<Range<usize>, Error> {
        let before = range.start as usize % DIRECT_ALIGNMENT;
        let len = before + (range.end - range.start) as usize;
        let Some((ways, file)) = self.file(reader) else { return Ok(before..len) };
        let out = &mut out[..len.next_multiple_of(DIRECT_ALIGNMENT)];
        let start = range.start - before as u64;
        if !ways.is_direct(file) {
            self.missing(file);
        }
        let count = match ways.read(file, out, len, start)? {
            Way::Direct => &counting.direct_bytes,
            Way::Buffered => {
                ways.forget(file, self.missing(file), &(start..range.end));
                &counting.buffered_bytes
            }
        };
        count.add(len as u64);
        Ok(before..len)
    }

    /// Fills `out` through the page cache, which keeps of it what it had: the rest would be there twice.
    pub fn read_buffered(&self, reader: &Reader, out: &mut [u8], offset: u64) -> Result<(), Error> {
        let Some((ways, file)) = self.file(reader) else { return Ok(()) };
        let missing = self.missing(file);
        ways.read_buffered(file, out, offset)?;
        ways.forget(file, missing, &(offset..offset + out.len() as u64));
        Ok(())
    }

    /// To be called before it is read through the page cache in ways that come back to the same pages again and again.
    pub fn will_be_left(&self, reader: &Reader) {
        if let Some(file) = reader.file(self.id) {
            self.missing(file);
        }
    }

    /// Leaves the page cache as it was before the first read through it.
    pub fn leave(&self, reader: &Reader) {
        if let (Some((ways, file)), Some(missing)) = (self.file(reader), self.missing.get()) {
            ways.forget(file, missing, &(0..u64::MAX));
        }
    }

    fn missing(&self, file: &OpenFile) -> &[Range<u64>] {
        self.missing.get_or_init(|| uncached(file).unwrap_or_default())
    }

    /// Fills `out` if the page cache has all of it.
    pub fn read_cached(&self, reader: &Reader, out: &mut [u8], offset: u64) -> bool {
        self.file(reader).is_some_and(|(ways, file)| ways.read_cached(file, out, offset))
    }

    /// Whether the page cache has all of a range already.
    pub fn is_cached(&self, reader: &Reader, range: &Range<u64>) -> bool {
        self.file(reader).is_some_and(|(ways, file)| ways.is_cached(file, range))
    }

    pub fn check_unchanged(&self, reader: &Reader) -> Result<(), Error> {
        reader.file(self.id).map_or(Ok(()), OpenFile::check_unchanged)
    }
}
