//! The bytes of a pickle, taken from the front: nothing is taken that is not there.

use super::PickleError;

/// What is left of a pickle.
pub struct PickleCursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> PickleCursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        PickleCursor { bytes, position: 0 }
    }

    /// Bytes taken so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes not yet taken.
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

    /// An unsigned number of `width` bytes.
    pub fn read_uint(&mut self, width: usize) -> Result<u64, PickleError> {
        let mut raw = [0; 8];
        raw[..width].copy_from_slice(self.take(width)?);
        Ok(u64::from_le_bytes(raw))
    }

    /// A length of `width` bytes; one that does not fit is one past the end.
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
