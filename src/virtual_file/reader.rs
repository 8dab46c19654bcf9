//! Reads virtual files from their sources.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{OpenOrigins, OriginId};
use crate::source::OpenFile;

use super::error::VirtualFileError;
use super::file::VirtualFile;
use super::layout::SegmentSource;

/// A virtual file whose sources are held open.
///
/// Any number of threads may read at once: there is no lock. A read of contiguous bytes allocates nothing, and no
/// allocation is larger than the request.
#[derive(Debug)]
pub struct VirtualFileReader {
    virtual_file: Arc<VirtualFile>,
    origins: OpenOrigins,
}

impl VirtualFileReader {
    /// Opens the sources. Fails if any is not what was parsed.
    pub fn open(virtual_file: &Arc<VirtualFile>) -> Result<VirtualFileReader, VirtualFileError> {
        VirtualFileReader::open_with(virtual_file, None)
    }

    /// Opens the sources, of which `open_file` is still open since it was parsed.
    pub fn open_with(
        virtual_file: &Arc<VirtualFile>,
        open_file: Option<OpenFile>,
    ) -> Result<VirtualFileReader, VirtualFileError> {
        let origins = OpenOrigins::open(virtual_file.origins(), open_file)?;
        Ok(VirtualFileReader { virtual_file: Arc::clone(virtual_file), origins })
    }

    /// The virtual file.
    pub fn virtual_file(&self) -> &Arc<VirtualFile> {
        &self.virtual_file
    }

    /// The open origins, to read bytes in the order of the source.
    pub fn origins(&self) -> &OpenOrigins {
        &self.origins
    }

    /// The open file of an origin, to copy from it without reading it; `None` if the origin is in memory.
    pub fn file(&self, origin: OriginId) -> Option<&OpenFile> {
        self.origins.file(origin)
    }

    /// Fills `buf` with bytes from `offset` on, and returns their number: less than requested only at the end.
    ///
    /// Fails if a source changed since it was parsed. The contents of `buf` are then unspecified.
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
                    self.origins.origin(origin).read_exact_at(out, offset)?;
                    origin
                }
                SegmentSource::Tensor { index, offset } => {
                    let bytes = &self.virtual_file.tensors()[index].bytes;
                    self.origins.read(bytes, offset, out)?;
                    self.origins.check_tensor_unchanged(bytes)?;
                    continue;
                }
            };
            // Each source is checked once, after the last read from it.
            if let Some(before) = used.replace(origin).filter(|before| *before != origin) {
                self.origins.check_unchanged(before)?;
            }
        }
        if let Some(last) = used {
            self.origins.check_unchanged(last)?;
        }
        Ok((end - offset) as usize)
    }

    /// Fails if anything about any source changed since it was parsed, even if the bytes stayed the same. For opens,
    /// which can get a new virtual file instead.
    pub fn check_all_states_unchanged(&self) -> Result<(), VirtualFileError> {
        Ok(self.origins.check_all_states_unchanged()?)
    }

    /// Fails if the bytes of any source changed since it was parsed.
    pub fn check_all_unchanged(&self) -> Result<(), VirtualFileError> {
        Ok(self.origins.check_all_unchanged()?)
    }
}
