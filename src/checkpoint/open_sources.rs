//! The origins of a checkpoint, held open.
//!
//! In: origins, and where bytes lie ([`Bytes`]). Out: any range of them, filled from any thread; there
//! is no lock, and nothing larger than the request is allocated.

use std::sync::Arc;

use crate::source::{OpenFile, ReadAt, SourceError};

use super::{Origin, OriginId, TensorBytes, strided_read};

/// Origins held open.
#[derive(Debug)]
pub struct OpenSources(Box<[OpenSource]>);

#[derive(Debug)]
enum OpenSource {
    File(OpenFile),
    Memory(Arc<[u8]>),
}

impl OpenSources {
    /// Opens each, and verifies that it is what was parsed. One of them may still be open.
    pub fn open(
        origins: &[Origin],
        mut open_file: Option<OpenFile>,
    ) -> Result<OpenSources, SourceError> {
        let open = |origin: &Origin| match origin {
            Origin::File(file) => {
                let opened = open_file.take_if(|opened| Arc::ptr_eq(opened.file(), file));
                Ok(OpenSource::File(opened.map_or_else(|| file.open(), Ok)?))
            }
            Origin::Memory(bytes) => Ok(OpenSource::Memory(Arc::clone(bytes))),
        };
        Ok(OpenSources(origins.iter().map(open).collect::<Result<_, _>>()?))
    }

    /// The open file of an origin, if it is one.
    pub fn file(&self, origin: OriginId) -> Option<&OpenFile> {
        match self.0.get(origin.0 as usize)? {
            OpenSource::File(file) => Some(file),
            OpenSource::Memory(_) => None,
        }
    }

    /// The bytes of an origin, as they lie.
    pub fn origin(&self, origin: OriginId) -> &dyn ReadAt {
        // The origins of a checkpoint are numbered by what made it.
        match &self.0[origin.0 as usize] {
            OpenSource::File(file) => file,
            OpenSource::Memory(bytes) => bytes,
        }
    }

    /// Fills `out` from a byte on of what lies so. To be followed by [`OpenSources::check_unchanged`],
    /// before the bytes are used.
    pub fn read(
        &self,
        bytes: &TensorBytes,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), SourceError> {
        let source = self.origin(bytes.extent().0);
        match bytes {
            TensorBytes::Run(run) => source.read_exact_at(out, run.offset + offset),
            TensorBytes::Grid(grid) => strided_read::read_strided(source, grid, offset, out),
            TensorBytes::Swapped { unit_bytes: unit, inner: of } => {
                let read = |out: &mut [u8], from: u64| self.read(of, from, out);
                strided_read::read_swapped(*unit, offset, out, read)
            }
        }
    }

    /// Refuses bytes of an origin that changed since it was parsed.
    pub fn check_unchanged(&self, origin: OriginId) -> Result<(), SourceError> {
        self.file(origin).map_or(Ok(()), OpenFile::check_unchanged)
    }

    /// The same for all of them.
    pub fn check_all_unchanged(&self) -> Result<(), SourceError> {
        (0..self.0.len() as u32).try_for_each(|origin| self.check_unchanged(OriginId(origin)))
    }

    /// Refuses if anything about any of them changed, also what leaves its bytes as they are.
    pub fn check_all_states_unchanged(&self) -> Result<(), SourceError> {
        let mut files = self.0.iter().filter_map(|source| match source {
            OpenSource::File(file) => Some(file),
            OpenSource::Memory(_) => None,
        });
        files.try_for_each(OpenFile::check_state_unchanged)
    }
}
