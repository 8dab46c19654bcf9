//! Memory of devices, and memory of the host that they read by themselves.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result;

use super::Error;
use super::chunk_lease::{Busy, Passage};
use super::driver::{Device, Handle, words};
use super::ring::Chunk;
use super::stream::Stream;

/// Memory of the host that every context can use, whichever it was made in.
const PORTABLE: u32 = 1;

impl Device {
    /// A chunk of memory that it can read by itself.
    pub fn pinned(self: &Arc<Self>, len: usize) -> Result<Pinned, Error> {
        let _entered = self.enter()?;
        // SAFETY: what is allocated belongs to the chunk alone.
        let at = unsafe { result::malloc_host(len, PORTABLE) }
            .map_err(|e| Error::Pinned { ordinal: self.ordinal(), why: words(e) })?;
        // So that whoever reads it before it was filled reads nothing of another program.
        // SAFETY: it is `len` bytes, and nobody else has them.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, len) };
        Ok(Pinned { device: Arc::clone(self), at: Handle(at), len, busy: Busy::default() })
    }

    /// Memory on the device, of no known content.
    pub fn memory(self: &Arc<Self>, len: usize) -> Result<Memory, Error> {
        if len == 0 {
            return Ok(Memory { device: Arc::clone(self), at: 0, len });
        }
        let _entered = self.enter()?;
        // SAFETY: what is allocated belongs to the memory alone.
        let at =
            unsafe { result::malloc_sync(len) }.map_err(|e| self.no_room(len, "cuMemAlloc", e))?;
        Ok(Memory { device: Arc::clone(self), at, len })
    }
}

/// Memory of the host that devices read by themselves.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    at: Handle<*mut c_void>,
    len: usize,
    busy: Busy,
}

impl Pinned {
    /// Its bytes, to fill. Only of a chunk that is idle.
    pub fn bytes(&mut self) -> &mut [u8] {
        debug_assert!(self.busy.is_free(), "a chunk is filled while it may be read");
        // SAFETY: it is that long, it was zeroed, and it is this chunk's alone; no copy out of it is under way.
        unsafe { std::slice::from_raw_parts_mut(self.at.0.cast::<u8>(), self.len) }
    }
}

impl Passage for Pinned {
    fn busy(&mut self) -> &mut Busy {
        &mut self.busy
    }

    unsafe fn copy(&mut self, at: usize, len: usize, by: &Stream, to: u64) -> Result<(), Error> {
        let bytes = &self.bytes()[at..at + len];
        // SAFETY: the caller's word for the address; the bytes are there until the chunk's marks are over.
        unsafe { by.copy(bytes, to) }
    }
}

impl Chunk for Pinned {
    type Fault = Error;

    fn is_idle(&self) -> Result<bool, Error> {
        self.busy.is_over()
    }

    fn wait(&self) -> Result<(), Error> {
        self.busy.wait()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A device that cannot say whether it still reads it may do so: then it is left to the system.
        if self.wait().is_ok()
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: it was made here, and nobody reads it any more.
            let _ = unsafe { result::free_host(self.at.0) };
        }
    }
}

/// Memory on a device.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    at: u64,
    len: usize,
}

impl Memory {
    /// Its address on the device.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A copy of its bytes on the host.
    pub fn to_host(&self) -> Result<Vec<u8>, Error> {
        self.to_host_from(0, self.len)
    }

    /// The same of a part of it.
    pub(super) fn to_host_from(&self, start: usize, len: usize) -> Result<Vec<u8>, Error> {
        assert!(start <= self.len && len <= self.len - start, "a part lies in the whole");
        let mut bytes = vec![0; len];
        if len > 0 {
            let _entered = self.device.enter()?;
            // SAFETY: both are that long, and the memory is ours.
            unsafe { result::memcpy_dtoh_sync(&mut bytes, self.at + start as u64) }
                .map_err(|e| self.device.fault("cuMemcpyDtoH", e))?;
        }
        Ok(bytes)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Whoever had it may have given the device work that is not over: then it is left to the system.
        if self.len > 0
            && self.device.finish().is_ok()
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: it was made here, and nobody uses it any more.
            let _ = unsafe { result::free_sync(self.at) };
        }
    }
}
