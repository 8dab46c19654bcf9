//! The ways to read one open file: from the page cache, past it, or through it.
//!
//! In: an [`OpenFile`]. Out: [`Ways`], which knows which of them its filesystem has, and fills memory by
//! one of them. Every read but [`Ways::read_cached`] makes sure that the file is what it was.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::nonresident::uncached_ranges;
use super::{DirectFile, DirectReadOutcome, OpenFile, ReadAt, Residency, SourceError};

/// What is known of reading one file.
#[derive(Debug)]
pub struct ReadStrategy {
    is_local: bool,
    is_overlay: bool,
    residency: Residency,
    /// Opened when it is first needed.
    direct_file: OnceLock<Option<DirectFile>>,
    is_direct_unsupported: AtomicBool,
}

/// How bytes were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMode {
    /// Past the page cache.
    Direct,
    /// Through it.
    Buffered,
}

impl ReadStrategy {
    /// What is known of a file just opened.
    pub fn new(file: &OpenFile) -> ReadStrategy {
        let on = file.filesystem_kind();
        ReadStrategy {
            is_local: on.is_local,
            is_overlay: on.is_overlay,
            residency: Residency::new(on),
            direct_file: OnceLock::new(),
            is_direct_unsupported: AtomicBool::new(false),
        }
    }

    /// Whether asking its filesystem never waits for another program or machine.
    pub fn is_local(&self) -> bool {
        self.is_local
    }

    /// Fills `out`, aligned memory, from an aligned offset: past the page cache if the filesystem can.
    /// Only the first `len` bytes are there where the file ends.
    pub fn read_aligned(
        &self,
        file: &OpenFile,
        out: &mut [u8],
        len: usize,
        offset: u64,
    ) -> Result<ReadMode, SourceError> {
        if self.read_direct(file, out, offset)? {
            return Ok(ReadMode::Direct);
        }
        self.read_buffered(file, &mut out[..len], offset)?;
        Ok(ReadMode::Buffered)
    }

    /// The same past the page cache, or not at all: whether the filesystem can.
    pub fn read_direct(
        &self,
        file: &OpenFile,
        out: &mut [u8],
        offset: u64,
    ) -> Result<bool, SourceError> {
        let Some(direct) = self.direct_file(file) else { return Ok(false) };
        match direct.read_exact_at(out, offset)? {
            DirectReadOutcome::Complete => {
                file.check_unchanged()?;
                Ok(true)
            }
            DirectReadOutcome::Unsupported => {
                self.disable_direct(file);
                Ok(false)
            }
        }
    }

    /// Fills `out`, any memory, from any offset, through the page cache.
    pub fn read_buffered(
        &self,
        file: &OpenFile,
        out: &mut [u8],
        offset: u64,
    ) -> Result<(), SourceError> {
        file.read_exact_at(out, offset)?;
        file.check_unchanged()
    }

    /// The same, and the kernel reads nothing ahead.
    pub fn read_without_readahead(
        &self,
        file: &OpenFile,
        out: &mut [u8],
        offset: u64,
    ) -> Result<(), SourceError> {
        let Some(quiet) = self.residency.no_readahead_fd(file) else {
            return self.read_buffered(file, out, offset);
        };
        file.read_exact_with(quiet, out, offset)?;
        file.check_unchanged()
    }

    /// Whether [`ReadStrategy::read_aligned`] goes past the page cache, as far as is known.
    pub fn is_direct(&self, file: &OpenFile) -> bool {
        self.direct_file(file).is_some()
    }

    /// Fills `out` if the page cache has all of it. To be followed by [`OpenFile::check_unchanged`].
    pub fn read_cached(&self, file: &OpenFile, out: &mut [u8], offset: u64) -> bool {
        self.residency.read_cached(file, out, offset)
    }

    /// Whether the page cache has all of a range, and enough beyond it that reading it starts nothing.
    pub fn is_cached(&self, file: &OpenFile, range: &Range<u64>) -> bool {
        self.is_local && self.residency.contains(file, range)
    }

    /// What of a range the page cache has nothing of, in whole pages and in order, where the system tells.
    pub fn uncached_ranges(&self, file: &OpenFile, range: &Range<u64>) -> Option<Vec<Range<u64>>> {
        // The pages of a file of an overlay are those of the file beneath: the system tells of none, and lets go of all.
        if self.is_overlay { None } else { uncached_ranges(file, range) }
    }

    fn direct_file(&self, file: &OpenFile) -> Option<&DirectFile> {
        if !self.is_local || self.is_direct_unsupported.load(Ordering::Relaxed) {
            return None;
        }
        self.direct_file.get_or_init(|| file.open_direct()).as_ref()
    }

    fn disable_direct(&self, file: &OpenFile) {
        if !self.is_direct_unsupported.swap(true, Ordering::Relaxed) {
            let path = file.file().path();
            tracing::debug!(path = %path.display(), "its filesystem refuses direct reads of it");
        }
    }
}
