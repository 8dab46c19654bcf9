//! How what is read gets to where it belongs: straight, where that is memory that reads can fill; else by way
//! of memory that they can, or without the host's memory at all.
//!
//! In: pieces, each with where it belongs, and how to fill memory with a stretch of a file. Out: nothing; the
//! pieces are where they belong, or will be by the time that whoever made the stage says.

use std::ops::Range;
use std::path::Path;

use crate::source::{self, OpenFile};

use super::LoadError;
use super::execute::BUFFER_BYTES;
use super::memory::BufferPool;

/// What a load passes bytes through.
pub trait Sink<T>: Sync {
    /// Where a piece belongs, if that is memory that reads can fill.
    fn host_memory(piece: &mut T) -> Option<&mut [u8]>;

    /// Has `fill` fill memory, of [`BUFFER`] bytes and aligned for reads past the page cache, with what lies
    /// from `start` on; then the pieces get theirs. If `fill` comes to nothing nobody gets anything.
    fn stage<W>(
        &self,
        path: &Path,
        start: u64,
        pieces: &mut [(u64, T)],
        fill: impl FnOnce(&mut [u8]) -> Result<Option<W>, source::SourceError>,
    ) -> Result<Option<W>, LoadError>;

    /// Reads a stretch of a file without the host's memory, sees that the file is what it was, and hands the pieces
    /// on; or does nothing, and says so.
    fn read_to_device(
        &self,
        _path: &Path,
        _file: &OpenFile,
        _range: &Range<u64>,
        _pieces: &mut [(u64, T)],
    ) -> Result<bool, LoadError> {
        Ok(false)
    }

    /// A thread of the load begins: it does all its work in this.
    fn run_reader<R>(&self, work: impl FnOnce() -> R) -> R {
        work()
    }

    /// The load is over, and its threads have ended.
    fn finish(&self) {}
}

impl Sink<&mut [u8]> for BufferPool {
    fn host_memory<'p>(piece: &'p mut &mut [u8]) -> Option<&'p mut [u8]> {
        Some(piece)
    }

    fn stage<W>(
        &self,
        path: &Path,
        start: u64,
        pieces: &mut [(u64, &mut [u8])],
        fill: impl FnOnce(&mut [u8]) -> Result<Option<W>, source::SourceError>,
    ) -> Result<Option<W>, LoadError> {
        let done = self.with_buffer(|buffer| {
            let filled = fill(buffer)?;
            if filled.is_some() {
                copy_out(buffer, start, pieces);
            }
            Ok::<_, source::SourceError>(filled)
        });
        Ok(done.map_err(|_| LoadError::OutOfMemory {
            path: path.to_path_buf(),
            bytes: BUFFER_BYTES as u64,
        })??)
    }

    fn finish(&self) {
        self.trim();
    }
}

/// Fills the pieces of what was read from `start` on.
pub fn copy_out(read: &[u8], start: u64, pieces: &mut [(u64, &mut [u8])]) {
    for (at, piece) in pieces {
        let from = (*at - start) as usize;
        piece.copy_from_slice(&read[from..from + piece.len()]);
    }
}
