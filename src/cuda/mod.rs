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
use crate::loader::{self, BUFFER, Opened, Report};
use crate::threads::lock;

use destination::Place;
pub use driver::{Device, count, is_there};
pub use error::Error;
pub use gds::Gpudirect;
use gds::{OfLoad, Straight};
pub use memory::Memory;
use memory::Pinned;
use numa::Near;
use ring::Ring;
use staging::Landing;
pub use stream::Stream;
pub use suballocator::Piece;

/// Pinned memory that a load passes bytes through, at the most, if nothing else is said.
pub const PINNED: u64 = 512 << 20;

/// Streams of a device that are kept, and may have work of loads that are over to do.
const STREAMS: usize = 8;

/// A tensor, or a part of one, and where it belongs.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The checkpoint that has it.
    pub of: &'a Opened,
    /// It.
    pub tensor: &'a Tensor,
    /// The number of a device.
    pub on: usize,
    /// The address there of as many bytes as it has.
    pub at: u64,
}

/// What loads to devices. Whoever loads more than once keeps it: pinned memory is dear to make.
#[derive(Debug)]
pub struct Loader {
    /// Dropped first: its chunks wait for the copies out of them.
    ring: Ring<Pinned>,
    /// The same.
    straight: Straight,
    /// That copy, and that no load has.
    streams: Mutex<Vec<Arc<Stream>>>,
    /// Those that were loaded to.
    devices: Mutex<BTreeMap<usize, Arc<Device>>>,
}

impl Loader {
    /// With so much pinned memory at the most ([`PINNED`] is a good measure). Devices are looked for when
    /// something is to be loaded there.
    pub fn new(pinned: u64) -> Loader {
        let chunks = usize::try_from(pinned / BUFFER as u64).unwrap_or(usize::MAX);
        let (straight, streams, devices) = Default::default();
        Loader { ring: Ring::new(chunks), straight, streams, devices }
    }

    /// The same, which uses GPUDirect Storage as is said: what storage can write to a device by itself does not
    /// go by the host's memory, and takes 64 MiB of the device at the most.
    pub fn gpudirect(mut self, choice: Gpudirect) -> Loader {
        self.straight.choice = choice;
        self
    }

    /// The device of a number.
    pub fn device(&self, on: usize) -> Result<Arc<Device>, Error> {
        let mut devices = lock(&self.devices);
        if let Some(device) = devices.get(&on) {
            return Ok(Arc::clone(device));
        }
        let device = Device::at(on)?;
        devices.insert(on, Arc::clone(&device));
        Ok(device)
    }

    /// A stream for one load to a device. It waits for nobody whom other loads wait for, unless there are many.
    fn stream(&self, on: usize) -> Result<Arc<Stream>, Error> {
        let mut streams = lock(&self.streams);
        let its = |stream: &Arc<Stream>| stream.device().ordinal() == on;
        let there = streams.iter().filter(|stream| its(stream)).count();
        let idle = streams.iter().position(|stream| its(stream) && stream.is_over());
        let any = || streams.iter().position(its).filter(|_| there >= STREAMS);
        if let Some(place) = idle.or_else(any) {
            return Ok(streams.remove(place));
        }
        drop(streams);
        Ok(Arc::new(self.device(on)?.stream()?))
    }

    /// Sees to it that a device can be loaded to: it is there, and so is memory to pass bytes through.
    pub fn prepare(&self, on: usize) -> Result<(), Error> {
        let device = self.device(on)?;
        if device.is_integrated() {
            return Ok(());
        }
        // Chunks that others have come back. Nobody waits for them here.
        if !self.ring.has_any() {
            self.ring.give(self.ring.take(|| device.pinned(BUFFER))?);
        }
        Ok(())
    }

    /// Loads tensors into memory of a device, small ones together in blocks, and waits until they are there. A
    /// device that uses the host's memory has them where they were read to.
    pub fn load(
        &self,
        tensors: &[(&Opened, &Tensor)],
        on: usize,
    ) -> Result<(Vec<Piece>, Report), Error> {
        self.load_until(tensors, on, &AtomicBool::new(false), None)
    }

