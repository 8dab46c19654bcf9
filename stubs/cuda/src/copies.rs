//! Copies and memsets. They are checked when they are called, and done at once or when their stream gets to them.

use crate::codes::{self, Code, Done};
use crate::driver::Driver;
use crate::host_memory::Kind;
use crate::streams::{Place, Work};

/// The attribute of a device without memory of its own.
const INTEGRATED: i32 = 18;

impl Driver {
    /// The side of a copy at an address of unknown kind.
    pub fn place(&self, address: u64) -> Place {
        match self.device.is_device_address(address) {
            true => Place::Device(address),
            false => Place::Host(address as usize),
        }
    }

    /// The side that an address is really on: an integrated device sees pinned memory at the host's address.
    fn resolved(&self, place: Place, bytes: usize) -> Place {
        let Place::Device(address) = place else { return place };
        let device = self.contexts.device_of(self.here).unwrap_or(0);
        let is_integrated = self.settings.attribute(device, INTEGRATED) == Some(1);
        let is_pinned = || matches!(self.host.kind(address as usize, bytes), Kind::Pinned(..));
        match is_integrated && !self.device.is_device_address(address) && is_pinned() {
            true => Place::Host(address as usize),
            false => place,
        }
    }

    /// Copies before it returns, after all work that the legacy stream waits for.
    pub fn copy_now(&mut self, to: Place, from: Place, bytes: usize) -> Done {
        let [to, from] = [to, from].map(|place| self.resolved(place, bytes));
        for place in [to, from] {
            self.check(place, bytes)?;
        }
        self.finish_legacy();
        self.perform(Work::Copy { to, from, bytes });
        Ok(())
    }

    /// Queues a copy on a stream.
    pub fn copy_later(&mut self, to: Place, from: Place, bytes: usize, stream: u64) -> Done {
        let [to, from] = [to, from].map(|place| self.resolved(place, bytes));
        let mut is_pageable = false;
        for place in [to, from] {
            is_pageable |= self.check(place, bytes)?;
        }
        let stream = self.stream_here(stream)?;
        if !is_pageable || bytes == 0 {
            self.queue(stream, Work::Copy { to, from, bytes });
            return Ok(());
        }
        self.pageable += 1;
        if self.settings.pageable_is_a_fault {
            let words = "a copy given to a stream has a host side that is not pinned";
            return Err(self.fault(codes::INVALID_VALUE, words));
        }
        match (to, from) {
            // As the real one does: the bytes are read now.
            (Place::Device(to), Place::Host(from)) => {
                let mut taken = vec![0; bytes];
                // SAFETY: by the interface so many bytes can be read at `from` while the call lasts.
                unsafe {
                    std::ptr::copy_nonoverlapping(from as *const u8, taken.as_mut_ptr(), bytes)
                };
                self.queue(stream, Work::Write { to, bytes: taken });
            }
            // As the real one does: the call returns when the bytes are there.
            _ => {
                let end = self.queue(stream, Work::Copy { to, from, bytes });
                self.wait_for(end);
            }
        }
        Ok(())
    }

    /// Queues a copy from the memory of one context to that of another.
    pub fn copy_between(&mut self, [to, from]: [(u64, u64); 2], bytes: usize, stream: u64) -> Done {
        for (address, context) in [to, from] {
            self.check_device(address, bytes, context)?;
        }
        let stream = self.stream_here(stream)?;
        let [to, from] = [to, from].map(|(address, _)| Place::Device(address));
        self.queue(stream, Work::Copy { to, from, bytes });
        Ok(())
    }

    pub fn fill(&mut self, to: u64, value: u8, bytes: usize, stream: Option<u64>) -> Done {
        self.check(Place::Device(to), bytes)?;
        let work = Work::Fill { to, value, bytes };
        match stream {
            Some(stream) => {
                let stream = self.stream_here(stream)?;
                self.queue(stream, work);
            }
            None => {
                self.finish_legacy();
                self.perform(work);
            }
        }
        Ok(())
    }

    /// A stream of the current context.
    pub fn stream_here(&mut self, handle: u64) -> Result<u64, Code> {
        let id = self.stream(handle)?;
        match self.streams.streams.get(&id).is_some_and(|stream| stream.context == self.here) {
            true => Ok(id),
            false => {
                let words = format!("the stream {handle:#x} is not of the current context");
                Err(self.fault(codes::INVALID_CONTEXT, words))
            }
        }
    }

    fn finish_legacy(&mut self) {
        for point in self.streams.before_legacy(self.here) {
            self.wait_for(point);
        }
    }

