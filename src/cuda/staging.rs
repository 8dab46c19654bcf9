//! Delivers what readers read to devices, through pinned memory or by GPUDirect Storage.
//!
//! Readers fill chunks of pinned memory, which the devices copy from while the readers fill others. Where it can,
//! storage fills chunks on the device instead. A chunk returns to its ring at once, and is filled again only when
//! every copy out of it is done.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::loader::{self, BUFFER_BYTES, Sink};
use crate::source::{self, OpenFile};

use super::chunk_lease::ChunkLease;
use super::destination::DeviceDestination;
use super::error::CudaError;
use super::gds::{GdsFailure, GdsLoad};
use super::memory::PinnedChunk;
use super::numa::NumaAffinity;
use super::ring::Ring;
use super::stream::CudaStream;

/// The sink of a load to devices.
pub struct DeviceSink<'a> {
    pub ring: &'a Ring<PinnedChunk>,
    /// The streams that copy, one for each device.
    pub streams: &'a [Arc<CudaStream>],
    pub gds: GdsLoad<'a>,
    /// The processors that readers run on.
    pub numa: NumaAffinity,
}

impl DeviceSink<'_> {
    /// Takes a chunk to fill. A new one is allocated in the context of the first piece's device, and serves all.
    fn lease(
        &self,
        pieces: &[(u64, DeviceDestination)],
    ) -> Result<Option<ChunkLease<'_, PinnedChunk>>, CudaError> {
        let Some((_, first)) = pieces.first() else { return Ok(None) };
        let device = self.streams[first.stream].device();
        ChunkLease::take(self.ring, || PinnedChunk::allocate(device, BUFFER_BYTES)).map(Some)
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
        let Some(mut lease) = self.lease(pieces).map_err(sink_error(path))? else {
            return Ok(None);
        };
        let Some(chunk) = lease.chunk() else { return Ok(None) };
        let filled = fill(chunk.bytes())?;
        if filled.is_some() {
            // SAFETY: the caller of `DeviceLoader::load_into` guarantees the addresses.
            #[allow(unsafe_code)]
            unsafe { lease.copy_out(start, pieces, self.streams) }.map_err(sink_error(path))?;
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
        // SAFETY: the caller of `DeviceLoader::load_into` guarantees the addresses.
        #[allow(unsafe_code)]
        let read = unsafe { self.gds.read(file, range, pieces, self.streams) };
        match read {
            Ok(()) => Ok(true),
            Err(GdsFailure::Unavailable(reason)) => {
                self.gds.record_unavailable(reason);
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
