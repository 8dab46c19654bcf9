//! The origins of a checkpoint, held open.
//!
//! In: origins, and places of bytes ([`TensorBytes`]). Out: any range of the bytes, from any thread.
//! There is no lock, and no allocation is larger than the request. Patched tensors are the exception: threads wait
//! for the one that decodes.

use std::sync::Arc;

use crate::source::{OpenFile, ReadAt, SourceError};

use crate::checkpoint::tensor::{Origin, OriginId, TensorBytes};

use super::boxes_read::read_boxes;
use super::cast_read::read_cast;
use super::patched_read::PatchedReader;
use super::strided_read::read_strided;
use super::swapped_read::read_swapped;

/// Fills `out` with the bytes of a tensor from `offset` on. `origin` returns the bytes of an origin.
pub(super) fn read_from<'a>(
    bytes: &TensorBytes,
    offset: u64,
    out: &mut [u8],
    origin: &impl Fn(OriginId) -> &'a dyn ReadAt,
) -> Result<(), SourceError> {
    match bytes {
        TensorBytes::Run(run) => origin(run.origin).read_exact_at(out, run.offset + offset),
        TensorBytes::Grid(grid) => read_strided(origin(grid.origin), grid, offset, out),
        TensorBytes::Boxes(boxes) => {
            let read =
                |bytes: &TensorBytes, offset, out: &mut [u8]| read_from(bytes, offset, out, origin);
            read_boxes(boxes, offset, out, &read)
        }
        TensorBytes::Swapped { unit_bytes, inner } => {
            let read = |out: &mut [u8], offset: u64| read_from(inner, offset, out, origin);
            read_swapped(*unit_bytes, offset, out, read)
        }
        TensorBytes::Cast { from, to, inner } => {
            let read = |out: &mut [u8], offset: u64| read_from(inner, offset, out, origin);
            read_cast((*from, *to), offset, out, inner.is_strided(), read)
        }
    }
}

/// All origins of a checkpoint by their ids: open files, and bytes in memory.
#[derive(Debug)]
pub struct OpenOrigins(Box<[OpenOrigin]>);

#[derive(Debug)]
enum OpenOrigin {
    File(Arc<OpenFile>),
    Memory(Arc<[u8]>),
    Patched(PatchedReader),
}

impl OpenOrigins {
    /// Opens each origin, and verifies that it is what was parsed. `open_file` is one that is still open.
    pub fn open(
        origins: &[Origin],
        mut open_file: Option<OpenFile>,
    ) -> Result<OpenOrigins, SourceError> {
        let open = |origin: &Origin| match origin {
            Origin::File(file) => {
                let opened = open_file.take_if(|opened| Arc::ptr_eq(opened.file(), file));
                Ok(OpenOrigin::File(Arc::new(opened.map_or_else(|| file.open(), Ok)?)))
            }
            Origin::Memory(bytes) => Ok(OpenOrigin::Memory(Arc::clone(bytes))),
            // Made of the others, below.
            Origin::Patched(_) => Ok(OpenOrigin::Memory(Arc::default())),
        };
        let opened = OpenOrigins(origins.iter().map(open).collect::<Result<_, _>>()?);
        let is_patched = origins.iter().any(|origin| origin.patched().is_some());
        Ok(if is_patched { OpenOrigins::with_patched(origins, opened) } else { opened })
    }

    /// Adds the patched origins to those that they are made of.
    fn with_patched(origins: &[Origin], plain: OpenOrigins) -> OpenOrigins {
        let plain = Arc::new(plain);
        let open = |(origin, opened): (&Origin, &OpenOrigin)| match (origin, opened) {
            (Origin::Patched(bytes), _) => OpenOrigin::Patched(PatchedReader::new(bytes, &plain)),
            (_, OpenOrigin::File(file)) => OpenOrigin::File(Arc::clone(file)),
            (_, OpenOrigin::Memory(bytes)) => OpenOrigin::Memory(Arc::clone(bytes)),
            (_, OpenOrigin::Patched(_)) => OpenOrigin::Memory(Arc::default()),
        };
        OpenOrigins(origins.iter().zip(&plain.0).map(open).collect())
    }

