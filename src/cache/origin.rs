//! What is known of one source of an open image: whether it may keep us waiting, who reads it, and
//! how.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::checkpoint::OriginId;
use crate::image::Reader;
use crate::source::{Direct, DirectRead, Error, OpenFile, ReadAt, Residency};

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
    residency: Residency,
    /// Opened when it is first needed: an image whose bytes are all in memory never does.
    direct: OnceLock<Option<Direct>>,
    refused: AtomicBool,
}

impl OpenOrigin {
    pub fn new(cache: &Cache, reader: &Reader, number: u32) -> OpenOrigin {
        let id = OriginId(number);
        let file = reader.file(id);
        let local = file.is_none_or(OpenFile::is_local);
        let lane = cache.lane(file.map(|file| file.file().identity().dev), local);
        OpenOrigin {
            id,
            local,
            lane,
            path: file.map(|file| file.file().path()),
            residency: file.map(Residency::of).unwrap_or_default(),
            direct: OnceLock::new(),
            refused: AtomicBool::new(false),
        }
    }

    /// Fills `out`, aligned memory of which the file may end before the end, from an aligned
    /// offset: past the page cache if the filesystem can.
    pub fn read(
        &self,
        reader: &Reader,
        out: &mut [u8],
        len: usize,
        offset: u64,
        counting: &Counting,
    ) -> Result<(), Error> {
        let Some(file) = reader.file(self.id) else { return Ok(()) };
        if let Some(direct) = self.direct(file) {
            match direct.read_exact_at(out, offset)? {
                DirectRead::Done => {
                    counting.direct_bytes.add(len as u64);
                    return file.check_unchanged();
                }
                DirectRead::Refused => self.refuse(file),
            }
        }
        counting.buffered_bytes.add(len as u64);
        file.read_exact_at(&mut out[..len], offset)?;
        file.check_unchanged()
    }

    /// Fills `out` through the page cache.
    pub fn read_buffered(&self, reader: &Reader, out: &mut [u8], offset: u64) -> Result<(), Error> {
        let Some(file) = reader.file(self.id) else { return Ok(()) };
        file.read_exact_at(out, offset)?;
        file.check_unchanged()
    }

    fn direct(&self, file: &OpenFile) -> Option<&Direct> {
        if !self.local || self.refused.load(Ordering::Relaxed) {
            return None;
        }
        self.direct.get_or_init(|| file.direct()).as_ref()
    }

    fn refuse(&self, file: &OpenFile) {
        if !self.refused.swap(true, Ordering::Relaxed) {
            let path = file.file().path();
            tracing::debug!(path = %path.display(), "its filesystem refuses direct reads of it");
        }
    }

    /// Fills `out` if the page cache has all of it.
    pub fn read_cached(&self, reader: &Reader, out: &mut [u8], offset: u64) -> bool {
        reader.file(self.id).is_some_and(|file| self.residency.read(file, out, offset))
    }

    /// Whether the page cache has all of a range already.
    pub fn is_cached(&self, reader: &Reader, range: &std::ops::Range<u64>) -> bool {
        self.local && reader.file(self.id).is_some_and(|file| self.residency.holds(file, range))
    }

    pub fn check_unchanged(&self, reader: &Reader) -> Result<(), Error> {
        reader.file(self.id).map_or(Ok(()), OpenFile::check_unchanged)
    }
}
