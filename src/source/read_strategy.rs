//! The ways to read one open file: from the page cache, past it, or through it.
//!
//! In: an [`OpenFile`]. Out: [`Ways`], which knows which of them its filesystem has, and fills memory by
//! one of them. Every read but [`Ways::read_cached`] makes sure that the file is what it was.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::nonresident::uncached;
use super::{Direct, DirectRead, Error, OpenFile, ReadAt, Residency};

/// What is known of reading one file.
#[derive(Debug)]
pub struct Ways {
    local: bool,
    overlaid: bool,
    residency: Residency,
    /// Opened when it is first needed.
    direct: OnceLock<Option<Direct>>,
    refused: AtomicBool,
}

/// How bytes were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Past the page cache.
    Direct,
    /// Through it.
    Buffered,
}

impl Ways {
    /// What is known of a file just opened.
    pub fn of(file: &OpenFile) -> Ways {
        let on = file.filesystem();
        Ways {
            local: on.local,
            overlaid: on.overlaid,
            residency: Residency::on(on),
            direct: OnceLock::new(),
            refused: AtomicBool::new(false),
        }
    }

    /// Whether asking its filesystem never waits for another program or machine.
    pub fn is_local(&self) -> bool {
        self.local
    }

    /// Fills `out`, aligned memory, from an aligned offset: past the page cache if the filesystem can.
    /// Only the first `len` bytes are there where the file ends.
    pub fn read(
        &self,
        file: &OpenFile,
        out: &mut [u8],
        len: usize,
        offset: u64,
    ) -> Result<Way, Error> {
        if self.read_direct(file, out, offset)? {
            return Ok(Way::Direct);
        }
        self.read_buffered(file, &mut out[..len], offset)?;
        Ok(Way::Buffered)
    }

    /// The same past the page cache, or not at all: whether the filesystem can.
    pub fn read_direct(&self, file: &OpenFile, out: &mut [u8], offset: u64) -> Result<bool, Error> {
        let Some(direct) = self.direct(file) else { return Ok(false) };
        match direct.read_exact_at(out, offset)? {
            DirectRead::Done => {
                file.check_unchanged()?;
                Ok(true)
            }
            DirectRead::Refused => {
                self.refuse(file);
                Ok(false)
            }
        }
    }

    /// Fills `out`, any memory, from any offset, through the page cache.
    pub fn read_buffered(&self, file: &OpenFile, out: &mut [u8], offset: u64) -> Result<(), Error> {
        file.read_exact_at(out, offset)?;
        file.check_unchanged()
    }

    /// The same, and the kernel reads nothing ahead.
    pub fn read_alone(&self, file: &OpenFile, out: &mut [u8], offset: u64) -> Result<(), Error> {
        let Some(quiet) = self.residency.quiet(file) else {
            return self.read_buffered(file, out, offset);
        };
        file.read_exact_by(quiet, out, offset)?;
        file.check_unchanged()
    }

    /// Whether [`Ways::read`] goes past the page cache, as far as is known.
    pub fn is_direct(&self, file: &OpenFile) -> bool {
        self.direct(file).is_some()
    }

    /// Fills `out` if the page cache has all of it. To be followed by [`OpenFile::check_unchanged`].
    pub fn read_cached(&self, file: &OpenFile, out: &mut [u8], offset: u64) -> bool {
        self.residency.read(file, out, offset)
    }

    /// Whether the page cache has all of a range, and enough beyond it that reading it starts nothing.
    pub fn is_cached(&self, file: &OpenFile, range: &Range<u64>) -> bool {
        self.local && self.residency.holds(file, range)
    }

    /// What of a range the page cache has nothing of, in whole pages and in order, where the system tells.
    pub fn uncached(&self, file: &OpenFile, range: &Range<u64>) -> Option<Vec<Range<u64>>> {
        // The pages of a file of an overlay are those of the file beneath: the system tells of none, and lets go of all.
        if self.overlaid { None } else { uncached(file, range) }
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
}
