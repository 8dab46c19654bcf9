//! Chunks of device memory that storage writes to.
//!
//! In: a device. Out: chunks for a ring, each registered once, as long as it is there.

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::Missing;
use super::library::Session;
use crate::cuda::chunk_lease::{Busy, Passage};
use crate::cuda::driver::Device;
use crate::cuda::ring::Chunk;
use crate::cuda::{Error, Memory, Stream};
use crate::loader::BUFFER;

/// What a device's memory is mapped in for others to write to: chunks that begin elsewhere would be read by way of
/// buffers of the library. Drivers give memory of this size so.
const ALIGNMENT: u64 = 64 << 10;

/// A chunk of device memory that storage writes to.
#[derive(Debug)]
pub struct Registered {
    session: Arc<Session>,
    memory: ManuallyDrop<Memory>,
    at: u64,
    busy: Busy,
}

impl Registered {
    /// One on this device.
    pub fn on(device: &Arc<Device>, session: &Arc<Session>) -> Result<Registered, Missing> {
        let missing = |error: Error| Missing::Memory { why: error.to_string() };
        let mut memory = device.memory(BUFFER).map_err(missing)?;
        if !memory.at().is_multiple_of(ALIGNMENT) {
            drop(memory);
            memory = device.memory(BUFFER + ALIGNMENT as usize).map_err(missing)?;
        }
        let at = memory.at().next_multiple_of(ALIGNMENT);
        let _entered = device.enter().map_err(missing)?;
        session.register_memory(at, BUFFER)?;
        let (session, memory) = (Arc::clone(session), ManuallyDrop::new(memory));
        Ok(Registered { session, memory, at, busy: Busy::default() })
    }

    /// Where it begins.
    pub fn at(&self) -> u64 {
        self.at
    }
}

impl Passage for Registered {
    fn busy(&mut self) -> &mut Busy {
        &mut self.busy
    }

    unsafe fn copy(&mut self, at: usize, len: usize, by: &Stream, to: u64) -> Result<(), Error> {
        debug_assert!(at + len <= BUFFER, "a piece leads out of its chunk");
        // SAFETY: the caller's word for the address; the chunk is there until its marks are over.
        unsafe { by.copy_within(self.at + at as u64, len, to) }
    }
}

impl Chunk for Registered {
    type Fault = Error;

    fn is_idle(&self) -> Result<bool, Error> {
        self.busy.is_over()
    }

    fn wait(&self) -> Result<(), Error> {
        self.busy.wait()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // A process that was forked has nothing to give back.
        if !self.session.is_here() {
            return;
        }
        if self.wait().is_ok()
            && let Ok(_entered) = self.memory.device().enter()
            && self.session.deregister_memory(self.at).is_ok()
        {
            // SAFETY: this is the end of it.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            // Memory that may still be read, or be written to, nobody else must be given; and the library stays open.
            std::mem::forget(Arc::clone(&self.session));
        }
    }
}
