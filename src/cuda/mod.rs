//! Loads tensors of any checkpoint into the memory of CUDA devices.
//!
//! The plan and the readers are those of [`crate::loader`]. Readers fill pinned memory, and each device copies out of
//! it on a stream of its own. Where it can, storage writes to the device instead. The driver is loaded at the first
//! use: without one, a load fails with [`CudaError::NoDriver`].

mod cast_ptx;
mod chunk_lease;
mod cufile;
mod destination;
mod device_cast;
mod driver;
mod error;
mod gds;
mod memory;
mod numa;
mod ring;
#[cfg(test)]
mod ring_tests;
mod staging;
mod stream;
mod suballocator;
mod sync;
mod zero_copy;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use crate::checkpoint::Tensor;
use crate::loader::{self, BUFFER_BYTES, LoadReport, OpenCheckpoint, SinkRequest};
use crate::threads::lock;

use destination::DeviceDestination;
use device_cast::DeviceCasts;
pub use driver::{Device, device_count, is_available};
pub use error::CudaError;
pub use gds::GpudirectMode;
use gds::{GdsLoad, GdsState};
pub use memory::DeviceMemory;
use memory::PinnedChunk;
use numa::NumaAffinity;
use ring::Ring;
use staging::DeviceSink;
pub use stream::CudaStream;
pub use suballocator::DeviceSlice;

/// The default limit of pinned memory for one loader.
pub const DEFAULT_PINNED_BYTES: u64 = 512 << 20;

/// Streams of one device that are kept, which may still have work of loads that have returned.
const MAX_STREAM_COUNT: usize = 8;

/// A tensor, or a part of one, and its destination.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLoadRequest<'a> {
    /// The checkpoint of the tensor.
    pub checkpoint: &'a OpenCheckpoint,
    /// The tensor to load.
    pub tensor: &'a Tensor,
    /// The number of the device.
    pub device: usize,
    /// The address on the device, of as many bytes as the tensor has.
    pub address: u64,
}

/// Loads tensors to devices. Keep it for several loads: pinned memory is expensive to allocate.
#[derive(Debug)]
pub struct DeviceLoader {
    /// Chunks of pinned memory. Dropped before the streams: each waits for the copies out of it.
    ring: Ring<PinnedChunk>,
    gds: GdsState,
    /// Dropped after the chunks, which wait for the casts that read them.
    casts: DeviceCasts,
    /// Streams that no load uses.
    streams: Mutex<Vec<Arc<CudaStream>>>,
    /// Devices that are open, by number.
    devices: Mutex<BTreeMap<usize, Arc<Device>>>,
}

impl DeviceLoader {
    /// A loader with at most `pinned` bytes of pinned memory, such as [`DEFAULT_PINNED_BYTES`]. Opens no device.
    pub fn new(pinned: u64) -> DeviceLoader {
        DeviceLoader {
            ring: Ring::new(chunk_count(pinned)),
            gds: GdsState::default(),
            casts: DeviceCasts::default(),
            streams: Mutex::default(),
            devices: Mutex::default(),
        }
    }

    /// Sets whether the loader uses GPUDirect Storage. What storage writes to a device does not pass through pinned
    /// memory, and takes at most 64 MiB of the device.
    pub fn with_gpudirect(mut self, mode: GpudirectMode) -> DeviceLoader {
        self.gds.mode = mode;
        self
    }

