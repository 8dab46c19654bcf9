//! Tensors of any checkpoint in the memory of CUDA devices.
//!
//! In: tensors of [`Opened`] checkpoints, and addresses on devices. Out: the bytes there, at the speed of the
//! slower of storage and copying. The engine's plan and its readers do the reading ([`crate::loader`]); what
//! they fill here is pinned memory, out of which each device copies by itself on a stream of its own; or storage
//! writes to the device, where it can. The driver is found when it is first needed: what is built with this runs
//! where there is none, and says so.

mod chunk_lease;
mod cufile;
mod destination;
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
use crate::loader::{self, BUFFER_BYTES, LoadReport, OpenCheckpoint};
use crate::threads::lock;

use destination::DeviceDestination;
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

/// Pinned memory that a load passes bytes through, at the most, if nothing else is said.
pub const DEFAULT_PINNED_BYTES: u64 = 512 << 20;

/// Streams of a device that are kept, and may have work of loads that are over to do.
const MAX_STREAM_COUNT: usize = 8;

/// A tensor, or a part of one, and where it belongs.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLoadRequest<'a> {
    /// The checkpoint that has it.
    pub checkpoint: &'a OpenCheckpoint,
    /// It.
    pub tensor: &'a Tensor,
    /// The number of a device.
    pub device: usize,
    /// The address there of as many bytes as it has.
    pub address: u64,
}

/// What loads to devices. Whoever loads more than once keeps it: pinned memory is dear to make.
#[derive(Debug)]
pub struct DeviceLoader {
    /// Dropped first: its chunks wait for the copies out of them.
    ring: Ring<PinnedChunk>,
    /// The same.
    gds: GdsState,
    /// That copy, and that no load has.
    streams: Mutex<Vec<Arc<CudaStream>>>,
    /// Those that were loaded to.
    devices: Mutex<BTreeMap<usize, Arc<Device>>>,
}

impl DeviceLoader {
    /// With so much pinned memory at the most ([`PINNED`] is a good measure). Devices are looked for when
    /// something is to be loaded there.
    pub fn new(pinned: u64) -> DeviceLoader {
        let chunks = usize::try_from(pinned / BUFFER_BYTES as u64).unwrap_or(usize::MAX);
        let (straight, streams, devices) = Default::default();
        DeviceLoader { ring: Ring::new(chunks), gds: straight, streams, devices }
    }

    /// The same, which uses GPUDirect Storage as is said: what storage can write to a device by itself does not
    /// go by the host's memory, and takes 64 MiB of the device at the most.
    pub fn with_gpudirect(mut self, choice: GpudirectMode) -> DeviceLoader {
        self.gds.mode = choice;
        self
    }

    /// The device of a number.
    pub fn device(&self, on: usize) -> Result<Arc<Device>, CudaError> {
        let mut devices = lock(&self.devices);
        if let Some(device) = devices.get(&on) {
            return Ok(Arc::clone(device));
        }
        let device = Device::open(on)?;
        devices.insert(on, Arc::clone(&device));
        Ok(device)
    }

    /// A stream for one load to a device. It waits for nobody whom other loads wait for, unless there are many.
    fn stream(&self, on: usize) -> Result<Arc<CudaStream>, CudaError> {
        let mut streams = lock(&self.streams);
        let its = |stream: &Arc<CudaStream>| stream.device().ordinal() == on;
        let there = streams.iter().filter(|stream| its(stream)).count();
        let idle = streams.iter().position(|stream| its(stream) && stream.is_idle());
        let any = || streams.iter().position(its).filter(|_| there >= MAX_STREAM_COUNT);
        if let Some(place) = idle.or_else(any) {
            return Ok(streams.remove(place));
        }
        drop(streams);
        Ok(Arc::new(self.device(on)?.create_stream()?))
    }

    /// Sees to it that a device can be loaded to: it is there, and so is memory to pass bytes through.
    pub fn prepare(&self, on: usize) -> Result<(), CudaError> {
        let device = self.device(on)?;
        if device.is_integrated() {
            return Ok(());
        }
        // Chunks that others have come back. Nobody waits for them here.
        if !self.ring.has_any() {
            self.ring.give_back(self.ring.take(|| device.allocate_pinned(BUFFER_BYTES))?);
        }
        Ok(())
    }

    /// Loads tensors into memory of a device, small ones together in blocks, and waits until they are there. A
    /// device that uses the host's memory has them where they were read to.
    pub fn load(
        &self,
        tensors: &[(&OpenCheckpoint, &Tensor)],
        on: usize,
    ) -> Result<(Vec<DeviceSlice>, LoadReport), CudaError> {
        self.load_with(tensors, on, &AtomicBool::new(false), None)
    }

