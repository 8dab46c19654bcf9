//! Reads any range of a virtual file from its sources, held open.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{OpenSources, OriginId};
use crate::source::OpenFile;

use super::{SegmentSource, VirtualFile, VirtualFileError};

/// A virtual file whose sources are held open.
///
/// Any number of threads read at once; there is no lock. Nothing larger than the request is
/// allocated, and nothing at all where the bytes lie one after the other.
#[derive(Debug)]
pub struct VirtualFileReader {
    virtual_file: Arc<VirtualFile>,
    sources: OpenSources,
}

impl VirtualFileReader {
    pub(super) fn new(
        virtual_file: Arc<VirtualFile>,
        open_file: Option<OpenFile>,
    ) -> Result<VirtualFileReader, VirtualFileError> {
        let sources = OpenSources::open(virtual_file.origins(), open_file)?;
        Ok(VirtualFileReader { virtual_file, sources })
    }

    /// The virtual file that is read.
    pub fn virtual_file(&self) -> &Arc<VirtualFile> {
        &self.virtual_file
    }

    /// Its sources, to read what is not laid out one byte after the other as it lies.
    pub fn sources(&self) -> &OpenSources {
        &self.sources
    }

    /// The open file of an origin, if it is one: to copy from it without reading it.
    pub fn file(&self, origin: OriginId) -> Option<&OpenFile> {
        self.sources.file(origin)
    }

    /// Fills `buf` with the virtual file's bytes from `offset`, and says how many there are: fewer than
    /// asked only at the end. If a source changed since it was parsed, this is an error and `buf`
    /// holds nothing of worth.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, VirtualFileError> {
        let end = offset.saturating_add(buf.len() as u64).min(self.virtual_file.size());
        if offset >= end {
            return Ok(0);
        }
        let mut used: Option<OriginId> = None;
        for segment in self.virtual_file.segments(offset..end) {
            let Range { start, end } = segment.range;
            let out = &mut buf[(start - offset) as usize..(end - offset) as usize];
            let origin = match segment.bytes {
                SegmentSource::Header(from) => {
                    let from = from as usize;
                    out.copy_from_slice(&self.virtual_file.header()[from..from + out.len()]);
                    continue;
                }
                SegmentSource::Run { origin, offset } => {
                    self.sources.origin(origin).read_exact_at(out, offset)?;
                    origin
                }
                SegmentSource::Tensor { index: place, offset } => {
                    let bytes = &self.virtual_file.tensors()[place].bytes;
                    self.sources.read(bytes, offset, out)?;
                    bytes.extent().0
                }
            };
            // Each source is looked at once, after the last read from it.
            if let Some(before) = used.replace(origin).filter(|before| *before != origin) {
                self.sources.check_unchanged(before)?;
            }
        }
        if let Some(last) = used {
            self.sources.check_unchanged(last)?;
        }
        Ok((end - offset) as usize)
    }

    /// Refuses if anything about any source changed since it was parsed, also what leaves its bytes as
    /// they are: for those who open the virtual file now, and can be given a new one.
    pub fn check_all_states_unchanged(&self) -> Result<(), VirtualFileError> {
        Ok(self.sources.check_all_states_unchanged()?)
    }

    /// Refuses if any source changed since it was parsed.
    pub fn check_all_unchanged(&self) -> Result<(), VirtualFileError> {
        Ok(self.sources.check_all_unchanged()?)
    }
}
