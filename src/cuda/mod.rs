//! Tensors of any checkpoint in the memory of CUDA devices.
//!
//! In: tensors of [`Opened`] checkpoints, and addresses on devices. Out: the bytes there, at the speed of the
//! slower of storage and copying. The engine's plan and its readers do the reading ([`crate::loader`]); what
//! they fill here is pinned memory, out of which each device copies by itself on a stream of its own. The driver
//! is found when it is first needed: what is built with this runs where there is none, and says so.

mod driver;
mod error;
mod memory;
mod ring;
#[cfg(test)]
mod ring_tests;
mod stage;
mod stream;
mod sync;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::checkpoint::Tensor;
use crate::loader::{self, BUFFER, Opened, Report};

pub use driver::{Device, count, is_there};
pub use error::Error;
pub use memory::Memory;
use memory::Pinned;
use ring::Ring;
use stage::{Landing, Place};
pub use stream::Stream;

/// Pinned memory that a load passes bytes through, at the most, if nothing else is said.
pub const PINNED: u64 = 512 << 20;

/// A tensor, or a part of one, and where it belongs.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The checkpoint that has it.
    pub of: &'a Opened,
    /// It.
    pub tensor: &'a Tensor,
    /// Which of the loader's devices.
    pub on: usize,
    /// The address there of as many bytes as it has.
    pub at: u64,
}

/// What loads to devices. Whoever loads more than once keeps it: pinned memory is dear to make.
#[derive(Debug)]
pub struct Loader {
    /// Dropped first: its chunks wait for the copies out of them.
    ring: Ring<Pinned>,
    /// Of each device the stream that copies to it.
    streams: Vec<Stream>,
    home: Arc<Device>,
}

impl Loader {
    /// For devices, by their numbers, with so much pinned memory at the most ([`PINNED`] is a good measure).
    pub fn new(ordinals: &[usize], pinned: u64) -> Result<Loader, Error> {
        let streams = ordinals.iter().map(|&ordinal| Device::at(ordinal)?.stream());
        let streams = streams.collect::<Result<Vec<_>, Error>>()?;
        let home = match streams.first() {
            Some(first) => Arc::clone(first.device()),
            None => Device::at(0)?,
        };
        let chunks = usize::try_from(pinned / BUFFER as u64).unwrap_or(usize::MAX);
        Ok(Loader { streams, home, ring: Ring::new(chunks) })
    }

    fn device(&self, on: usize) -> Result<&Arc<Device>, Error> {
        let none = || Error::NoDevice { ordinal: on, count: self.streams.len() };
        self.streams.get(on).map(Stream::device).ok_or_else(none)
    }

    /// Its devices.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &Arc<Device>> {
        self.streams.iter().map(Stream::device)
    }

    /// Loads tensors, each into memory of its own on one of the devices.
    pub fn load(
        &self,
        tensors: &[(&Opened, &Tensor)],
        on: usize,
    ) -> Result<(Vec<Memory>, Report), Error> {
        let device = self.device(on)?;
        let memory = tensors.iter().map(|(_, tensor)| device.memory(tensor.bytes.len() as usize));
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        let wanted = tensors.iter().zip(&memory);
        let wanted =
            wanted.map(|((of, tensor), memory)| Wanted { of, tensor, on, at: memory.at() });
        // SAFETY: the memory was made for this, as long as what is loaded into it, and is kept until it is there.
        #[allow(unsafe_code)]
        let report = unsafe { self.load_into(wanted, &[], &AtomicBool::new(false), None) }?;
        Ok((memory, report))
    }

    /// Loads tensors, each to its address, until it is done or whoever wants it sets `stop`. What is given to
    /// `users` after this returns finds the bytes there, and what was given to them before is over when the
    /// first byte is written; without any the bytes are there when this returns. After an error what is there is
    /// of no worth, and nothing is written any more.
    ///
    /// # Safety
    ///
    /// At each address must be as many bytes of memory of that device as the tensor has, the caller's alone
    /// until the load is over for all who use it; each device whose memory was used by work that may not be over
    /// needs the stream of that work among the users.
    #[allow(unsafe_code)]
    pub unsafe fn load_into<'a>(
        &self,
        wanted: impl IntoIterator<Item = Wanted<'a>>,
        users: &[Stream],
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<Report, Error> {
        let wanted: Vec<Wanted<'a>> = wanted.into_iter().collect();
        wanted.iter().try_for_each(|wanted| self.device(wanted.on).map(|_| ()))?;
        for user in users {
            let before = user.mark()?;
            self.streams.iter().try_for_each(|stream| stream.wait_for(&before))?;
        }
        let landing = Landing { ring: &self.ring, streams: &self.streams, home: &self.home };
        let wanted = wanted.into_iter().map(|Wanted { of, tensor, on, at }| {
            (of, tensor, Place { on, at, len: tensor.bytes.len() })
        });
        let loaded = loader::load_by(wanted, &landing, stop, threads).map_err(Error::from);
        let over = loaded.and_then(|report| self.over_for(users).map(|()| report));
        if over.is_err() {
            // Whoever has the memory may give it to others from here on.
            for stream in &self.streams {
                let _ = stream.finish();
            }
        }
        over
    }

    /// Has those who use what was loaded wait for it.
    fn over_for(&self, users: &[Stream]) -> Result<(), Error> {
        if users.is_empty() {
            return self.streams.iter().try_for_each(Stream::finish);
        }
        for stream in &self.streams {
            let over = stream.mark()?;
            users.iter().try_for_each(|user| user.wait_for(&over))?;
        }
        Ok(())
    }

    /// Gives its pinned memory back to the system, when the copies out of it are over.
    pub fn trim(&self) {
        drop(self.ring.drain());
    }
}