    /// The open file of an origin; `None` if the origin is in memory, or patched.
    pub fn file(&self, origin: OriginId) -> Option<&Arc<OpenFile>> {
        match self.0.get(origin.0 as usize)? {
            OpenOrigin::File(file) => Some(file),
            OpenOrigin::Memory(_) | OpenOrigin::Patched(_) => None,
        }
    }

    /// All open files.
    pub fn files(&self) -> impl Iterator<Item = &Arc<OpenFile>> {
        self.0.iter().filter_map(|origin| match origin {
            OpenOrigin::File(file) => Some(file),
            OpenOrigin::Memory(_) | OpenOrigin::Patched(_) => None,
        })
    }

    /// Whether an origin is a tensor that deltas change.
    pub fn is_patched(&self, origin: OriginId) -> bool {
        matches!(self.0.get(origin.0 as usize), Some(OpenOrigin::Patched(_)))
    }

    /// The origins whose bytes a read of an origin needs: itself, or those of a patched tensor.
    pub fn read_origins(&self, origin: OriginId) -> impl Iterator<Item = OriginId> {
        let patched = match self.0.get(origin.0 as usize) {
            Some(OpenOrigin::Patched(patched)) => Some(patched),
            _ => None,
        };
        let own = patched.is_none().then_some(origin);
        own.into_iter().chain(patched.into_iter().flat_map(PatchedReader::read_origins))
    }

    /// The bytes of an origin, in the order of the origin.
    pub fn origin(&self, origin: OriginId) -> &dyn ReadAt {
        // The reader of a checkpoint numbers its origins.
        match &self.0[origin.0 as usize] {
            OpenOrigin::File(file) => &**file,
            OpenOrigin::Memory(bytes) => bytes,
            OpenOrigin::Patched(patched) => patched,
        }
    }

    /// Fills `out` with the bytes of a tensor from `offset` on.
    ///
    /// The caller must call [`OpenOrigins::check_tensor_unchanged`] before it uses the bytes.
    pub fn read(
        &self,
        bytes: &TensorBytes,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), SourceError> {
        read_from(bytes, offset, out, &|origin| self.origin(origin))
    }

    /// Tells the kernel that a range of a tensor will be read, if it is contiguous in a file. Several threads read it in
    /// small pieces, which hides the order from the kernel.
    pub fn advise_will_need(&self, bytes: &TensorBytes, offset: u64, len: u64) {
        if let Some(run) = bytes.source_run(offset, len)
            && let Some(file) = self.file(run.origin)
        {
            file.advise_will_need(run.offset..run.offset + run.len);
        }
    }

    /// Fails if an origin's bytes changed since it was parsed.
    pub fn check_unchanged(&self, origin: OriginId) -> Result<(), SourceError> {
        match self.0.get(origin.0 as usize) {
            Some(OpenOrigin::File(file)) => file.check_unchanged(),
            Some(OpenOrigin::Patched(patched)) => patched.check_unchanged(),
            Some(OpenOrigin::Memory(_)) | None => Ok(()),
        }
    }

    /// Fails if the bytes of an origin of a tensor changed since it was parsed.
    pub fn check_tensor_unchanged(&self, bytes: &TensorBytes) -> Result<(), SourceError> {
        let mut checked = None;
        bytes.extents().try_for_each(|extent| match checked.replace(extent.origin) {
            Some(before) if before == extent.origin => Ok(()),
            _ => self.check_unchanged(extent.origin),
        })
    }

    /// Fails if any origin's bytes changed since it was parsed.
    pub fn check_all_unchanged(&self) -> Result<(), SourceError> {
        (0..self.0.len() as u32).try_for_each(|origin| self.check_unchanged(OriginId(origin)))
    }

    /// Fails if anything about any origin changed, even if the bytes stayed the same.
    pub fn check_all_states_unchanged(&self) -> Result<(), SourceError> {
        let mut files = self.0.iter().filter_map(|source| match source {
            OpenOrigin::File(file) => Some(file),
            OpenOrigin::Memory(_) | OpenOrigin::Patched(_) => None,
        });
        files.try_for_each(|file| file.check_state_unchanged())
    }
}