    /// The device of a number.
    pub fn device(&self, ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let mut devices = lock(&self.devices);
        if let Some(device) = devices.get(&ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Device::open(ordinal)?;
        devices.insert(ordinal, Arc::clone(&device));
        Ok(device)
    }

    /// A stream for one load: an idle one or a new one. At [`MAX_STREAM_COUNT`], a busy one.
    fn stream(&self, ordinal: usize) -> Result<Arc<CudaStream>, CudaError> {
        let mut streams = lock(&self.streams);
        let is_of_device = |stream: &Arc<CudaStream>| stream.device().ordinal() == ordinal;
        let count = streams.iter().filter(|stream| is_of_device(stream)).count();
        let idle = streams.iter().position(|stream| is_of_device(stream) && stream.is_idle());
        let busy = || streams.iter().position(is_of_device).filter(|_| count >= MAX_STREAM_COUNT);
        if let Some(index) = idle.or_else(busy) {
            return Ok(streams.remove(index));
        }
        drop(streams);
        Ok(Arc::new(CudaStream::create(&self.device(ordinal)?)?))
    }

    /// Fails unless loads to a device are possible: opens it, and allocates pinned memory.
    pub fn prepare(&self, ordinal: usize) -> Result<(), CudaError> {
        let device = self.device(ordinal)?;
        if device.is_integrated() {
            return Ok(());
        }
        // If chunks exist, others return them. This must not wait for that.
        if !self.ring.has_any() {
            let chunk = self.ring.take(|| PinnedChunk::allocate(&device, BUFFER_BYTES))?;
            self.ring.give_back(chunk);
        }
        Ok(())
    }

    /// Loads tensors into new memory of a device, small ones together in blocks, and waits for them. For a device
    /// that uses the host's memory, they are read into place.
    pub fn load(
        &self,
        tensors: &[(&OpenCheckpoint, &Tensor)],
        ordinal: usize,
    ) -> Result<(Vec<DeviceSlice>, LoadReport), CudaError> {
        self.load_with(tensors, ordinal, &AtomicBool::new(false), None)
    }

    /// As [`DeviceLoader::load`], until `stop` is set, on at most `threads` threads.
    pub fn load_with(
        &self,
        tensors: &[(&OpenCheckpoint, &Tensor)],
        ordinal: usize,
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<(Vec<DeviceSlice>, LoadReport), CudaError> {
        let lengths: Vec<usize> =
            tensors.iter().map(|(_, tensor)| tensor.bytes.len() as usize).collect();
        let device = self.device(ordinal)?;
        let memory = DeviceSlice::allocate(&device, &lengths)?;
        if device.is_integrated() {
            let report = load_shared(tensors, &memory, stop, threads)?;
            return Ok((memory, report));
        }
        let requests = tensors.iter().zip(&memory).map(|((checkpoint, tensor), memory)| {
            DeviceLoadRequest { checkpoint, tensor, device: ordinal, address: memory.address() }
        });
        // SAFETY: each slice was allocated for its tensor, has its length, and is kept until the load has returned.
        #[allow(unsafe_code)]
        let report = unsafe { self.load_into(requests, &[], stop, threads) }?;
        Ok((memory, report))
    }

    /// Loads tensors, each to its address, until `stop` is set, on at most `threads` threads.
    ///
    /// `users` are streams of the callers that use the memory. Work that is queued on them after this returns finds
    /// the bytes there. Work that was queued before ends before the first byte is written. For devices without such
    /// a stream, the bytes are there when this returns. After an error the contents of the memory are unspecified,
    /// and nothing is written any more.
    ///
    /// # Safety
    ///
    /// Each address must be of as many bytes of that device's memory as the tensor has. They must belong to the
    /// caller alone until the load is over for all users. If work that is still queued uses the memory, its stream
    /// must be among the users.
    #[allow(unsafe_code)]
    pub unsafe fn load_into<'a>(
        &self,
        requests: impl IntoIterator<Item = DeviceLoadRequest<'a>>,
        users: &[CudaStream],
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<LoadReport, CudaError> {
        let mut lease = StreamLease { loader: self, streams: Vec::new(), is_complete: false };
        let (mut sink_requests, mut cast_bytes) = (Vec::new(), 0);
        for DeviceLoadRequest { checkpoint, tensor, device, address } in requests {
            let is_of_device = |stream: &Arc<CudaStream>| stream.device().ordinal() == device;
            let stream = match lease.streams.iter().position(is_of_device) {
                Some(stream) => stream,
                None => {
                    lease.streams.push(self.stream(device)?);
                    lease.streams.len() - 1
                }
            };
            let found = self.casts.find(lease.streams[stream].device(), &tensor.bytes, address);
            let (cast, bytes) = match found {
                Some((cast, bytes)) => (Some(cast), bytes),
                None => (None, &tensor.bytes),
            };
            cast_bytes += cast.as_ref().map_or(0, |_| tensor.bytes.len());
            let target = DeviceDestination { stream, address, len: bytes.len(), cast };
            sink_requests.push(SinkRequest { checkpoint, tensor, bytes, target });
        }
        for (stream, user) in pairs_by_device(&lease.streams, users) {
            stream.wait_event(&user.record_event()?)?;
        }
        let buses = lease.streams.iter().map(|stream| stream.device().bus_id());
        let sink = DeviceSink {
            ring: &self.ring,
            streams: &lease.streams,
            gds: GdsLoad::new(&self.gds),
            numa: NumaAffinity::for_devices(buses),
        };
        let report = loader::load_with_sink(sink_requests, &sink, stop, threads)?;
        order_users_after(&lease.streams, users)?;
        let without_gpudirect = sink.gds.reason();
        lease.is_complete = true;
        let cast = report.cast + cast_bytes;
        Ok(LoadReport { without_gpudirect, cast, device_cast: cast_bytes, ..report })
    }

    /// Frees idle pinned memory until at most `pinned` bytes remain, and the idle chunks of GPUDirect Storage.
    pub fn trim(&self, pinned: u64) {
        self.ring.shrink(chunk_count(pinned), drop);
        self.gds.trim();
    }
}

fn chunk_count(pinned: u64) -> usize {
    usize::try_from(pinned / BUFFER_BYTES as u64).unwrap_or(usize::MAX)
}

/// The streams of a load. When the load is over, however it ends, its memory may be reused.
struct StreamLease<'a> {
    loader: &'a DeviceLoader,
    streams: Vec<Arc<CudaStream>>,
    /// The users wait for the streams, or the load has waited.
    is_complete: bool,
}

impl Drop for StreamLease<'_> {
    fn drop(&mut self) {
        for stream in self.streams.iter().filter(|_| !self.is_complete) {
            let _ = stream.synchronize();
        }
        lock(&self.loader.streams).append(&mut self.streams);
    }
}

