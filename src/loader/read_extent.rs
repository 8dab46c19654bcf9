//! Reads a stretch of one file, in the way that is best for it when its turn comes.
//!
//! In: a stretch, and the [`Stage`] that knows the way to its targets. Out: nothing, when its bytes were handed on
//! and are what was parsed.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::source::{
    self, DIRECT_ALIGNMENT_BYTES, OpenFile, ReadMode, ReadStrategy, WholeFileGuard,
};

use super::LoadError;
use super::execute::LoadSource;
use super::plan::{LoadExtent, Target};
use super::sink::{Sink, copy_out};

/// A stretch of no more than this is read plainly: asking what is cached would cost as much.
const MAX_PLAIN_READ_BYTES: u64 = 64 << 10;

/// Pieces that are shorter than this on average are read together and copied out.
const MIN_IN_PLACE_PIECE_BYTES: u64 = 16 << 10;

/// A file of a checkpoint that a stretch of is read.
pub struct ExtentReader<'a, S> {
    pub source: &'a LoadSource<'a>,
    pub strategy: &'a ReadStrategy,
    pub file: &'a OpenFile,
    pub sink: &'a S,
}

impl<S> ExtentReader<'_, S> {
    pub fn read<T: Target>(
        &self,
        stretch: LoadExtent<T>,
        guard: Option<&WholeFileGuard<'_>>,
    ) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        let LoadExtent { range, mut pieces, .. } = stretch;
        let ExtentReader { source: LoadSource { tally, .. }, strategy: ways, file, .. } = self;
        let len = range.end - range.start;
        let is_tiny = len <= MAX_PLAIN_READ_BYTES;
        if !is_tiny && ways.is_cached(file, &range) && self.read_cached(&range, &mut pieces)? {
            tally.cached.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if !is_tiny && self.sink.read_to_device(self.source.path, file, &range, &mut pieces)? {
            tally.gpudirect.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if is_tiny || !ways.is_direct(file) {
            self.read_buffered(&range, &mut pieces)?;
            tally.buffered.fetch_add(len, Ordering::Relaxed);
            if let Some(guard) = guard {
                guard.evict_range(&range);
            }
            return Ok(());
        }
        let way = self.read_staged(&range, &mut pieces, |buffer, aligned| {
            let there = (aligned.end.min(file.file().identity().size) - aligned.start) as usize;
            ways.read_aligned(file, buffer, there, aligned.start).map(Some)
        })?;
        let tally = match way {
            Some(ReadMode::Buffered) => &tally.buffered,
            _ => &tally.direct,
        };
        tally.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// From the page cache; whether all of it was there.
    fn read_cached<T: Target>(
        &self,
        range: &Range<u64>,
        pieces: &mut [(u64, T)],
    ) -> Result<bool, LoadError>
    where
        S: Sink<T>,
    {
        let ExtentReader { strategy: ways, file, .. } = self;
        if !is_scattered(range, pieces)
            && let Some(pieces) = in_place_targets::<T, S>(pieces)
        {
            let mut pieces = pieces.into_iter();
            let there = pieces.all(|(at, piece)| ways.read_cached(file, piece, at));
            file.check_unchanged()?;
            return Ok(there);
        }
        let there = self.read_staged(range, pieces, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            let there = ways.read_cached(file, &mut buffer[..len], aligned.start);
            file.check_unchanged()?;
            Ok(there.then_some(ReadMode::Buffered))
        })?;
        Ok(there.is_some())
    }

    /// Through the page cache.
    fn read_buffered<T: Target>(
        &self,
        range: &Range<u64>,
        pieces: &mut [(u64, T)],
    ) -> Result<(), LoadError>
    where
        S: Sink<T>,
    {
        let ExtentReader { strategy: ways, file, .. } = self;
        let (is_scattered, is_tiny) =
            (is_scattered(range, pieces), range.end - range.start <= MAX_PLAIN_READ_BYTES);
        if (!is_scattered || is_tiny)
            && let Some(mut pieces) = in_place_targets::<T, S>(pieces)
        {
            if is_scattered {
                // Fresh memory of the size of a buffer would cost many times what is read.
                let mut tiny = vec![0; (range.end - range.start) as usize];
                ways.read_buffered(file, &mut tiny, range.start)?;
                copy_out(&tiny, range.start, &mut pieces);
                return Ok(());
            }
            let mut pieces = pieces.into_iter();
            return Ok(pieces.try_for_each(|(at, piece)| ways.read_buffered(file, piece, at))?);
        }
        self.read_staged(range, pieces, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            ways.read_buffered(file, &mut buffer[..len], aligned.start)?;
            Ok(Some(ReadMode::Buffered))
        })?;
        Ok(())
    }

    /// Has `read` fill memory with all of a range, and more on both sides so that both ends are aligned; then
    /// the pieces get theirs.
    fn read_staged<T: Target>(
        &self,
        range: &Range<u64>,
        pieces: &mut [(u64, T)],
        read: impl FnOnce(&mut [u8], Range<u64>) -> Result<Option<ReadMode>, source::SourceError>,
    ) -> Result<Option<ReadMode>, LoadError>
    where
        S: Sink<T>,
    {
        const ALIGNMENT: u64 = DIRECT_ALIGNMENT_BYTES as u64;
        let start = range.start / ALIGNMENT * ALIGNMENT;
        let end = range.end.next_multiple_of(ALIGNMENT);
        self.sink.stage(self.source.path, start, pieces, |buffer| {
            read(&mut buffer[..(end - start) as usize], start..end)
        })
    }
}

fn is_scattered<T>(range: &Range<u64>, pieces: &[(u64, T)]) -> bool {
    (range.end - range.start) / (pieces.len() as u64) < MIN_IN_PLACE_PIECE_BYTES
}

/// The memory of all pieces, if all of them are memory.
pub fn in_place_targets<T, S: Sink<T>>(pieces: &mut [(u64, T)]) -> Option<Vec<(u64, &mut [u8])>> {
    pieces.iter_mut().map(|(at, piece)| Some((*at, S::host_memory(piece)?))).collect()
}
