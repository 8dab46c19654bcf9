//! The end of a zip file, which one request fetches from a store.

use crate::source::{ReadAt, SourceError};

/// Bytes of the tail: enough for the end records, and a directory of some 600 records.
const TAIL_BYTES: u64 = 64 << 10;

/// A file whose tail is in memory, if the file lies in a store.
pub struct TailedFile<'a> {
    file: &'a dyn ReadAt,
    tail: Vec<u8>,
}

impl<'a> TailedFile<'a> {
    pub fn read(file: &'a dyn ReadAt) -> Result<TailedFile<'a>, SourceError> {
        // The first read of a file of this size fetched all of it.
        let is_short = file.size() <= TAIL_BYTES;
        let mut tail = Vec::new();
        if !is_short && file.deferred_checks().is_some() {
            tail.resize(TAIL_BYTES as usize, 0);
            file.read_nearby(&mut [(file.size() - TAIL_BYTES, &mut tail)])?;
        }
        Ok(TailedFile { file, tail })
    }
}

impl ReadAt for TailedFile<'_> {
    fn size(&self) -> u64 {
        self.file.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let tail_start = self.size() - self.tail.len() as u64;
        let from = offset.checked_sub(tail_start).and_then(|from| usize::try_from(from).ok());
        match from.and_then(|from| self.tail.get(from..from.checked_add(buf.len())?)) {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => self.file.read_exact_at(buf, offset)?,
        }
        Ok(())
    }
}
