//! The ways to devices: readers fill chunks of pinned memory, which the devices copy from by themselves while the
//! readers fill others; or the storage fills chunks on the device, where it can.
//!
//! In: pieces of what is read, each with its address on a device. Out: copies on the streams of those devices.
//! A chunk goes back to its ring at once, and is filled again only when every copy out of it is over.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::loader::{self, BUFFER_BYTES, Sink};
use crate::source::{self, OpenFile};

use super::CudaError;
use super::chunk_lease::ChunkLease;
use super::destination::DeviceDestination;
use super::gds::{GdsFailure, GdsLoad};
use super::memory::PinnedChunk;
use super::numa::NumaAffinity;
use super::ring::Ring;
use super::stream::CudaStream;

/// What a load to devices passes bytes through.
pub struct DeviceSink<'a> {
    pub ring: &'a Ring<PinnedChunk>,
    /// Those that copy, one of each device.
    pub streams: &'a [Arc<CudaStream>],
    /// The way without the host's memory.
    pub gds: GdsLoad<'a>,
    /// Where readers run.
    pub numa: NumaAffinity,
}

impl DeviceSink<'_> {
    /// A chunk to fill. New ones are made in the context of the device that the first piece belongs to, and
    /// serve all.
    fn lease(
        &self,
        pieces: &[(u64, DeviceDestination)],
    ) -> Result<Option<ChunkLease<'_, PinnedChunk>>, CudaError> {
        let Some((_, first)) = pieces.first() else { return Ok(None) };
        let device = self.streams[first.stream].device();
        ChunkLease::take(self.ring, || device.allocate_pinned(BUFFER_BYTES)).map(Some)
    }
}

impl Sink<DeviceDestination> for DeviceSink<'_> {
    fn host_memory(_: &mut DeviceDestination) -> Option<&mut [u8]> {
        None
    }

    fn run_reader<R>(&self, work: impl FnOnce() -> R) -> R {
        self.numa.run(work)
    }

    fn stage<W>(
        &self,
        path: &Path,
        start: u64,
        pieces: &mut [(u64, DeviceDestination)],
        fill: impl FnOnce(&mut [u8]) -> Result<Option<W>, source::SourceError>,
    ) -> Result<Option<W>, loader::LoadError> {
        let Some(mut taken) = self.lease(pieces).map_err(sink_error(path))? else {
            return Ok(None);
        };
        let Some(chunk) = taken.chunk() else { return Ok(None) };
        let filled = fill(chunk.bytes())?;
        if filled.is_some() {
            // SAFETY: whoever made the load gave its word for the addresses.
            #[allow(unsafe_code)]
            unsafe { taken.copy_out(start, pieces, self.streams) }.map_err(sink_error(path))?;
        }
        Ok(filled)
    }

    fn read_to_device(
        &self,
        path: &Path,
        file: &OpenFile,
        range: &Range<u64>,
        pieces: &mut [(u64, DeviceDestination)],
    ) -> Result<bool, loader::LoadError> {
        // SAFETY: whoever made the load gave its word for the addresses.
        #[allow(unsafe_code)]
        let read = unsafe { self.gds.read(file, range, pieces, self.streams) };
        match read {
            Ok(()) => Ok(true),
            Err(GdsFailure::Unavailable(missing)) => {
                self.gds.record_unavailable(missing);
                Ok(false)
            }
            Err(GdsFailure::Source(error)) => Err(error.into()),
            Err(GdsFailure::Device(error)) => Err(sink_error(path)(error)),
        }
    }
}

fn sink_error(path: &Path) -> impl Fn(CudaError) -> loader::LoadError {
    move |error| loader::LoadError::Sink { path: path.to_path_buf(), error: Box::new(error) }
}
