//! The memory of the devices and of the host: the sides of a copy, their checks, and the moving of bytes.

use crate::device_memory::DeviceMemory;
use crate::host_memory::{HostKind, HostMemory};

/// A side of a copy.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    Device(u64),
    Host(usize),
}

#[derive(Default)]
pub struct Memory {
    pub device: DeviceMemory,
    pub host: HostMemory,
}

impl Memory {
    /// The side of a copy at an address of unknown kind.
    pub fn side(&self, address: u64) -> Side {
        match self.device.is_device_address(address) {
            true => Side::Device(address),
            false => Side::Host(address as usize),
        }
    }

    /// The side that an integrated device sees: pinned memory is at the host's address.
    pub fn side_of_integrated(&self, side: Side, bytes: usize) -> Side {
        let Side::Device(address) = side else { return side };
        let is_pinned = || matches!(self.host.kind(address as usize, bytes), HostKind::Pinned(..));
        match !self.device.is_device_address(address) && is_pinned() {
            true => Side::Host(address as usize),
            false => side,
        }
    }

    /// Whether one side of a copy is pageable; otherwise a description of the fault.
    pub fn check(&self, side: Side, bytes: usize, current: u64) -> Result<bool, String> {
        match side {
            Side::Device(address) => {
                self.check_device(address, bytes, current, current).map(|()| false)
            }
            Side::Host(address) if self.device.is_device_address(address as u64) => {
                Err(format!("{address:#x} is of the device, where a place in host memory is meant"))
            }
            Side::Host(address) => match self.host.kind(address, bytes) {
                HostKind::Wrong(words) => Err(words),
                kind => Ok(kind == HostKind::Pageable),
            },
        }
    }

    /// Checks that a range is device memory of a context; otherwise a description of the fault.
    pub fn check_device(
        &self,
        address: u64,
        bytes: usize,
        context: u64,
        current: u64,
    ) -> Result<(), String> {
        let (base, one) = self.device.find(address, bytes)?;
        if one.ends {
            return Err(format!("the device memory at {base:#x} was given back by cuMemFreeAsync"));
        }
        if one.context != context {
            let meant = if context == current { "current context" } else { "context named" };
            return Err(format!("the device memory at {base:#x} is not of the {meant}"));
        }
        Ok(())
    }

    /// Copies bytes; otherwise a description of the fault.
    pub fn copy(&mut self, to: Side, from: Side, bytes: usize) -> Result<(), String> {
        match (to, from) {
            (Side::Device(to), Side::Device(from)) => {
                let taken = self.device.bytes(from, bytes)?.to_vec();
                self.device.bytes_mut(to, bytes)?.copy_from_slice(&taken);
            }
            (Side::Device(to), Side::Host(from)) => {
                let place = self.device.bytes_mut(to, bytes)?.as_mut_ptr();
                // SAFETY: the place has so many bytes, and is no memory that a caller can know. By the
                // interface so many can be read at `from` until the copy is done; that pinned memory is
                // still there was resolved to.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, place, bytes) };
            }
            (Side::Host(to), Side::Device(from)) => {
                let place = self.device.bytes(from, bytes)?.as_ptr();
                // SAFETY: as above, the other way.
                unsafe { std::ptr::copy_nonoverlapping(place, to as *mut u8, bytes) };
            }
            (Side::Host(to), Side::Host(from)) => {
                // SAFETY: by the interface so many bytes can be read at the one and written at the other.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            }
        }
        Ok(())
    }
}
