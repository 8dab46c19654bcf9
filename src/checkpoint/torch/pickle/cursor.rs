//! Reads a pickle from the front.

use super::error::PickleError;

/// The bytes of a pickle, and the position of the next one.
pub struct PickleCursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> PickleCursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        PickleCursor { bytes, position: 0 }
    }

    /// The number of bytes read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The number of bytes that are left.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    pub fn take(&mut self, len: usize) -> Result<&'a [u8], PickleError> {
        let bytes = self.bytes[self.position..].get(..len).ok_or(PickleError::Truncated)?;
        self.position += len;
        Ok(bytes)
    }

    pub fn read_u8(&mut self) -> Result<u8, PickleError> {
        Ok(self.take(1)?[0])
    }

    /// Reads an unsigned number of `width` bytes.
    pub fn read_uint(&mut self, width: usize) -> Result<u64, PickleError> {
        let mut raw = [0; 8];
        raw[..width].copy_from_slice(self.take(width)?);
        Ok(u64::from_le_bytes(raw))
    }

    /// Reads a length of `width` bytes. One that does not fit into memory is past the end.
    pub fn read_len(&mut self, width: usize) -> Result<usize, PickleError> {
        usize::try_from(self.read_uint(width)?).map_err(|_| PickleError::Truncated)
    }

    pub fn read_line(&mut self) -> Result<&'a [u8], PickleError> {
        let rest = &self.bytes[self.position..];
        let len = rest.iter().position(|&b| b == b'\n').ok_or(PickleError::Truncated)?;
        self.position += len + 1;
        Ok(&rest[..len])
    }
}
