//! The way to devices: readers fill chunks of pinned memory, which the devices copy from by themselves while the
//! readers fill others.
//!
//! In: pieces of what is read, each with its address on a device. Out: copies on the streams of those devices.
//! A chunk goes back to the ring at once, and is filled again only when every copy out of it is over.

use std::path::Path;
use std::sync::Arc;

use crate::loader::{self, BUFFER, Stage, Target};
use crate::source;

use super::Error;
use super::driver::Device;
use super::memory::Pinned;
use super::ring::Ring;
use super::stream::{Event, Stream};

/// Where bytes belong on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which of the devices of the load.
    pub on: usize,
    /// The address there.
    pub at: u64,
    /// How many.
    pub len: u64,
}

impl Target for Place {
    fn len(&self) -> u64 {
        self.len
    }

    fn cut(self, at: u64) -> (Self, Self) {
        let Place { on, at: start, len } = self;
        (Place { len: at, ..self }, Place { on, at: start + at, len: len - at })
    }
}

/// What a load to devices passes bytes through.
pub struct Landing<'a> {
    pub ring: &'a Ring<Pinned>,
    /// Of each device the stream that copies.
    pub streams: &'a [Stream],
    /// The device in whose context chunks are made.
    pub home: &'a Arc<Device>,
}

/// A chunk that is given back whatever happens.
struct Taken<'a> {
    ring: &'a Ring<Pinned>,
    chunk: Option<Pinned>,
}

impl Taken<'_> {
    /// It may be read for ever, and so must never be filled or freed.
    fn forget(mut self) {
        std::mem::forget(self.chunk.take());
        self.ring.lost();
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            self.ring.give(chunk);
        }
    }
}

impl Landing<'_> {
    fn taken(&self) -> Result<Taken<'_>, Error> {
        let mut chunk = self.ring.take(|| self.home.pinned(BUFFER))?;
        chunk.is_free();
        Ok(Taken { ring: self.ring, chunk: Some(chunk) })
    }

    /// Has the pieces copied out of a chunk, and says to it how long that takes.
    fn copy(&self, mut taken: Taken<'_>, start: u64, pieces: &[(u64, Place)]) -> Result<(), Error> {
        let Some(chunk) = taken.chunk.as_mut() else { return Ok(()) };
        let copied = pieces.iter().try_for_each(|(at, place)| {
            let from = (at - start) as usize;
            let bytes = &chunk.bytes()[from..from + place.len as usize];
            // SAFETY: whoever made the load gave its word for the addresses; the chunk is not filled before
            // what is marked below is over.
            #[allow(unsafe_code)]
            unsafe {
                self.streams[place.on].copy(bytes, place.at)
            }
        });
        // Also where one failed: those before it are under way.
        let used = |on: &usize| pieces.iter().any(|(_, place)| place.on == *on);
        let marks: Result<Vec<Event>, Error> =
            (0..self.streams.len()).filter(used).map(|on| self.streams[on].mark()).collect();
        match marks {
            Ok(marks) => chunk.is_read_until(marks),
            Err(fault) => {
                taken.forget();
                return copied.and(Err(fault));
            }
        }
        copied
    }
}

impl Stage<Place> for Landing<'_> {
    fn memory(_: &mut Place) -> Option<&mut [u8]> {
        None
    }

    fn pass<W>(
        &self,
        path: &Path,
        start: u64,
        pieces: &mut [(u64, Place)],
        fill: impl FnOnce(&mut [u8]) -> Result<Option<W>, source::Error>,
    ) -> Result<Option<W>, loader::Error> {
        let fault = |fault: Error| loader::Error::Stage {
            path: path.to_path_buf(),
            fault: Box::new(fault),
        };
        let mut taken = self.taken().map_err(fault)?;
        let Some(chunk) = taken.chunk.as_mut() else { return Ok(None) };
        let filled = fill(chunk.bytes())?;
        if filled.is_some() {
            self.copy(taken, start, pieces).map_err(fault)?;
        }
        Ok(filled)
    }
}
