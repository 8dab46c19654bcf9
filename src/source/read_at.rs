//! Random access to bytes, in a file or in memory.

use std::sync::{Arc, OnceLock};

use super::deferred_checks::DeferredChecks;
use super::error::SourceError;

/// Random access to a fixed number of bytes.
pub trait ReadAt: Send + Sync {
    /// The number of bytes.
    fn size(&self) -> u64;

    /// Fills the whole of `buf` from `offset`, or fails.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError>;

    /// The bytes of a range, if they lie in memory.
    fn borrow_at(&self, _len: usize, _offset: u64) -> Option<&[u8]> {
        None
    }

    /// Fills each target from its offset. Targets are in order and lie close together: a store is sent one request.
    fn read_nearby(&self, targets: &mut [(u64, &mut [u8])]) -> Result<(), SourceError> {
        targets.iter_mut().try_for_each(|(offset, target)| self.read_exact_at(target, *offset))
    }

    /// The slot for checks of headers that a parser leaves unread in a file of a store. `None` if the parser must read
    /// the headers. Once the slot is filled, reads make the checks.
    fn deferred_checks(&self) -> Option<&OnceLock<DeferredChecks>> {
        None
    }
}

impl ReadAt for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let bytes = self
            .borrow_at(buf.len(), offset)
            .ok_or_else(|| SourceError::Truncated { path: "memory".into(), offset })?;
        buf.copy_from_slice(bytes);
        Ok(())
    }

    fn borrow_at(&self, len: usize, offset: u64) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.get(start..start.checked_add(len)?)
    }
}

impl ReadAt for Vec<u8> {
    fn size(&self) -> u64 {
        self.as_slice().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.as_slice().read_exact_at(buf, offset)
    }

    fn borrow_at(&self, len: usize, offset: u64) -> Option<&[u8]> {
        self.as_slice().borrow_at(len, offset)
    }
}

impl ReadAt for Arc<[u8]> {
    fn size(&self) -> u64 {
        self.as_ref().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.as_ref().read_exact_at(buf, offset)
    }

    fn borrow_at(&self, len: usize, offset: u64) -> Option<&[u8]> {
        self.as_ref().borrow_at(len, offset)
    }
}
