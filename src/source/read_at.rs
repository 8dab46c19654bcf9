//! Random access to bytes, in a file or in memory.

use std::sync::Arc;

use super::error::SourceError;

/// Random access to a fixed number of bytes.
pub trait ReadAt: Send + Sync {
    /// The number of bytes.
    fn size(&self) -> u64;

    /// Fills the whole of `buf` from `offset`, or fails.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError>;
}

impl ReadAt for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buf.len())?))
            .ok_or_else(|| SourceError::Truncated { path: "memory".into(), offset })?;
        buf.copy_from_slice(bytes);
        Ok(())
    }
}

impl ReadAt for Vec<u8> {
    fn size(&self) -> u64 {
        self.as_slice().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.as_slice().read_exact_at(buf, offset)
    }
}

impl ReadAt for Arc<[u8]> {
    fn size(&self) -> u64 {
        self.as_ref().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.as_ref().read_exact_at(buf, offset)
    }
}
