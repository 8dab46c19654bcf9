//! The origins of a checkpoint, held open.
//!
//! In: origins, and places of bytes ([`TensorBytes`]). Out: any range of the bytes, from any thread.
//! There is no lock, and no allocation is larger than the request. Patched tensors are the exception: threads wait
//! for the one that decodes.

use std::sync::Arc;

use crate::source::{OpenFile, ReadAt, SourceError};

use crate::checkpoint::tensor::{Origin, OriginId, TensorBytes};

use super::patched_read::PatchedReader;
use super::plain_origins::PlainOrigins;
use super::tensor_read::read_from;

/// All origins of a checkpoint by their ids: open files, bytes in memory, and the tensors that deltas change.
#[derive(Debug)]
pub struct OpenOrigins {
    plain: Arc<PlainOrigins>,
    /// By origin id, `None` for a plain origin. Empty if no origin is patched.
    patched: Box<[Option<PatchedReader>]>,
}

impl OpenOrigins {
    /// Opens each origin, and verifies that it is what was parsed. `open_file` is one that is still open.
    pub fn open(
        origins: &[Origin],
        open_file: Option<OpenFile>,
    ) -> Result<OpenOrigins, SourceError> {
        let plain = Arc::new(PlainOrigins::open(origins, open_file)?);
        let is_patched = origins.iter().any(|origin| origin.patched().is_some());
        let patched = |origin: &Origin| Some(PatchedReader::new(origin.patched()?, &plain));
        let patched = match is_patched {
            true => origins.iter().map(patched).collect(),
            false => Box::default(),
        };
        Ok(OpenOrigins { plain, patched })
    }

    /// The open file of an origin; `None` if the origin is in memory, or patched.
    pub fn file(&self, origin: OriginId) -> Option<&Arc<OpenFile>> {
        self.plain.file(origin)
    }

    /// All open files.
    pub fn files(&self) -> impl Iterator<Item = &Arc<OpenFile>> {
        self.plain.files()
    }

    /// Whether an origin is a tensor that deltas change.
    pub fn is_patched(&self, origin: OriginId) -> bool {
        self.patched(origin).is_some()
    }

    fn patched(&self, origin: OriginId) -> Option<&PatchedReader> {
        self.patched.get(origin.0 as usize)?.as_ref()
    }

    /// The origins whose bytes a read of an origin needs: itself, or those of a patched tensor.
    pub fn read_origins(&self, origin: OriginId) -> impl Iterator<Item = OriginId> {
        let patched = self.patched(origin);
        let own = patched.is_none().then_some(origin);
        own.into_iter().chain(patched.into_iter().flat_map(PatchedReader::read_origins))
    }

    /// The bytes of an origin, in the order of the origin.
    pub fn origin(&self, origin: OriginId) -> &dyn ReadAt {
        match self.patched(origin) {
            Some(patched) => patched,
            None => self.plain.origin(origin),
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
        match self.patched(origin) {
            Some(patched) => patched.check_unchanged(),
            None => self.plain.check_unchanged(origin),
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
        (0..self.plain.len() as u32).try_for_each(|origin| self.check_unchanged(OriginId(origin)))
    }

    /// Fails if anything about any origin changed, even if the bytes stayed the same.
    pub fn check_all_states_unchanged(&self) -> Result<(), SourceError> {
        self.files().try_for_each(|file| file.check_state_unchanged())
    }
}