    /// The same, until it is done or whoever wants it sets `stop`, on so many threads at the most if they are said.
    pub fn load_until(
        &self,
        tensors: &[(&Opened, &Tensor)],
        on: usize,
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<(Vec<Piece>, Report), Error> {
        let lengths: Vec<usize> = tensors.iter().map(|(_, it)| it.bytes.len() as usize).collect();
        let device = self.device(on)?;
        let memory = device.pieces(&lengths)?;
        if device.is_integrated() {
            let report = filled(tensors, &memory, stop, threads)?;
            return Ok((memory, report));
        }
        let wanted = tensors.iter().zip(&memory);
        let wanted =
            wanted.map(|((of, tensor), memory)| Wanted { of, tensor, on, at: memory.at() });
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
        wanted: impl IntoIterator<Item = Wanted<'a>>,
        users: &[Stream],
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<Report, Error> {
        let mut has = Has { loader: self, streams: Vec::new(), is_over: false };
        let mut places = Vec::new();
        for Wanted { of, tensor, on, at } in wanted {
            let is_it = |stream: &Arc<Stream>| stream.device().ordinal() == on;
            let stream = match has.streams.iter().position(is_it) {
                Some(stream) => stream,
                None => {
                    has.streams.push(self.stream(on)?);
                    has.streams.len() - 1
                }
            };
            places.push((of, tensor, Place { stream, at, len: tensor.bytes.len() }));
        }
        for (stream, user) in of_one_device(&has.streams, users) {
            stream.wait_for(&user.mark()?)?;
        }
        let straight = OfLoad::new(&self.straight);
        let near = Near::to(has.streams.iter().map(|stream| stream.device().bus()));
        let landing = Landing { ring: &self.ring, streams: &has.streams, straight, near };
        let loaded = loader::load_by(places, &landing, stop, threads).map_err(Error::from);
        let over = loaded.and_then(|report| over_for(&has.streams, users).map(|()| report));
        let report =
            over.map(|report| Report { without_gpudirect: landing.straight.why(), ..report });
        has.is_over = report.is_ok();
        report
    }

    /// Gives pinned memory back to the system, until there is no more than this: as much of it as is idle. And to
    /// the devices what storage wrote to.
    pub fn trim(&self, pinned: u64) {
        self.ring.shrink(usize::try_from(pinned / BUFFER as u64).unwrap_or(usize::MAX), drop);
        self.straight.trim();
    }
}

/// The streams that a load has. Whoever has its memory may give that to others from its end on, however that comes.
struct Has<'a> {
    loader: &'a Loader,
    streams: Vec<Arc<Stream>>,
    /// Its end waits for nobody: those who use what was loaded do, or have.
    is_over: bool,
}

impl Drop for Has<'_> {
    fn drop(&mut self) {
        for stream in self.streams.iter().filter(|_| !self.is_over) {
            let _ = stream.finish();
        }
        lock(&self.loader.streams).append(&mut self.streams);
    }
}

/// Loads tensors into memory that the host and the device share.
fn filled(
    tensors: &[(&Opened, &Tensor)],
    memory: &[Piece],
    stop: &AtomicBool,
    threads: Option<usize>,
) -> Result<Report, Error> {
    let wanted = tensors.iter().zip(memory).map(|(&(of, tensor), piece)| {
        // SAFETY: it was made for this, nobody else has it yet, and no two pieces share a byte.
        #[allow(unsafe_code)]
        let target = piece.here().map_or(&mut [][..], |here| unsafe { &mut *here });
        loader::Wanted { of, tensor, target }
    });
    Ok(loader::load_many(wanted, stop, threads)?)
}

/// Has those who use what was loaded wait for it.
fn over_for(streams: &[Arc<Stream>], users: &[Stream]) -> Result<(), Error> {
    for stream in streams {
        let mut is_waited_for = false;
        for (_, user) in of_one_device(std::slice::from_ref(stream), users) {
            user.wait_for(&stream.mark()?)?;
            is_waited_for = true;
        }
        if !is_waited_for {
            stream.finish()?;
        }
    }
    Ok(())
}

/// The pairs that belong to one device.
fn of_one_device<'a>(
    streams: &'a [Arc<Stream>],
    users: &'a [Stream],
) -> impl Iterator<Item = (&'a Stream, &'a Stream)> {
    streams.iter().flat_map(move |stream| {
        let its = users.iter().filter(|user| user.device().ordinal() == stream.device().ordinal());
        its.map(move |user| (&**stream, user))
    })
}