    /// The same, until it is done or whoever wants it sets `stop`, on so many threads at the most if they are said.
    pub fn load_with(
        &self,
        tensors: &[(&OpenCheckpoint, &Tensor)],
        on: usize,
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<(Vec<DeviceSlice>, LoadReport), CudaError> {
        let lengths: Vec<usize> = tensors.iter().map(|(_, it)| it.bytes.len() as usize).collect();
        let device = self.device(on)?;
        let memory = device.allocate_slices(&lengths)?;
        if device.is_integrated() {
            let report = load_shared(tensors, &memory, stop, threads)?;
            return Ok((memory, report));
        }
        let wanted = tensors.iter().zip(&memory);
        let wanted = wanted.map(|((of, tensor), memory)| DeviceLoadRequest {
            checkpoint: of,
            tensor,
            device: on,
            address: memory.address(),
        });
        // SAFETY: the memory was made for this, as long as what is loaded into it, and is kept until it is there.
        #[allow(unsafe_code)]
        let report = unsafe { self.load_into(wanted, &[], stop, threads) }?;
        Ok((memory, report))
    }

    /// Loads tensors, each to its address, until it is done or whoever wants it sets `stop`. `users` are streams
    /// of those who have the memory: what one of a device is given after this returns finds the bytes there,
    /// and what it was given before is over when the first byte is written there. On devices without one the
    /// bytes are there when this returns. After an error what is there is of no worth, and nothing is written
    /// any more.
    ///
    /// # Safety
    ///
    /// At each address must be as many bytes of memory of that device as the tensor has, the caller's alone
    /// until the load is over for all who use it; memory that was used by work that may not be over needs the
    /// stream of that work among the users.
    #[allow(unsafe_code)]
    pub unsafe fn load_into<'a>(
        &self,
        wanted: impl IntoIterator<Item = DeviceLoadRequest<'a>>,
        users: &[CudaStream],
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<LoadReport, CudaError> {
        let mut has = StreamLease { loader: self, streams: Vec::new(), is_complete: false };
        let mut places = Vec::new();
        for DeviceLoadRequest { checkpoint: of, tensor, device: on, address: at } in wanted {
            let is_it = |stream: &Arc<CudaStream>| stream.device().ordinal() == on;
            let stream = match has.streams.iter().position(is_it) {
                Some(stream) => stream,
                None => {
                    has.streams.push(self.stream(on)?);
                    has.streams.len() - 1
                }
            };
            places.push((
                of,
                tensor,
                DeviceDestination { stream, address: at, len: tensor.bytes.len() },
            ));
        }
        for (stream, user) in pairs_by_device(&has.streams, users) {
            stream.wait_event(&user.record_event()?)?;
        }
        let straight = GdsLoad::new(&self.gds);
        let near =
            NumaAffinity::for_devices(has.streams.iter().map(|stream| stream.device().bus_id()));
        let landing =
            DeviceSink { ring: &self.ring, streams: &has.streams, gds: straight, numa: near };
        let loaded =
            loader::load_with_sink(places, &landing, stop, threads).map_err(CudaError::from);
        let over =
            loaded.and_then(|report| order_users_after(&has.streams, users).map(|()| report));
        let report =
            over.map(|report| LoadReport { without_gpudirect: landing.gds.reason(), ..report });
        has.is_complete = report.is_ok();
        report
    }

    /// Gives pinned memory back to the system, until there is no more than this: as much of it as is idle. And to
    /// the devices what storage wrote to.
    pub fn trim(&self, pinned: u64) {
        self.ring.shrink(usize::try_from(pinned / BUFFER_BYTES as u64).unwrap_or(usize::MAX), drop);
        self.gds.trim();
    }
}

/// The streams that a load has. Whoever has its memory may give that to others from its end on, however that comes.
struct StreamLease<'a> {
    loader: &'a DeviceLoader,
    streams: Vec<Arc<CudaStream>>,
    /// Its end waits for nobody: those who use what was loaded do, or have.
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
    let wanted = tensors.iter().zip(memory).map(|(&(of, tensor), piece)| {
        // SAFETY: it was made for this, nobody else has it yet, and no two pieces share a byte.
        #[allow(unsafe_code)]
        let target = piece.host_bytes().map_or(&mut [][..], |here| unsafe { &mut *here });
        loader::LoadRequest { checkpoint: of, tensor, target }
    });
    Ok(loader::load_many(wanted, stop, threads)?)
}

/// Has those who use what was loaded wait for it.
fn order_users_after(streams: &[Arc<CudaStream>], users: &[CudaStream]) -> Result<(), CudaError> {
    for stream in streams {
        let mut is_waited_for = false;
        for (_, user) in pairs_by_device(std::slice::from_ref(stream), users) {
            user.wait_event(&stream.record_event()?)?;
            is_waited_for = true;
        }
        if !is_waited_for {
            stream.synchronize()?;
        }
    }
    Ok(())
}

/// The pairs that belong to one device.
fn pairs_by_device<'a>(
    streams: &'a [Arc<CudaStream>],
    users: &'a [CudaStream],
) -> impl Iterator<Item = (&'a CudaStream, &'a CudaStream)> {
    streams.iter().flat_map(move |stream| {
        let its = users.iter().filter(|user| user.device().ordinal() == stream.device().ordinal());
        its.map(move |user| (&**stream, user))
    })
}