/// Loads tensors into memory that the host and the device share.
fn load_shared(
    tensors: &[(&OpenCheckpoint, &Tensor)],
    memory: &[DeviceSlice],
    stop: &AtomicBool,
    threads: Option<usize>,
) -> Result<LoadReport, CudaError> {
    let requests = tensors.iter().zip(memory).map(|(&(checkpoint, tensor), slice)| {
        // SAFETY: the slice was allocated for this tensor and has no other user, and no two slices share a byte.
        #[allow(unsafe_code)]
        let target = slice.host_bytes().map_or(&mut [][..], |bytes| unsafe { &mut *bytes });
        loader::LoadRequest { checkpoint, tensor, target }
    });
    Ok(loader::load_many(requests, stop, threads)?)
}

/// Makes the users wait for the load's streams; where a device has no user, waits for its stream.
fn order_users_after(streams: &[Arc<CudaStream>], users: &[CudaStream]) -> Result<(), CudaError> {
    for stream in streams {
        let mut has_user = false;
        for (_, user) in pairs_by_device(std::slice::from_ref(stream), users) {
            user.wait_event(&stream.record_event()?)?;
            has_user = true;
        }
        if !has_user {
            stream.synchronize()?;
        }
    }
    Ok(())
}

/// The pairs of streams on the same device.
fn pairs_by_device<'a>(
    streams: &'a [Arc<CudaStream>],
    users: &'a [CudaStream],
) -> impl Iterator<Item = (&'a CudaStream, &'a CudaStream)> {
    streams.iter().flat_map(move |stream| {
        let same = users.iter().filter(|user| user.device().ordinal() == stream.device().ordinal());
        same.map(move |user| (&**stream, user))
    })
}