    /// Checks one side of a copy, and returns whether it is pageable.
    fn check(&mut self, place: Place, bytes: usize) -> Result<bool, Code> {
        let wrong = match place {
            Place::Device(address) => {
                return self.check_device(address, bytes, self.here).map(|()| false);
            }
            Place::Host(address) if self.device.is_device_address(address as u64) => {
                format!("{address:#x} is of the device, where a place in host memory is meant")
            }
            Place::Host(address) => match self.host.kind(address, bytes) {
                Kind::Wrong(words) => words,
                kind => return Ok(kind == Kind::Pageable),
            },
        };
        Err(self.fault(codes::INVALID_VALUE, wrong))
    }

    fn check_device(&mut self, address: u64, bytes: usize, context: u64) -> Done {
        let wrong = match self.device.find(address, bytes) {
            Ok((base, one)) if one.ends => {
                format!("the device memory at {base:#x} was given back by cuMemFreeAsync")
            }
            Ok((base, one)) if one.context != context => {
                let meant = if context == self.here { "current context" } else { "context named" };
                format!("the device memory at {base:#x} is not of the {meant}")
            }
            Ok(_) => return Ok(()),
            Err(words) => words,
        };
        Err(self.fault(codes::INVALID_VALUE, wrong))
    }

    /// Does one piece of queued work.
    pub fn perform(&mut self, work: Work) {
        let done = match work {
            Work::Copy { to, from, bytes } => self.copy(to, from, bytes),
            Work::Write { to, bytes } => {
                self.device.bytes_mut(to, bytes.len()).map(|place| place.copy_from_slice(&bytes))
            }
            Work::Fill { to, value, bytes } => {
                self.device.bytes_mut(to, bytes).map(|place| place.fill(value))
            }
            Work::Free { address } => self.free(address),
            Work::Record { event } => {
                if let Some(event) = self.streams.events.get_mut(&event) {
                    event.time = Some(std::time::Instant::now());
                }
                Ok(())
            }
            Work::Wait(_) => Ok(()),
        };
        if let Err(words) = done {
            self.sticky = Some(self.fault(codes::ILLEGAL_ADDRESS, words));
        }
    }

    fn copy(&mut self, to: Place, from: Place, bytes: usize) -> Result<(), String> {
        match (to, from) {
            (Place::Device(to), Place::Device(from)) => {
                let taken = self.device.bytes(from, bytes)?.to_vec();
                self.device.bytes_mut(to, bytes)?.copy_from_slice(&taken);
            }
            (Place::Device(to), Place::Host(from)) => {
                let place = self.device.bytes_mut(to, bytes)?.as_mut_ptr();
                // SAFETY: the place has so many bytes, and is no memory that a caller can know. By the
                // interface so many can be read at `from` until the copy is done; that pinned memory is
                // still there was resolved to.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, place, bytes) };
            }
            (Place::Host(to), Place::Device(from)) => {
                let place = self.device.bytes(from, bytes)?.as_ptr();
                // SAFETY: as above, the other way.
                unsafe { std::ptr::copy_nonoverlapping(place, to as *mut u8, bytes) };
            }
            (Place::Host(to), Place::Host(from)) => {
                // SAFETY: by the interface so many bytes can be read at the one and written at the other.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            }
        }
        Ok(())
    }

    /// Frees device memory that no queued work may need; otherwise a description of the fault.
    pub fn free(&mut self, address: u64) -> Result<(), String> {
        let (base, one) = self.device.find(address, 0)?;
        let end = base + one.len() as u64;
        if base != address {
            return Err(format!("{address:#x} is not where device memory begins"));
        }
        let is_inside = |&(place, _): &(Place, usize)| matches!(place, Place::Device(at) if (base..end).contains(&at));
        let needs = |work: &Work| {
            work.ranges().iter().any(is_inside)
                || matches!(work, Work::Free { address } if *address == base)
        };
        if let Some(who) = self.streams.needed_by(needs) {
            return Err(format!("the device memory at {address:#x} is freed and {who}"));
        }
        self.device.free(address).map_or(Ok(()), Err)
    }

    /// A description of the fault if queued work needs this pinned or registered memory.
    pub fn host_needed_by(&self, base: usize, bytes: usize) -> Option<String> {
        let is_inside = |&(place, _): &(Place, usize)| matches!(place, Place::Host(at) if (base..base + bytes).contains(&at));
        self.streams.needed_by(|work| work.ranges().iter().any(is_inside))
    }
}
