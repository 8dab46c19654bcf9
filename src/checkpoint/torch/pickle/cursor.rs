//! The bytes of a pickle, taken from the front: nothing is taken that is not there.

use super::Fault;

/// What is left of a pickle.
pub struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Input { bytes, at: 0 }
    }

    /// Bytes taken so far.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Bytes not yet taken.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Fault> {
        let bytes = self.bytes[self.at..].get(..len).ok_or(Fault::Truncated)?;
        self.at += len;
        Ok(bytes)
    }

    pub fn u8(&mut self) -> Result<u8, Fault> {
        Ok(self.take(1)?[0])
    }

    /// An unsigned number of `width` bytes.
    pub fn number(&mut self, width: usize) -> Result<u64, Fault> {
        let mut raw = [0; 8];
        raw[..width].copy_from_slice(self.take(width)?);
        Ok(u64::from_le_bytes(raw))
    }

    /// A length of `width` bytes; one that does not fit is one past the end.
    pub fn length(&mut self, width: usize) -> Result<usize, Fault> {
        usize::try_from(self.number(width)?).map_err(|_| Fault::Truncated)
    }

    pub fn line(&mut self) -> Result<&'a [u8], Fault> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|&b| b == b'\n').ok_or(Fault::Truncated)?;
        self.at += len + 1;
        Ok(&rest[..len])
    }
}
