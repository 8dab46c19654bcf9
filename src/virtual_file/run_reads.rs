//! Reads of runs that follow one another in a virtual file.

use crate::checkpoint::{OpenOrigins, OriginId};
use crate::source::{REMOTE_GAP_BYTES, SourceError};

/// Bytes of one request for several runs. A part of a load is no longer, but for what lies between its runs.
const MAX_REQUEST_BYTES: u64 = 16 << 20;

/// Reads runs in the order of the virtual file. Those that lie close together in a file of a store are one request. Each
/// source is checked once, after the last read from it.
pub struct RunReads<'o, 'b> {
    origins: &'o OpenOrigins,
    /// The origin of the last run.
    origin: Option<OriginId>,
    /// Runs of it that are read together.
    nearby: Vec<(u64, &'b mut [u8])>,
}

impl<'o, 'b> RunReads<'o, 'b> {
    pub fn new(origins: &'o OpenOrigins) -> Self {
        RunReads { origins, origin: None, nearby: Vec::new() }
    }

    /// Fills `out` from an offset in an origin: now, or with the runs that follow.
    pub fn read(
        &mut self,
        origin: OriginId,
        offset: u64,
        out: &'b mut [u8],
    ) -> Result<(), SourceError> {
        if self.origin != Some(origin) {
            self.end_origin()?;
            self.origin = Some(origin);
        }
        let is_local = self.origins.file(origin).is_none_or(|file| file.descriptor().is_some());
        if is_local {
            return self.origins.origin(origin).read_exact_at(out, offset);
        }
        if !self.is_nearby(offset, out.len() as u64) {
            self.read_nearby()?;
        }
        self.nearby.push((offset, out));
        Ok(())
    }

    fn is_nearby(&self, offset: u64, len: u64) -> bool {
        let (Some((start, _)), Some((last, out))) = (self.nearby.first(), self.nearby.last())
        else {
            return true;
        };
        let end = last + out.len() as u64;
        (end..=end + REMOTE_GAP_BYTES).contains(&offset)
            && offset + len - start <= MAX_REQUEST_BYTES
    }

    fn read_nearby(&mut self) -> Result<(), SourceError> {
        let Some(origin) = self.origin else { return Ok(()) };
        let source = self.origins.origin(origin);
        match &mut self.nearby[..] {
            [] => return Ok(()),
            // Small reads of one place after the other share requests.
            [(offset, out)] => source.read_exact_at(out, *offset)?,
            nearby => source.read_nearby(nearby)?,
        }
        self.nearby.clear();
        Ok(())
    }

    /// Reads what was left to later, and checks the last source.
    pub fn end_origin(&mut self) -> Result<(), SourceError> {
        self.read_nearby()?;
        self.origin.take().map_or(Ok(()), |origin| self.origins.check_unchanged(origin))
    }
}
