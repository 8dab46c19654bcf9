//! The open files and in-memory bytes of a checkpoint: all its origins but the patched ones.

use std::sync::Arc;

use crate::checkpoint::tensor::{Origin, OriginId, TensorBytes};
use crate::source::{OpenFile, ReadAt, SourceError};

use super::tensor_read::read_from;

static NO_BYTES: Vec<u8> = Vec::new();

/// Open files, and bytes in memory, by the ids of all origins.
#[derive(Debug)]
pub struct PlainOrigins(Box<[PlainOrigin]>);

#[derive(Debug)]
enum PlainOrigin {
    File(Arc<OpenFile>),
    Memory(Arc<[u8]>),
    /// The id of a patched origin, which has no bytes here.
    Placeholder,
}

impl PlainOrigins {
    /// Opens each origin, and verifies that it is what was parsed. `open_file` is one that is still open.
    pub fn open(
        origins: &[Origin],
        mut open_file: Option<OpenFile>,
    ) -> Result<PlainOrigins, SourceError> {
        let open = |origin: &Origin| match origin {
            Origin::File(file) => {
                let opened = open_file.take_if(|opened| Arc::ptr_eq(opened.file(), file));
                Ok(PlainOrigin::File(Arc::new(opened.map_or_else(|| file.open(), Ok)?)))
            }
            Origin::Memory(bytes) => Ok(PlainOrigin::Memory(Arc::clone(bytes))),
            Origin::Patched(_) => Ok(PlainOrigin::Placeholder),
        };
        Ok(PlainOrigins(origins.iter().map(open).collect::<Result<_, _>>()?))
    }

    /// The number of ids, those of patched origins included.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The open file of an origin; `None` if the origin is in memory, or patched.
    pub fn file(&self, origin: OriginId) -> Option<&Arc<OpenFile>> {
        match self.0.get(origin.0 as usize)? {
            PlainOrigin::File(file) => Some(file),
            PlainOrigin::Memory(_) | PlainOrigin::Placeholder => None,
        }
    }

    /// All open files.
    pub fn files(&self) -> impl Iterator<Item = &Arc<OpenFile>> {
        (0..self.len() as u32).filter_map(|origin| self.file(OriginId(origin)))
    }

    /// The bytes of an origin, in the order of the origin.
    pub fn origin(&self, origin: OriginId) -> &dyn ReadAt {
        // The reader of a checkpoint numbers its origins.
        match &self.0[origin.0 as usize] {
            PlainOrigin::File(file) => &**file,
            PlainOrigin::Memory(bytes) => bytes,
            PlainOrigin::Placeholder => &NO_BYTES,
        }
    }

    /// Fills `out` with the bytes of a tensor from `offset` on.
    pub fn read(
        &self,
        bytes: &TensorBytes,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), SourceError> {
        read_from(bytes, offset, out, &|origin| self.origin(origin))
    }

    /// Fails if an origin's bytes changed since it was parsed.
    pub fn check_unchanged(&self, origin: OriginId) -> Result<(), SourceError> {
        self.file(origin).map_or(Ok(()), |file| file.check_unchanged())
    }
}
