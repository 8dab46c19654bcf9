//! The ways to devices: readers fill chunks of pinned memory, which the devices copy from by themselves while the
//! readers fill others; or the storage fills chunks on the device, where it can.
//!
//! In: pieces of what is read, each with its address on a device. Out: copies on the streams of those devices.
//! A chunk goes back to its ring at once, and is filled again only when every copy out of it is over.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::loader::{self, BUFFER, Stage};
use crate::source::{self, OpenFile};

use super::Error;
use super::chunk_lease::Taken;
use super::destination::Place;
use super::gds::{OfLoad, Without};
use super::memory::Pinned;
use super::numa::Near;
use super::ring::Ring;
use super::stream::Stream;

/// What a load to devices passes bytes through.
pub struct Landing<'a> {
    pub ring: &'a Ring<Pinned>,
    /// Those that copy, one of each device.
    pub streams: &'a [Arc<Stream>],
    /// The way without the host's memory.
    pub straight: OfLoad<'a>,
    /// Where readers run.
    pub near: Near,
}

impl Landing<'_> {
    /// A chunk to fill. New ones are made in the context of the device that the first piece belongs to, and
    /// serve all.
    fn taken(&self, pieces: &[(u64, Place)]) -> Result<Option<Taken<'_, Pinned>>, Error> {
        let Some((_, first)) = pieces.first() else { return Ok(None) };
        let device = self.streams[first.stream].device();
        Taken::from(self.ring, || device.pinned(BUFFER)).map(Some)
    }
}

impl Stage<Place> for Landing<'_> {
    fn memory(_: &mut Place) -> Option<&mut [u8]> {
        None
    }

    fn reads<R>(&self, work: impl FnOnce() -> R) -> R {
        self.near.work(work)
    }

    fn pass<W>(
        &self,
        path: &Path,
        start: u64,
        pieces: &mut [(u64, Place)],
        fill: impl FnOnce(&mut [u8]) -> Result<Option<W>, source::Error>,
    ) -> Result<Option<W>, loader::Error> {
        let Some(mut taken) = self.taken(pieces).map_err(at(path))? else { return Ok(None) };
        let Some(chunk) = taken.chunk() else { return Ok(None) };
        let filled = fill(chunk.bytes())?;
        if filled.is_some() {
            // SAFETY: whoever made the load gave its word for the addresses.
            #[allow(unsafe_code)]
            unsafe { taken.copy(start, pieces, self.streams) }.map_err(at(path))?;
        }
        Ok(filled)
    }

    fn straight(
        &self,
        path: &Path,
        file: &OpenFile,
        range: &Range<u64>,
        pieces: &mut [(u64, Place)],
    ) -> Result<bool, loader::Error> {
        // SAFETY: whoever made the load gave its word for the addresses.
        #[allow(unsafe_code)]
        let read = unsafe { self.straight.read(file, range, pieces, self.streams) };
        match read {
            Ok(()) => Ok(true),
            Err(Without::Missing(missing)) => {
                self.straight.is_missing(missing);
                Ok(false)
            }
            Err(Without::Source(error)) => Err(error.into()),
            Err(Without::Fault(error)) => Err(at(path)(error)),
        }
    }
}

fn at(path: &Path) -> impl Fn(Error) -> loader::Error {
    move |fault| loader::Error::Stage { path: path.to_path_buf(), fault: Box::new(fault) }
}
