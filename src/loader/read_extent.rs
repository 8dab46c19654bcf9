//! Reads a stretch of one file, in the way that is best for it when its turn comes.
//!
//! In: a stretch, and the [`Stage`] that knows the way to its targets. Out: nothing, when its bytes were handed on
//! and are what was parsed.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::source::{self, DIRECT_ALIGNMENT, OpenFile, Way, Ways};

use super::Error;
use super::execute::From;
use super::left::Left;
use super::plan::{Stretch, Target};
use super::sink::{Stage, copy_out};

/// A stretch of no more than this is read plainly: asking what is cached would cost as much.
const TINY: u64 = 64 << 10;

/// Pieces that are shorter than this on average are read together and copied out.
const SCATTERED: u64 = 16 << 10;

/// A file of a checkpoint that a stretch of is read.
pub struct Reading<'a, S> {
    pub from: &'a From<'a>,
    pub ways: &'a Ways,
    pub file: &'a OpenFile,
    pub stage: &'a S,
}

impl<S> Reading<'_, S> {
    pub fn stretch<T: Target>(
        &self,
        stretch: Stretch<T>,
        left: Option<&Left<'_>>,
    ) -> Result<(), Error>
    where
        S: Stage<T>,
    {
        let Stretch { origin, range, mut pieces, .. } = stretch;
        let Reading { from: From { tally, .. }, ways, file, .. } = self;
        let len = range.end - range.start;
        let is_tiny = len <= TINY;
        if !is_tiny && ways.is_cached(file, &range) && self.cached(&range, &mut pieces)? {
            tally.cached.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if !is_tiny && self.stage.straight(self.from.path, file, &range, &mut pieces)? {
            tally.gpudirect.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if is_tiny || !ways.is_direct(file) {
            self.buffered(&range, &mut pieces)?;
            tally.buffered.fetch_add(len, Ordering::Relaxed);
            if let Some(left) = left {
                left.let_go(origin, &range);
            }
            return Ok(());
        }
        let way = self.through(&range, &mut pieces, |buffer, aligned| {
            let there = (aligned.end.min(file.file().identity().size) - aligned.start) as usize;
            ways.read(file, buffer, there, aligned.start).map(Some)
        })?;
        let tally = match way {
            Some(Way::Buffered) => &tally.buffered,
            _ => &tally.direct,
        };
        tally.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// From the page cache; whether all of it was there.
    fn cached<T: Target>(&self, range: &Range<u64>, pieces: &mut [(u64, T)]) -> Result<bool, Error>
    where
        S: Stage<T>,
    {
        let Reading { ways, file, .. } = self;
        if !is_scattered(range, pieces)
            && let Some(pieces) = in_place::<T, S>(pieces)
        {
            let mut pieces = pieces.into_iter();
            let there = pieces.all(|(at, piece)| ways.read_cached(file, piece, at));
            file.check_unchanged()?;
            return Ok(there);
        }
        let there = self.through(range, pieces, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            let there = ways.read_cached(file, &mut buffer[..len], aligned.start);
            file.check_unchanged()?;
            Ok(there.then_some(Way::Buffered))
        })?;
        Ok(there.is_some())
    }

    /// Through the page cache.
    fn buffered<T: Target>(&self, range: &Range<u64>, pieces: &mut [(u64, T)]) -> Result<(), Error>
    where
        S: Stage<T>,
    {
        let Reading { ways, file, .. } = self;
        let (is_scattered, is_tiny) =
            (is_scattered(range, pieces), range.end - range.start <= TINY);
        if (!is_scattered || is_tiny)
            && let Some(mut pieces) = in_place::<T, S>(pieces)
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
        self.through(range, pieces, |buffer, aligned| {
            let len = (range.end - aligned.start) as usize;
            ways.read_buffered(file, &mut buffer[..len], aligned.start)?;
            Ok(Some(Way::Buffered))
        })?;
        Ok(())
    }

    /// Has `read` fill memory with all of a range, and more on both sides so that both ends are aligned; then
    /// the pieces get theirs.
    fn through<T: Target>(
        &self,
        range: &Range<u64>,
        pieces: &mut [(u64, T)],
        read: impl FnOnce(&mut [u8], Range<u64>) -> Result<Option<Way>, source::Error>,
    ) -> Result<Option<Way>, Error>
    where
        S: Stage<T>,
    {
        const ALIGNMENT: u64 = DIRECT_ALIGNMENT as u64;
        let start = range.start / ALIGNMENT * ALIGNMENT;
        let end = range.end.next_multiple_of(ALIGNMENT);
        self.stage.pass(self.from.path, start, pieces, |buffer| {
            read(&mut buffer[..(end - start) as usize], start..end)
        })
    }
}

fn is_scattered<T>(range: &Range<u64>, pieces: &[(u64, T)]) -> bool {
    (range.end - range.start) / (pieces.len() as u64) < SCATTERED
}

/// The memory of all pieces, if all of them are memory.
pub fn in_place<T, S: Stage<T>>(pieces: &mut [(u64, T)]) -> Option<Vec<(u64, &mut [u8])>> {
    pieces.iter_mut().map(|(at, piece)| Some((*at, S::memory(piece)?))).collect()
}
